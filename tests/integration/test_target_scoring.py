"""Verify: rows equal the model's own, whatever the cache holds; errors are per item and precise."""

import asyncio

import grpc
import numpy as np
import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from outrider.lm.engine import Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import to_bytes
from outrider.net.errors import from_rpc_error
from outrider.observe.metrics import WorkerMetrics
from outrider.v1 import target_pb2
from tests.harness.engines import ScriptedEngine, next_token_script
from tests.harness.workers import counted, error_of, int32, reason, rows_of, start_target, verify_item

SPEC = SyntheticSpec(vocab_size=13, padded_vocab_size=16, order=3, context_length=256)


def direct(tokens: list[int], rows: int) -> torch.Tensor:
    """The rows of a fresh forward over everything."""
    engine = SyntheticEngine(SPEC)
    (logits,) = engine.forward([Segment(engine.open(int32(tokens)), int32(tokens), rows)])
    return logits


async def test_plain_item_returns_one_row() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        (result,) = await target.verify(verify_item("s", [1, 2, 3]))
        assert torch.equal(rows_of(result, 1), direct([1, 2, 3], 1))
        assert (result.session_id, result.base_length) == ("s", 3)
        assert result.timing.computed_tokens == 3
        assert result.timing.passes == 1


async def test_rounds_reuse_the_accepted_part_of_the_block() -> None:
    engine = SyntheticEngine(SPEC)
    async with start_target(engine) as target:
        committed, draft = [1, 2, 3], [4, 5, 6, 7]
        await target.verify(verify_item("s", committed, draft))
        for accepted in (4, 0, 2, 1, 3):
            committed = committed + draft[:accepted] + [8]
            draft = [9, 10, accepted, 11]
            (result,) = await target.verify(verify_item("s", committed, draft, new=1))
            assert torch.equal(rows_of(result, 5), direct(committed + draft, 5))
            assert result.timing.computed_tokens == 5


async def test_longer_tail_than_needed_costs_nothing() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(verify_item("s", [1, 2, 3], [4, 5, 6]))
        (result,) = await target.verify(verify_item("s", [1, 2, 3, 4, 5, 9], [7], new=3))
        assert torch.equal(rows_of(result, 2), direct([1, 2, 3, 4, 5, 9, 7], 2))
        assert result.timing.computed_tokens == 2


async def test_a_repeated_item_gives_the_same_rows() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(verify_item("s", [1, 2, 3]))
        item = verify_item("s", [1, 2, 3, 4], [5, 6], new=1)
        (first,) = await target.verify(item)
        (second,) = await target.verify(item)
        assert first.logits == second.logits
        assert torch.equal(rows_of(second, 3), direct([1, 2, 3, 4, 5, 6], 3))


async def test_reopening_replaces_the_prefix() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(verify_item("s", [1, 2, 3, 4, 5]))
        (result,) = await target.verify(verify_item("s", [1, 2, 9, 4], [2]))
        assert torch.equal(rows_of(result, 2), direct([1, 2, 9, 4, 2], 2))
        (missing,) = await target.verify(verify_item("s", [1, 2, 3, 4, 5, 6, 7], new=1))
        assert error_of(missing).reason == reason("SESSION_NOT_FOUND")


async def test_mismatching_prefix_is_refused_and_the_session_lives_on() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(verify_item("s", [1, 2, 3, 4]))
        (wrong,) = await target.verify(verify_item("s", [1, 2, 3, 4, 5], new=1, hash_of=[1, 2, 9, 4]))
        assert error_of(wrong).reason == reason("PREFIX_MISMATCH")
        (right,) = await target.verify(verify_item("s", [1, 2, 3, 4, 5], new=1))
        assert torch.equal(rows_of(right, 1), direct([1, 2, 3, 4, 5], 1))


async def test_unknown_session_is_an_ordinary_answer() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        (result,) = await target.verify(verify_item("nobody", [1, 2, 3], new=1))
        assert error_of(result).reason == reason("SESSION_NOT_FOUND")
        assert error_of(result).code is grpc.StatusCode.NOT_FOUND


