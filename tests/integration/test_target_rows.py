"""SUPPORT and SAMPLE at the target: the rows are those of the logits it would have sent, the law is the session's."""

import asyncio
from typing import Any

import numpy as np
import pytest

from outrider.law.answer import Question, answer
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams, to_law_spec
from outrider.law.rows import SupportRows
from outrider.lm.engine import Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import sample_from_message, support_from_message, to_bytes
from outrider.v1 import target_pb2
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_SAMPLE, ROW_FORMAT_SUPPORT
from tests.harness.engines import ScriptedEngine
from tests.harness.workers import RunningTarget, error_of, int32, reason, rows_of, start_target, verify_item

SPEC = SyntheticSpec(vocab_size=13, padded_vocab_size=16, order=3, context_length=256)
LAW = LawParams(temperature=0.8, top_k=9, repetition_penalty=1.2, presence_penalty=0.5, prompt_length=2)
SEED = 2**63 + 17


def compact_item(
    session_id: str,
    tokens: list[int],
    draft: list[int],
    row_format: "target_pb2.RowFormat.ValueType",
    *,
    law: LawParams | None = LAW,
    support: list[list[int]] | None = None,
    **options: Any,
) -> target_pb2.VerifyItem:
    """Support defaults to {token, token + 1} of each draft token."""
    item = verify_item(session_id, tokens, draft, **options)
    item.row_format = row_format
    if law is not None:
        item.law.CopyFrom(to_law_spec(law, SEED))
    if row_format == ROW_FORMAT_SUPPORT:
        rows = support if support is not None else [[token, (token + 1) % 13] for token in draft]
        item.support_sizes = to_bytes(int32([len(row) for row in rows]))
        item.support_ids = to_bytes(int32([token for row in rows for token in row]))
    return item


def expected(tokens: list[int], draft: list[int], item: target_pb2.VerifyItem, law: LawParams = LAW) -> Any:
    """From a fresh forward over everything."""
    engine = SyntheticEngine(SPEC)
    whole = int32(tokens + draft)
    (logits,) = engine.forward([Segment(engine.open(whole), whole, len(draft) + 1)])
    support = None
    if item.row_format == ROW_FORMAT_SUPPORT:
        support = tuple(np.frombuffer(data, np.int32) for data in (item.support_sizes, item.support_ids))
    return answer([(logits, Question(law, RoundNoise(SEED, len(tokens)), whole, support))], 13)[0]  # type: ignore[arg-type]


def check(result: target_pb2.VerifyResult, made: Any, lookahead: int) -> None:
    assert result.status.code == 0, result.status
    assert not result.HasField("logits")
    if isinstance(made, SupportRows):
        rows = support_from_message(result.support, len(made.probs), lookahead, 13)
        assert rows.probs.tolist() == made.probs.tolist()
        assert rows.tail_masses.tolist() == made.tail_masses.tolist()
        assert rows.tail_tokens.tolist() == made.tail_tokens.tolist()
    else:
        assert sample_from_message(result.sample, lookahead, 13).tolist() == made.tolist()


@pytest.mark.parametrize("row_format", [ROW_FORMAT_SUPPORT, ROW_FORMAT_SAMPLE])
async def test_rows_are_those_of_the_logits_round_after_round(row_format: Any) -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        committed, draft = [1, 2, 3], [4, 5, 6, 7]
        item = compact_item("s", committed, draft, row_format)
        check((await target.verify(item))[0], expected(committed, draft, item), 4)
        for accepted in (4, 0, 2, 1):
            committed = committed + draft[:accepted] + [8]
            draft = [9, 10, accepted]
            # The law travelled once.
            item = compact_item("s", committed, draft, row_format, law=None, new=1)
            check((await target.verify(item))[0], expected(committed, draft, item), 3)


async def test_plain_rows_have_no_support_and_one_draw() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        for row_format in (ROW_FORMAT_SUPPORT, ROW_FORMAT_SAMPLE):
            item = compact_item("s", [1, 2, 3], [], row_format)
            check((await target.verify(item))[0], expected([1, 2, 3], [], item), 0)


async def test_one_pass_answers_all_formats_laws_and_sessions() -> None:
    engine = SyntheticEngine(SPEC)
    async with start_target(engine, token_budget=4096) as target:
        laws = [LAW, LawParams(temperature=0.0), LawParams(), LawParams(top_p=0.7)]
        formats = [ROW_FORMAT_SUPPORT, ROW_FORMAT_SAMPLE, ROW_FORMAT_LOGITS]
        items = [
            compact_item(f"{index}", [1, 2, 3 + index % 5], [4, 5], formats[index % 3], law=laws[index % 4])
            for index in range(12)
        ]
        results = await target.verify(*items)
        for index, (item, result) in enumerate(zip(items, results, strict=True)):
            tokens = [1, 2, 3 + index % 5]
            if item.row_format == ROW_FORMAT_LOGITS:
                rows_of(result, 3)
            else:
                check(result, expected(tokens, [4, 5], item, laws[index % 4]), 2)


