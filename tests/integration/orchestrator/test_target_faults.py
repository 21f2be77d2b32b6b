"""G4, G6, G8, J4, K3: targets that die, return, lie, or answer with more than fits."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
import torch
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from orchestrator.links import target as target_link
from orchestrator.links.target import TargetLink
from orchestrator.records import name_at_targets
from orchestrator.stats import RoundStats
from orchestrator.tenants import Caller
from outrider.lm.engine import Segment
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import logits_message
from outrider.net.errors import OutriderError, from_rpc_error, reason_name, to_status
from outrider.observe.metrics import WorkerMetrics
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import Round
from outrider.v1.target_pb2 import (
    ROW_FORMAT_LOGITS,
    LogitsRows,
    TargetServiceGetInfoResponse,
    VerifyItem,
    VerifyRequest,
    VerifyResponse,
    VerifyResult,
)
from tests.harness.faults import (
    SPEC,
    Client,
    Counters,
    FakeTarget,
    draft_engine,
    fake_target,
    first_token,
    greedy_output,
    refused,
    target_engine,
)
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.workers import RunningTarget, eventually, reason, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000


async def crash(target: RunningTarget) -> int:
    """Cuts every connection at once, as a killed process does; returns the port, now free."""
    await target.host.server.grpc.stop(0)
    return int(target.address.rpartition(":")[2])


async def test_a_target_that_restarts_gets_the_prefix_again_and_the_output_stays() -> None:
    counters = Counters()
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        async with start_orchestrator([target.address], [draft.address], metrics=counters.metrics) as orchestrator:
            client = Client(orchestrator, ask(PROMPT, max_tokens=400, temperature=0), timeout=60)
            await client.until_tokens(30)
            async with start_target(target_engine(), port=await crash(target)) as again:
                generation = await client.finish()
                assert generation.ids == greedy_output(PROMPT, 400)
                assert generation.finish.usage.completion_tokens == 400
                await eventually(lambda: not again.service.load().open_sessions)


async def test_a_target_that_forgot_a_session_gets_the_prefix_again_in_the_same_round() -> None:
    counters = Counters()
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        async with start_orchestrator([target.address], [draft.address], metrics=counters.metrics) as orchestrator:
            client = Client(orchestrator, ask(PROMPT, max_tokens=400, temperature=0, session_id="evicted"))
            await client.until_tokens(10)
            # As the time-to-live or the pressure for pages would do it.
            record = await orchestrator.core.store.load("evicted")
            assert record is not None
            await target.release((name_at_targets(record), record.epoch))
            generation = await client.finish()
            assert generation.ids == greedy_output(PROMPT, 400)
            assert counters.read()["outrider.prefix_resent"] == 1


class Forgetful(FakeTarget):
    """Answers no call, and says that it is going once there was one."""

    async def Verify(self, request: VerifyRequest, context: Any) -> VerifyResponse:
        self.calls.append(request)
        return await asyncio.get_running_loop().create_future()

    async def GetInfo(self, request: Any, context: Any) -> TargetServiceGetInfoResponse:
        if self.calls:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it is going")
        return await super().GetInfo(request, context)


async def test_a_call_that_a_target_has_lost_is_not_waited_for_when_there_is_no_connection() -> None:
    async with fake_target(lambda _: VerifyResponse(), Forgetful) as lost, start_target(target_engine()) as good:
        async with start_orchestrator([lost.address, good.address]) as orchestrator:
            prompts = [(index, 1) for index in range(4)]
            clients = [Client(orchestrator, ask(prompt, max_tokens=10, temperature=0)) for prompt in prompts]
            for client, prompt in zip(clients, prompts, strict=True):
                assert (await client.finish()).ids == greedy_output(prompt, 10)
            assert lost.calls


def count_whole_prefixes(link: TargetLink) -> Counter[str]:
    """By session: how many of the items that the link is given from now on carry all committed tokens."""
    counts: Counter[str] = Counter()
    verify = link.verify

    async def counting(item: VerifyItem, caller: Caller, stats: RoundStats) -> VerifyResult:
        counts[item.session_id] += len(item.prefix_tokens) == 4 * item.base_length
        return await verify(item, caller, stats)

    link.verify = counting  # type: ignore[method-assign]
    return counts


async def test_g4_one_of_several_targets_dies_and_its_sessions_move_at_the_price_of_one_prefix_each() -> None:
    async with start_target(target_engine()) as first, start_target(target_engine()) as second:
        async with (
            start_draft(draft_engine()) as draft,
            start_orchestrator([first.address, second.address], [draft.address]) as orchestrator,
        ):
            prompts = [(index, 9) for index in range(8)]
            clients = [
                Client(orchestrator, ask(prompt, max_tokens=300, temperature=0), timeout=60) for prompt in prompts
            ]
            for client in clients:
                await client.until_tokens(5)
            assert [link.sessions for link in orchestrator.core.targets.links] == [4, 4]
            whole = count_whole_prefixes(orchestrator.core.targets.links[1])
            await crash(first)
            for client, prompt in zip(clients, prompts, strict=True):
                assert (await client.finish()).ids == greedy_output(prompt, 300)
            await eventually(lambda: not orchestrator.core.sessions and not second.service.load().open_sessions)
            assert [link.sessions for link in orchestrator.core.targets.links] == [0, 0]
            assert sorted(whole.values()) == [0, 0, 0, 0, 1, 1, 1, 1]


async def test_without_any_target_a_stream_ends_with_a_status_within_the_failover_time() -> None:
    async with start_target(target_engine()) as target:
        async with start_orchestrator([target.address], failover_timeout=0.5) as orchestrator:
            client = Client(orchestrator, ask(PROMPT, max_tokens=LONG))
            await client.until_tokens(5)
            await crash(target)
            await refused(client.finish(), "NO_WORKER", grpc.StatusCode.UNAVAILABLE)
            await eventually(lambda: not orchestrator.core.sessions)
            error = await refused(orchestrator.generate(ask(PROMPT)), "NO_WORKER", grpc.StatusCode.UNAVAILABLE)
            assert error.retry_after


async def test_a_release_that_fails_does_not_take_the_target_out_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_link, "RELEASE_TIMEOUT", 1e-9)
    async with start_target(target_engine()) as target:
        async with start_orchestrator([target.address], failover_timeout=1) as orchestrator:
            for _ in range(3):
                assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)
                await eventually(lambda: not orchestrator.core._endings)


async def test_a_target_that_takes_shorter_blocks_takes_over_in_parity() -> None:
    async with start_target(target_engine()) as wide, start_draft(draft_engine(SPEC)) as draft:
        async with (
            start_target(target_engine(), max_lookahead=2) as narrow,
            start_orchestrator([wide.address, narrow.address], [draft.address], expect=(1, 1)) as orchestrator,
        ):
            # The request is planned while only the wide target is there.
            link = orchestrator.core.targets.links[1]
            await eventually(lambda: link.usable)
            link.usable = False
            client = Client(orchestrator, ask(PROMPT, max_tokens=300, lookahead=8, temperature=0))
            await client.until_round(lambda one: one.drafted == 8)
            link.usable = True
            await crash(wide)
            generation = await client.finish()
            assert generation.ids == greedy_output(PROMPT, 300)
            assert generation.rounds[-2].drafted == 2
            assert generation.accepted == generation.drafted


Answer = Callable[[VerifyItem], VerifyResult]


def answering(answer: Answer) -> Callable[[VerifyRequest], VerifyResponse]:
    return lambda request: VerifyResponse(results=[answer(item) for item in request.items])


def rows(item: VerifyItem, logits: torch.Tensor) -> VerifyResult:
    return VerifyResult(session_id=item.session_id, base_length=item.base_length, logits=logits_message(logits))


def failing(name: str) -> Answer:
    status = to_status(OutriderError(reason(name), "because"))
    return lambda item: VerifyResult(session_id=item.session_id, base_length=item.base_length, status=status)


def odd_reason(item: VerifyItem) -> VerifyResult:
    status = Status(code=13)
    status.details.add().Pack(ErrorInfo(domain="outrider", reason="UNSPECIFIED"))
    return VerifyResult(session_id=item.session_id, base_length=item.base_length, status=status)


def other_session(item: VerifyItem) -> VerifyResult:
    return VerifyResult(session_id="x", base_length=item.base_length, logits=logits_message(torch.zeros(1, 16)))


def other_round(item: VerifyItem) -> VerifyResult:
    return VerifyResult(session_id=item.session_id, base_length=1, logits=logits_message(torch.zeros(1, 16)))


def half_a_row(item: VerifyItem) -> VerifyResult:
    result = rows(item, torch.zeros(1, 16))
    result.logits.data = result.logits.data[:31]
    return result


# What a target answers, and for how many calls the orchestrator listens.
NONSENSE: dict[str, tuple[Answer | None, int]] = {
    "no results": (None, 1),
    "another session": (other_session, 1),
    "another round": (other_round, 1),
    "no rows": (lambda item: rows(item, torch.zeros(0, 16)), 1),
    "a row too many": (lambda item: rows(item, torch.zeros(2, 16)), 1),
    "half a row": (half_a_row, 1),
    "no logits": (lambda item: VerifyResult(session_id=item.session_id, base_length=item.base_length), 1),
    "a smaller vocabulary": (lambda item: rows(item, torch.zeros(1, 8)), 1),
    "the padded vocabulary": (lambda item: rows(item, torch.zeros(1, 32)), 1),
    "an empty vocabulary": (lambda item: rows(item, torch.zeros(1, 0)), 1),
    "lost for ever": (failing("SESSION_NOT_FOUND"), 4),
    "mismatch for ever": (failing("PREFIX_MISMATCH"), 4),
    "the item is wrong": (failing("INVALID_FIELD"), 1),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_g8_a_target_that_answers_nonsense_ends_the_session_at_once(name: str) -> None:
    answer, calls = NONSENSE[name]
    behaviour = answering(answer) if answer else lambda _: VerifyResponse()
    async with fake_target(behaviour) as target, start_orchestrator([target.address]) as orchestrator:
        await refused(orchestrator.generate(ask(PROMPT)), "NO_PROGRESS", grpc.StatusCode.INTERNAL)
        assert len(target.calls) == calls


async def test_g6_a_target_that_fails_while_its_health_is_well_is_left_for_another() -> None:
    async with fake_target(answering(failing("ENGINE_FAILED"))) as bad, start_target(target_engine()) as good:
        async with start_orchestrator([bad.address, good.address]) as orchestrator:
            prompts = [(index, 9) for index in range(4)]
            generations = await asyncio.gather(
                *(orchestrator.generate(ask(prompt, temperature=0)) for prompt in prompts)
            )
            assert [one.ids for one in generations] == [greedy_output(prompt, 20) for prompt in prompts]
            # Each session that began there tried it once; nothing is booked there any more.
            assert 1 <= len(bad.calls) <= 4
            await eventually(lambda: not orchestrator.core.sessions and not good.service.load().open_sessions)
            assert [link.sessions for link in orchestrator.core.targets.links] == [0, 0]


@pytest.mark.parametrize("answer", [failing("ENGINE_FAILED"), odd_reason, failing("DRAINING"), failing("NO_WORKER")])
async def test_g8_a_target_that_keeps_failing_is_tried_a_few_times_and_no_longer_than_the_failover_time(
    answer: Answer,
) -> None:
    async with fake_target(answering(answer)) as target:
        async with start_orchestrator([target.address], failover_timeout=0.4) as orchestrator:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await orchestrator.generate(ask(PROMPT))
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            assert 2 <= len(target.calls) <= 6
            await eventually(lambda: not orchestrator.core.sessions)


async def test_g8_a_wish_to_be_asked_again_much_later_is_no_wait_beyond_the_failover_time() -> None:
    status = to_status(OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_after=1e6))

    def full(item: VerifyItem) -> VerifyResult:
        return VerifyResult(session_id=item.session_id, base_length=item.base_length, status=status)

    async with fake_target(answering(full)) as target:
        async with start_orchestrator([target.address], failover_timeout=0.3) as orchestrator:
            await refused(orchestrator.generate(ask(PROMPT)), "QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert len(target.calls) == 2


def ruined(kind: str, row: torch.Tensor) -> torch.Tensor:
    row = row.clone()
    if kind == "nan":
        row[:] = torch.nan
    elif kind == "one nan":
        row[:, 3] = torch.nan
    elif kind == "one inf":
        row[:, 3] = torch.inf
    else:
        row[:] = -torch.inf
    return row


@pytest.mark.parametrize("kind", ["nan", "one nan", "one inf", "all -inf"])
async def test_k3_rows_that_are_no_law_end_their_session_and_no_other(kind: str) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader, model = InMemoryMetricReader(), target_engine()

    def ruin(segments: Sequence[Segment], logits: list[torch.Tensor]) -> list[torch.Tensor]:
        sick = [first_token(segment) == 15 and segment.sequence.length > 12 for segment in segments]
        return [ruined(kind, row) if bad else row for row, bad in zip(logits, sick, strict=True)]

    model.edit = ruin
    async with (
        start_target(model, metrics=WorkerMetrics("target", MeterProvider([reader]))) as target,
        start_draft(draft_engine()) as draft,
        start_orchestrator([target.address], [draft.address], draft_timeout=20) as orchestrator,
    ):
        sick = Client(orchestrator, ask((15, 1), max_tokens=LONG, seed=1))
        prompts = [(index, 1) for index in range(3)]
        well = [orchestrator.generate(ask(prompt, max_tokens=60, temperature=0)) for prompt in prompts]
        error, *outputs = await asyncio.gather(
            refused(sick.finish(), "NON_FINITE_LOGITS", grpc.StatusCode.INTERNAL), *well
        )
        assert "NaN, infinite" in error.message
        # Every token came from a round before, and none was made of the ruined row.
        assert 1 <= len(sick.generation.ids) <= 12
        assert all(0 <= token < 16 for token in sick.generation.ids)
        assert [one.ids for one in outputs] == [greedy_output(prompt, 60) for prompt in prompts]
        data = reader.get_metrics_data()
        points = [
            point.value  # type: ignore[union-attr]
            for scope in data.resource_metrics[0].scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if metric.name == "outrider.target.non_finite_logits"
        ]
        assert points == [1]
        assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)


async def test_k3_a_law_that_the_request_itself_made_empty_is_the_requests_fault() -> None:
    async with start_target(target_engine()) as target, start_orchestrator([target.address]) as orchestrator:
        everything = dict.fromkeys(range(16), -100.0)
        error = await refused(orchestrator.generate(ask(PROMPT, logit_bias=everything)), "INVALID_FIELD")
        assert "leave no token" in error.message


LARGE = SyntheticSpec(vocab_size=152_064, context_length=32_768, order=1)


async def test_j4_rows_of_megabytes_and_prompts_of_twenty_thousand_tokens_pass() -> None:
    def megabytes(one: Round) -> bool:
        return one.drafted == 8 and one.wire_bytes > 9 * 4 * LARGE.vocab_size

    async with start_target(target_engine(LARGE)) as target, start_draft(draft_engine(LARGE)) as draft:
        async with start_orchestrator(
            [target.address], [draft.address], tokenizer="synthetic:vocab_size=152064", draft_timeout=20
        ) as orchestrator:
            prompt = [index * 7 % LARGE.vocab_size for index in range(20_000)]
            generation = await orchestrator.generate(
                ask(prompt, max_tokens=12, lookahead=8, temperature=0, row_format=ROW_FORMAT_LOGITS)
            )
            assert generation.ids == greedy_output(prompt[-1:], 12, LARGE)
            assert any(megabytes(one) for one in generation.rounds)
            assert generation.accepted == generation.drafted
            # Thousands of new tokens go in chunks, not in one pass.
            assert generation.rounds[0].target_passes >= 20_000 // 512


async def test_j4_a_request_over_the_limit_is_refused_with_its_size() -> None:
    async with start_target(target_engine()) as target, start_orchestrator([target.address]) as orchestrator:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await orchestrator.generate(ask([1] * (9 << 20)))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "8388608" in str(failure.value.details())
        assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)


async def test_j4_an_answer_over_the_limit_is_an_error_and_no_retry_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.net import channel

    def large(item: VerifyItem) -> VerifyResult:
        result = VerifyResult(session_id=item.session_id, base_length=item.base_length)
        result.logits.CopyFrom(LogitsRows(data=bytes(1 << 20)))
        return result

    options = channel._options
    monkeypatch.setattr(channel, "_options", lambda tls, _max_receive_bytes: options(tls, 1 << 19))
    async with fake_target(answering(large)) as target, start_orchestrator([target.address]) as orchestrator:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await orchestrator.generate(ask(PROMPT))
        error = from_rpc_error(failure.value)
        assert error is not None
        assert reason_name(error.reason) == "NO_PROGRESS"
        assert "larger than max" in error.message
        assert len(target.calls) == 1