async def test_stale_epoch_is_refused_also_after_release() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(verify_item("s", [1, 2], epoch=5))
        (stale,) = await target.verify(verify_item("s", [1, 2], epoch=4))
        assert error_of(stale).reason == reason("STALE_EPOCH")
        await target.release(("s", 5))
        (gone,) = await target.verify(verify_item("s", [1, 2, 3], epoch=5, new=1))
        assert error_of(gone).reason == reason("SESSION_NOT_FOUND")
        (stale,) = await target.verify(verify_item("s", [1, 2], epoch=4))
        assert error_of(stale).reason == reason("STALE_EPOCH")


async def test_release_of_a_former_owner_is_ignored() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(verify_item("s", [1, 2], epoch=5))
        await target.release(("s", 4), ("unknown", 9))
        (result,) = await target.verify(verify_item("s", [1, 2, 3], epoch=5, new=1))
        rows_of(result, 1)


@pytest.mark.parametrize("token", [13, 20, -1, 2**31 - 1])
async def test_b3_a_draft_token_outside_the_vocabulary_fails_its_item_alone(token: int) -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        bad, good = await target.verify(verify_item("bad", [1, 2], [3, token]), verify_item("good", [1, 2], [3, 4]))
        assert error_of(bad).reason == reason("INVALID_FIELD")
        assert f"draft_tokens holds token {token}" in error_of(bad).message
        assert torch.equal(rows_of(good, 3), direct([1, 2, 3, 4], 3))


def _broken(**fields: object) -> target_pb2.VerifyItem:
    item = verify_item("s", [1, 2, 3], [4])
    for name, value in fields.items():
        setattr(item, name, value)
    return item


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (_broken(session_id=""), "session_id has 0 characters"),
        (_broken(session_id="x" * 129), "session_id has 129 characters"),
        (_broken(base_length=0), "prefix_tokens holds 3 tokens, must be 1 to base_length 0"),
        (_broken(base_length=2), "prefix_tokens holds 3 tokens"),
        (_broken(prefix_tokens=b""), "prefix_tokens holds 0 tokens"),
        (_broken(prefix_tokens=b"\0\0\0"), "prefix_tokens has 3 bytes"),
        (_broken(prefix_tokens=to_bytes(int32([1, 13, 2]))), "prefix_tokens holds token 13"),
        (_broken(draft_tokens=to_bytes(np.ones(5, np.int32))), "draft_tokens holds 5 tokens, limit 4"),
        (_broken(row_format=target_pb2.ROW_FORMAT_UNSPECIFIED), "row_format is 0"),
    ],
)
async def test_invalid_fields_name_field_and_limit(item: target_pb2.VerifyItem, message: str) -> None:
    async with start_target(SyntheticEngine(SPEC), max_lookahead=4) as target:
        bad, good = await target.verify(item, verify_item("good", [1]))
        assert error_of(bad).reason == reason("INVALID_FIELD")
        assert message in error_of(bad).message
        rows_of(good, 1)


async def test_context_is_a_limit_of_its_own() -> None:
    async with start_target(ScriptedEngine(next_token_script(8), vocab_size=8, context_length=8)) as target:
        fits, exceeds = await target.verify(
            verify_item("fits", [1] * 6, [2, 2]), verify_item("exceeds", [1] * 6, [2, 2, 2])
        )
        rows_of(fits, 3)
        assert error_of(exceeds).reason == reason("CONTEXT_EXCEEDED")


async def test_a_session_twice_in_one_call_is_refused_the_second_time() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        first, second = await target.verify(verify_item("s", [1, 2]), verify_item("s", [1, 2, 3]))
        rows_of(first, 1)
        assert error_of(second).reason == reason("INVALID_FIELD")


async def test_too_many_items_fail_the_call() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await target.verify(*(verify_item(str(index), [1]) for index in range(1025)))
        error = from_rpc_error(failure.value)
        assert error is not None
        assert error.reason == reason("INVALID_FIELD")