async def test_a_session_without_a_law_is_asked_for_anew() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(verify_item("s", [1, 2, 3]))
        for law in (None, LAW):
            item = compact_item("s", [1, 2, 3, 4], [5], ROW_FORMAT_SAMPLE, law=law, new=1)
            assert error_of((await target.verify(item))[0]).reason == reason("SESSION_NOT_FOUND")
        item = compact_item("s", [1, 2, 3, 4], [5], ROW_FORMAT_SAMPLE)
        check((await target.verify(item))[0], expected([1, 2, 3, 4], [5], item), 1)
        # Logits need no law, and leave it where it is.
        rows_of((await target.verify(verify_item("s", [1, 2, 3, 4, 5], new=1)))[0], 1)
        item = compact_item("s", [1, 2, 3, 4, 5, 6], [], ROW_FORMAT_SAMPLE, law=None, new=1)
        check((await target.verify(item))[0], expected([1, 2, 3, 4, 5, 6], [], item), 0)


async def test_the_law_goes_with_the_session() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(compact_item("s", [1, 2, 3], [], ROW_FORMAT_SAMPLE))
        await target.release(("s", 1))
        item = compact_item("s", [1, 2, 3, 4], [], ROW_FORMAT_SAMPLE, law=None, new=1)
        assert error_of((await target.verify(item))[0]).reason == reason("SESSION_NOT_FOUND")
        # Opened anew without a law: the old one does not come back.
        await target.verify(compact_item("s", [1, 2, 3], [], ROW_FORMAT_SAMPLE))
        await target.verify(verify_item("s", [1, 2, 3]))
        assert error_of((await target.verify(item))[0]).reason == reason("SESSION_NOT_FOUND")


async def test_reopening_with_another_law_replaces_it() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        await target.verify(compact_item("s", [1, 2, 3], [4], ROW_FORMAT_SUPPORT))
        other = LawParams(temperature=2.0)
        item = compact_item("s", [1, 2, 3], [4], ROW_FORMAT_SUPPORT, law=other)
        check((await target.verify(item))[0], expected([1, 2, 3], [4], item, other), 1)


def broken(**fields: Any) -> target_pb2.VerifyItem:
    item = compact_item("s", [1, 2, 3], [4, 5], ROW_FORMAT_SUPPORT)
    for name, value in fields.items():
        setattr(item, name, value)
    return item


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (compact_item("s", [1, 2], [3], ROW_FORMAT_SUPPORT, law=None), "law is not set"),
        (compact_item("s", [1, 2], [3], ROW_FORMAT_SAMPLE, law=LawParams(top_p=2.0)), "sampling.top_p is 2.0"),
        (broken(row_format=0), "row_format is 0"),
        (broken(row_format=9), "row_format is 9"),
        (broken(support_sizes=b"\1\0\0"), "support_sizes has 3 bytes"),
        (broken(support_sizes=to_bytes(int32([4]))), "support_sizes holds 1 sizes for 2 draft tokens"),
        (broken(support_sizes=to_bytes(int32([5, -1]))), "support_sizes holds a size outside"),
        (broken(support_sizes=to_bytes(int32([1, 2]))), "support_sizes sums to 3, with 4"),
        (broken(support_ids=to_bytes(int32([4, 13, 5, 6]))), "support_ids holds token 13"),
        (broken(support_ids=to_bytes(int32([4, 4, 5, 6]))), "support_ids holds a token twice"),
    ],
)
async def test_invalid_items_name_the_field(item: target_pb2.VerifyItem, text: str) -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        bad, good = await target.verify(item, compact_item("good", [1, 2], [3], ROW_FORMAT_SAMPLE))
        assert error_of(bad).reason == reason("INVALID_FIELD")
        assert text in error_of(bad).message
        assert good.status.code == 0


async def test_the_same_token_in_two_rows_of_support_is_no_fault() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        item = compact_item("s", [1, 2, 3], [4, 5], ROW_FORMAT_SUPPORT, support=[[4, 5], [5, 4, 0]])
        check((await target.verify(item))[0], expected([1, 2, 3], [4, 5], item), 2)


@pytest.mark.parametrize("row_format", [ROW_FORMAT_SUPPORT, ROW_FORMAT_SAMPLE])
async def test_k3_non_finite_logits_fail_their_item_alone(row_format: Any) -> None:
    def script(prefix: tuple[int, ...]) -> list[float]:
        return [float("nan") if 9 in prefix else 0.0] + [1.0] * 12

    async with start_target(ScriptedEngine(script, vocab_size=13)) as target:
        items = [compact_item(f"{token}", [1, token], [3], row_format) for token in (2, 9, 4)]
        results = await target.verify(*items)
        assert [result.status.code for result in results if result.session_id != "9"] == [0, 0]
        assert error_of(results[1]).reason == reason("NON_FINITE_LOGITS")


async def _verify_many(target: RunningTarget, items: list[target_pb2.VerifyItem]) -> list[target_pb2.VerifyResult]:
    return [results[0] for results in await asyncio.gather(*(target.verify(item) for item in items))]


async def test_rows_do_not_depend_on_who_shares_the_pass() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        items = [compact_item(f"{index}", [1, index], [2, 3], ROW_FORMAT_SUPPORT) for index in range(13)]
        together = await _verify_many(target, items)
        for item, result in zip(items, together, strict=True):
            alone = (await target.verify(item))[0]
            assert alone.support == result.support
