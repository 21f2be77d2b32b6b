"""More than there is room for: who waits, who is refused, and who is served beside whom."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from orchestrator.batcher import _Waiting
from orchestrator.tenants import TenantLimits, Tenants, by_metadata
from outrider.v1.orchestrator_pb2 import FINISH_REASON_UNSPECIFIED, GetSessionRequest, ResumeRequest
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, VerifyResponse
from tests.harness.engines import DEADLINE
from tests.harness.faults import (
    VOCAB,
    Client,
    HookedEngine,
    draft_engine,
    greedy_output,
    refused,
    small_window,
    target_engine,
)
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import eventually, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000
TENANT = "x-tenant"


@asynccontextmanager
async def serving(
    *, copying: bool = False, **settings: object
) -> AsyncIterator[tuple[RunningOrchestrator, HookedEngine]]:
    """A target and an orchestrator; `copying` drafts long blocks by prompt lookup: much output in little time."""
    model = target_engine()
    lookahead = 64 if copying else 0
    settings = {"max_lookahead": 64, "lookahead": lookahead, "draft_timeout": 20, "queue_timeout": 60, **settings}
    async with (
        start_target(model) as target,
        start_draft(draft_engine(), proposers="prompt_lookup") as draft,
        start_orchestrator([target.address], [draft.address] if copying else [], **settings) as orchestrator,  # type: ignore[arg-type]
    ):
        try:
            yield orchestrator, model
        finally:
            model.let_go()


def calling(
    orchestrator: RunningOrchestrator, tenant: str, prompt: Sequence[int] = PROMPT, tokens: int = LONG
) -> Client:
    """A call of a tenant."""
    return Client(orchestrator, ask(prompt, max_tokens=tokens, temperature=0), stub=_Named(orchestrator, tenant))


class _Named:
    """A stub whose calls name their tenant."""

    def __init__(self, orchestrator: RunningOrchestrator, tenant: str) -> None:
        self._stub, self._metadata = orchestrator.stub, [(TENANT, tenant)]

    def Generate(self, request: object, timeout: float) -> object:
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)  # type: ignore[arg-type]


async def test_a_request_waits_for_a_place_and_is_served_as_if_there_had_been_one() -> None:
    async with serving(max_sessions=1) as (orchestrator, _):
        first = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0))
        await first.until_tokens(1)
        second = asyncio.create_task(orchestrator.generate(ask(PROMPT, temperature=0)))
        admission = orchestrator.core.admission
        await eventually(lambda: admission.waiting == 1)
        assert admission.sessions == 1
        first.cancel()
        assert (await second).ids == greedy_output(PROMPT, 20)
        await eventually(lambda: not admission.sessions)
        assert admission.tokens == 0


async def test_h1_a_request_whose_deadline_passes_in_the_queue_never_begins() -> None:
    async with serving(max_sessions=1) as (orchestrator, _):
        first = Client(orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0))
        await first.until_tokens(1)
        late = Client(orchestrator, ask(PROMPT, session_id="late"), timeout=3.0)
        await eventually(lambda: orchestrator.core.admission.waiting == 1)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await late.finish()
        # Whoever is first, the orchestrator or the client's own clock.
        assert failure.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        await eventually(lambda: orchestrator.core.admission.waiting == 0)
        first.cancel()
        await eventually(lambda: not orchestrator.core.sessions)
        unknown = orchestrator.stub.GetSession(GetSessionRequest(session_id="late"), timeout=DEADLINE)
        await refused(unknown, "SESSION_NOT_FOUND")


async def test_verify_calls_carry_the_deadline_of_those_who_wait_for_them() -> None:
    async with serving(verify_timeout=1e6) as (orchestrator, _):
        (link,) = orchestrator.core.targets.links
        verify, timeouts = link._stub.Verify, []

        def noted(request: object, timeout: float) -> object:
            timeouts.append(timeout)
            return verify(request, timeout=timeout)

        link._stub.Verify = noted  # type: ignore[method-assign,assignment]
        await orchestrator.generate(ask(PROMPT, max_tokens=3), deadline=50.0)
        assert len(timeouts) == 3
        # gRPC rounds a deadline up on its way, by some thousandths of it.
        assert all(0.0 < timeout <= 52.0 for timeout in timeouts), timeouts


async def test_what_waits_is_refused_when_the_orchestrator_drains_and_what_runs_ends() -> None:
    async with serving(max_sessions=1) as (orchestrator, model):
        model.hold()
        first = asyncio.create_task(orchestrator.generate(ask(PROMPT, temperature=0)))
        await model.until_in_pass()
        second = asyncio.create_task(orchestrator.generate(ask(PROMPT)))
        await eventually(lambda: orchestrator.core.admission.waiting == 1)
        draining = asyncio.create_task(orchestrator.servicer.drain(DEADLINE))
        await refused(second, "DRAINING", grpc.StatusCode.UNAVAILABLE)
        model.let_go()
        assert (await first).ids == greedy_output(PROMPT, 20)
        await draining


async def test_tenants_have_their_own_limits_by_the_metadata_that_name_them() -> None:
    tenants = Tenants(default=TenantLimits(max_sessions=1))
    async with serving(tenants=tenants, tenant_of=by_metadata(TENANT)) as (orchestrator, _):
        first = calling(orchestrator, "a")
        await first.until_tokens(1)
        second, other = calling(orchestrator, "a"), calling(orchestrator, "b")
        await other.until_tokens(1)
        await eventually(lambda: orchestrator.core.admission.waiting == 1)
        first.cancel()
        await second.until_tokens(1)
        await refused(calling(orchestrator, "x" * 129).finish(), "INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
        second.cancel()
        other.cancel()


async def test_f_a_tenant_of_four_sessions_waits_for_no_pass_of_one_of_a_hundred() -> None:
    async with (
        start_target(target_engine(), token_budget=8) as target,
        start_orchestrator([target.address], lookahead=0, tenant_of=by_metadata(TENANT)) as orchestrator,
    ):
        (link,) = orchestrator.core.targets.links
        lane, calls = link._batcher._short, []
        take = lane.take

        def noted(*limits: float) -> list[_Waiting]:
            waited = Counter(each.tenant for each in lane.waiting.values())
            batch = take(*limits)
            calls.append((waited, Counter(each.tenant for each in batch)))
            return batch

        many = [calling(orchestrator, "a", (index % 16, index // 16)) for index in range(100)]
        await asyncio.gather(*(client.until_tokens(1) for client in many))
        lane.take = noted  # type: ignore[method-assign]
        few = [calling(orchestrator, "b", (index, 1), tokens=40) for index in range(4)]
        for index, client in enumerate(few):
            assert (await client.finish()).ids == greedy_output((index, 1), 40)
        for client in many:
            client.cancel()
        beside = [(waited, taken) for waited, taken in calls if waited["b"] and waited["a"] > 8]
        assert len(beside) >= 20, calls
        # Half of each call is its, and it has never more: all that waits goes. In the order in which they came it would
        # have 4 places of 104.
        waited, taken = (sum(each[which]["b"] for each in beside) for which in (0, 1))
        assert taken >= 0.9 * waited, beside
        assert all(call.total() <= 8 for _, call in beside[2:]), beside


async def test_dense_rows_of_more_sessions_than_one_answer_holds_go_in_several_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if a message held ten rows: of 152,064 tokens it holds 434, those of 86 blocks of four.
    for module in ("orchestrator.batcher", "target_service.service"):
        monkeypatch.setattr(f"{module}.MAX_ROWS_BYTES", 10 * VOCAB * 4)
    async with serving() as (orchestrator, model):
        (link,) = orchestrator.core.targets.links
        answers, verify = [], link._stub.Verify

        async def noted(request: object, **options: float) -> VerifyResponse:
            answer = await verify(request, **options)
            answers.append(answer)
            return answer  # type: ignore[no-any-return]

        link._stub.Verify = noted  # type: ignore[method-assign,assignment]
        model.hold()
        requests = [
            ask((index % 16, index // 16), max_tokens=10, temperature=0, row_format=ROW_FORMAT_LOGITS)
            for index in range(40)
        ]
        together = [asyncio.create_task(orchestrator.generate(request)) for request in requests]
        await eventually(lambda: len(link._batcher._short.waiting) >= 20)
        model.let_go()
        for request, generation in zip(requests, together, strict=True):
            assert (await generation).ids == greedy_output(request.token_ids.ids, 10)
        assert max(len(answer.results) for answer in answers) == 10
        assert all(not result.status.code for answer in answers for result in answer.results)


async def test_h7_hundreds_of_slow_readers_are_bounded_and_none_is_ended() -> None:
    async with serving(copying=True, max_running_tokens=1 << 40) as (orchestrator, _), AsyncExitStack() as stack:
        # A connection takes about a hundred streams.
        stubs = [await stack.enter_async_context(small_window(orchestrator, 1024)) for _ in range(4)]

        def reader(index: int) -> Client:
            request = ask((index % 16, index // 16), max_tokens=LONG, temperature=0, session_id=f"r{index}")
            return Client(orchestrator, request, 300, stubs[index % 4])

        readers = [reader(index) for index in range(256)]

        async def read(messages: int) -> None:
            # All at once take a while on a busy machine, and each message has only DEADLINE with `Client.read`.
            async with asyncio.timeout(3 * DEADLINE):
                for _ in range(messages):
                    for one, message in zip(
                        readers, await asyncio.gather(*(one.call.read() for one in readers)), strict=True
                    ):
                        one.generation.add(message)

        async def committed() -> list[int]:
            states = [await orchestrator.core.store.load(f"r{index}") for index in range(256)]
            return [len(state.tokens) - state.prompt_length for state in states if state is not None]

        async def held_back() -> list[int]:
            """Returns when none gets any further."""
            before: list[int] = []
            while (now := await committed()) != before or len(now) < 256:
                before = now
                assert (await orchestrator.generate(ask(PROMPT, max_tokens=200, temperature=0))).ids
            return now

        await read(1)
        first = await held_back()
        assert max(first) < 2_000
        await read(5)
        second = await held_back()
        read_so_far = [len(one.generation.tokens) for one in readers]
        assert max(a - b for a, b in zip(second, read_so_far, strict=True)) < 2_000
        assert orchestrator.core.sessions == 256
        for index, one in enumerate(readers):
            if not index % 32:
                assert one.generation.ids == greedy_output((index % 16, index // 16), len(one.generation.ids))
            one.cancel()
        await eventually(lambda: not orchestrator.core.sessions)


async def test_h7_a_resumable_session_that_nobody_reads_ends_its_stream_and_stays() -> None:
    async with serving(copying=True, reader_timeout=1.0) as (orchestrator, _), small_window(orchestrator, 1024) as stub:
        request = ask(PROMPT, max_tokens=3_000, temperature=0, session_id="slow")
        request.resumable = True
        reader = Client(orchestrator, request, timeout=60, stub=stub)
        await eventually(lambda: orchestrator.core.sessions == 1)
        await eventually(lambda: orchestrator.core.sessions == 0)
        error = await refused(reader.finish(), "QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "Resume has the rest" in error.message
        state = await orchestrator.core.store.load("slow")
        assert state is not None
        assert state.finish_reason == FINISH_REASON_UNSPECIFIED
        rest = Client(orchestrator, ResumeRequest(session_id="slow", offset=len(reader.generation.ids)), timeout=60)
        await rest.finish()
        assert reader.generation.ids + rest.generation.ids == greedy_output(PROMPT, 3_000)