async def test_an_empty_call_is_answered() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        assert await target.verify() == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all -inf"])
async def test_k3_non_finite_logits_fail_their_session_alone(bad: float | str) -> None:
    def script(prefix: tuple[int, ...]) -> list[float]:
        row = [0.0, 1.0, 2.0, float("-inf")]
        if prefix[:2] == (3, 3) and len(prefix) == 4:
            row = [float("-inf")] * 4 if bad == "all -inf" else [0.0, float(bad), 1.0, 2.0]
        return row

    reader = InMemoryMetricReader()
    metrics = WorkerMetrics("target", MeterProvider([reader]))
    async with start_target(ScriptedEngine(script, vocab_size=4), metrics=metrics) as target:
        sick, well = await target.verify(verify_item("sick", [3, 3], [1, 2, 0]), verify_item("well", [1, 2], [1, 2]))
        assert error_of(sick).reason == reason("NON_FINITE_LOGITS")
        assert error_of(sick).code is grpc.StatusCode.INTERNAL
        assert rows_of(well, 3)[0].tolist() == [0.0, 1.0, 2.0, float("-inf")]
        assert counted(reader, "outrider.target.non_finite_logits") == 1
        assert counted(reader, "outrider.target.answers") == 2
        (again,) = await target.verify(verify_item("sick", [3, 3, 1], new=1))
        assert error_of(again).reason == reason("SESSION_NOT_FOUND")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_logits_travel_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    async with start_target(ScriptedEngine(lambda prefix: [0.1, 0.7, 1e-3], vocab_size=3, dtype=dtype)) as target:
        (result,) = await target.verify(verify_item("s", [1]))
        assert rows_of(result, 1).tolist() == [torch.tensor([0.1, 0.7, 1e-3]).to(dtype).float().tolist()]


async def test_messages_of_many_megabytes_pass() -> None:
    engine = SyntheticEngine(SyntheticSpec(vocab_size=50_000, order=1))
    async with start_target(engine) as target:
        (result,) = await target.verify(verify_item("s", [1] * 10, [2] * 64))
        assert len(result.logits.data) == 65 * 50_000 * 4
        assert rows_of(result, 65).shape == (65, 50_000)


async def test_an_answer_that_would_exceed_the_message_limit_is_cut_item_by_item() -> None:
    engine = SyntheticEngine(SyntheticSpec(vocab_size=50_000, order=0))
    async with start_target(engine) as target:
        results = await target.verify(*(verify_item(str(index), [1], [2] * 64) for index in range(21)))
        assert [result.status.code for result in results[:20]] == [0] * 20
        assert error_of(results[20]).reason == reason("QUEUE_FULL")


async def test_get_info_says_what_is_served() -> None:
    async with start_target(SyntheticEngine(SPEC, "synthetic:x"), max_lookahead=7, token_budget=99) as target:
        await target.verify(verify_item("s", [1]))
        info = await target.info()
        assert (info.model.model_id, info.model.vocab_size, info.model.padded_vocab_size) == ("synthetic:x", 13, 16)
        assert (info.max_lookahead, info.token_budget) == (7, 99)
        assert info.model.token_hashes == b""
        assert info.load.open_sessions == 1
        request = target_pb2.TargetServiceGetInfoRequest(include_token_hashes=True)
        full = await target.stub.GetInfo(request, timeout=5)
        assert len(full.model.token_hashes) == 13 * 4


async def test_many_callers_get_their_own_rows() -> None:
    async def session(number: int) -> None:
        committed = [number % 13, 1 + number % 7]
        for turn in range(5):
            draft = [(number + turn + index) % 13 for index in range(number % 5)]
            (result,) = await target.verify(verify_item(str(number), committed, draft, new=1 if turn else None))
            assert torch.equal(rows_of(result, len(draft) + 1), direct(committed + draft, len(draft) + 1))
            committed = [*committed, (number * turn) % 13]

    async with start_target(SyntheticEngine(SPEC), token_budget=32) as target:
        await asyncio.gather(*(session(number) for number in range(32)))
