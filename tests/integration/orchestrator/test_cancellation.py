"""H: whoever goes away takes all work along, and harms nobody else."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import CancelSessionRequest, GetSessionRequest
from tests.harness.engines import DEADLINE
from tests.harness.faults import Client, HookedEngine, draft_engine, greedy_output, refused, small_window, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import RunningDraft, RunningTarget, eventually, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000


@dataclass
class System:
    orchestrator: RunningOrchestrator
    target: RunningTarget
    draft: RunningDraft
    target_engine: HookedEngine
    draft_engine: HookedEngine

    async def until_freed(self) -> None:
        """Returns when no service holds anything of any session."""
        core, servicer = self.orchestrator.core, self.orchestrator.servicer
        await eventually(lambda: not core.sessions and not core._endings and not len(servicer.running))
        await eventually(lambda: not self.target.service.load().open_sessions and not self.target.service.queued)
        await self.draft.until_sessions(0)
        assert all(link.sessions == 0 for link in (*core.targets.links, *core.drafts.links))
        assert all(not link._told for link in core.drafts.links)

    async def state_of(self, session_id: str) -> orchestrator_pb2.GetSessionResponse:
        return await self.orchestrator.stub.GetSession(GetSessionRequest(session_id=session_id), timeout=DEADLINE)

    async def cancel(self, session_id: str) -> None:
        await self.orchestrator.stub.CancelSession(CancelSessionRequest(session_id=session_id), timeout=DEADLINE)


@asynccontextmanager
async def system(*, copying: bool = False, **settings: object) -> AsyncIterator[System]:
    """Three services; `copying` drafts long blocks by prompt lookup: much output in little time."""
    target_model, draft_model = target_engine(), draft_engine()
    lookahead = 64 if copying else 4
    settings = {"draft_timeout": 20, "max_lookahead": 64, "lookahead": lookahead, **settings}
    async with (
        start_target(target_model) as target,
        start_draft(draft_model, proposers="prompt_lookup" if copying else "model") as draft,
        start_orchestrator([target.address], [draft.address], **settings) as orchestrator,
    ):
        try:
            yield System(orchestrator, target, draft, target_model, draft_model)
        finally:
            target_model.let_go()
            draft_model.let_go()


async def test_h1_a_cancelled_call_stops_both_workers_within_the_round_and_frees_all_three() -> None:
    async with system() as one:
        client = Client(one.orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0, session_id="gone"))
        await client.until_tokens(5)
        one.target_engine.hold()
        await one.target_engine.until_in_pass()
        # The round's block is at the target, and what can be drafted ahead is there: what comes now is for nobody.
        await eventually(lambda: not one.draft.service._scheduler.busy)
        target_passes, draft_passes = one.target_engine.passes, one.draft_engine.passes
        client.cancel()
        await eventually(lambda: one.orchestrator.core.sessions == 0)
        one.target_engine.let_go()
        await one.until_freed()
        assert one.target_engine.passes == target_passes
        assert one.draft_engine.passes == draft_passes
        state = await one.state_of("gone")
        assert state.finish_reason == orchestrator_pb2.FINISH_REASON_CANCELLED


async def test_h1_a_call_that_runs_past_its_deadline_is_cancelled_everywhere() -> None:
    async with system() as one:
        one.target_engine.hold()
        client = Client(one.orchestrator, ask(PROMPT, session_id="slow"), timeout=3.0)
        await one.target_engine.until_in_pass()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.finish()
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: one.orchestrator.core.sessions == 0)
        one.target_engine.let_go()
        await one.until_freed()
        assert (await one.state_of("slow")).finish_reason == orchestrator_pb2.FINISH_REASON_CANCELLED


async def test_h2_an_internal_cancellation_in_the_orchestrator_becomes_a_status() -> None:
    async with system() as one:
        client = Client(one.orchestrator, ask(PROMPT, max_tokens=LONG, session_id="stopped"))
        await client.until_tokens(5)
        one.orchestrator.servicer.running._tasks["stopped"].cancel()
        await refused(client.finish(), "DRAINING", grpc.StatusCode.UNAVAILABLE)
        await one.until_freed()
        assert (await one.state_of("stopped")).finish_reason == orchestrator_pb2.FINISH_REASON_ERROR


async def test_h2_a_cancellation_before_the_session_exists_becomes_a_status() -> None:
    async with system() as one:
        one.target_engine.hold()
        one.orchestrator.core._planner.submit(one.target_engine.until_let_go)
        client = Client(one.orchestrator, ask(PROMPT))
        await eventually(lambda: one.orchestrator.core.sessions == 1)
        one.orchestrator.core._planner.shutdown(wait=False, cancel_futures=True)
        one.target_engine.let_go()
        await refused(client.finish(), "DRAINING", grpc.StatusCode.UNAVAILABLE)
        await one.until_freed()


async def test_h2_an_internal_cancellation_in_the_target_does_not_show() -> None:
    async with system() as one:
        client = Client(one.orchestrator, ask(PROMPT, max_tokens=30, temperature=0))
        await client.until_tokens(5)
        one.target_engine.hold()
        await one.target_engine.until_in_pass()
        (call,) = one.target.service._calls
        call.done.cancel()
        one.target_engine.let_go()
        assert (await client.finish()).ids == greedy_output(PROMPT, 30)
        await one.until_freed()


async def test_h6_random_disconnects_leave_healthy_streams_in_parity_and_nothing_behind() -> None:
    dice = random.Random(6)

    async def leave(one: System, prompt: tuple[int, ...], tokens: int) -> None:
        client = Client(one.orchestrator, ask(prompt, max_tokens=LONG, lookahead=dice.randint(0, 8)))
        await client.until_tokens(tokens)
        client.cancel()

    async def healthy(one: System, prompt: tuple[int, ...]) -> None:
        for _ in range(3):
            generation = await one.orchestrator.generate(ask(prompt, max_tokens=60, temperature=0))
            assert generation.ids == greedy_output(prompt, 60)

    async with system() as one, asyncio.TaskGroup() as group:
        for index in range(8):
            group.create_task(healthy(one, (index, 1, 2)))
        for _ in range(15):
            leavers = [leave(one, (dice.randrange(16), 3), dice.choice([0, 0, 1, 5, 20])) for _ in range(10)]
            await asyncio.gather(*leavers)
    # The group ends before the system does.


async def test_h6_nothing_is_left_behind_by_disconnects() -> None:
    async with system() as one:
        clients = [Client(one.orchestrator, ask(PROMPT, max_tokens=LONG)) for _ in range(30)]
        for index, client in enumerate(clients):
            await client.until_tokens(index % 7)
            client.cancel()
        await one.until_freed()
        assert (await one.orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)


async def test_cancel_session_ends_the_stream_with_its_reason_and_is_idempotent() -> None:
    async with system() as one:
        client = Client(one.orchestrator, ask(PROMPT, max_tokens=LONG, session_id="victim"))
        await client.until_tokens(5)
        running = await one.state_of("victim")
        assert running.state == orchestrator_pb2.SESSION_STATE_RUNNING
        assert running.prompt_tokens == len(PROMPT)
        await one.cancel("victim")
        await refused(client.finish(), "SESSION_CANCELLED", grpc.StatusCode.ABORTED)
        # What the client was told, everybody is told.
        ended = await one.state_of("victim")
        await one.until_freed()
        await one.cancel("victim")
        assert ended.state == orchestrator_pb2.SESSION_STATE_FINISHED
        assert ended.finish_reason == orchestrator_pb2.FINISH_REASON_CANCELLED


async def test_cancel_session_during_the_prompt_does_not_wait_for_it() -> None:
    async with system() as one:
        one.target_engine.hold()
        client = Client(one.orchestrator, ask(PROMPT, session_id="victim"))
        await client.read()
        await one.target_engine.until_in_pass()
        await one.cancel("victim")
        await refused(client.finish(), "SESSION_CANCELLED", grpc.StatusCode.ABORTED)
        one.target_engine.let_go()
        await one.until_freed()


async def test_cancel_session_of_another_replica_ends_it_at_its_next_commit() -> None:
    async with system() as one:
        client = Client(one.orchestrator, ask(PROMPT, max_tokens=LONG, session_id="victim"))
        await client.until_tokens(5)
        # Another replica would set nothing but the flag in the store.
        assert await one.orchestrator.core.store.request_cancel("victim")
        await refused(client.finish(), "SESSION_CANCELLED", grpc.StatusCode.ABORTED)
        await one.until_freed()
        assert (await one.state_of("victim")).finish_reason == orchestrator_pb2.FINISH_REASON_CANCELLED


async def test_unknown_sessions_are_not_found() -> None:
    async with system() as one:
        await refused(one.state_of("nobody"), "SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND)
        await refused(one.cancel("nobody"), "SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND)


@pytest.mark.parametrize("session_id", ["", "a b", "x" * 129, "x" * 1_000_000, "}{", "ü"])
async def test_l4_a_session_id_that_cannot_be_one_is_refused_by_name(session_id: str) -> None:
    async with system() as one:
        for call in (one.state_of, one.cancel):
            error = await refused(call(session_id), "INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
            assert error.message.startswith("session_id")


async def test_get_session_shows_what_was_delivered() -> None:
    async with system() as one:
        generation = await one.orchestrator.generate(ask(PROMPT, session_id="done", max_tokens=9))
        state = await one.state_of("done")
        assert state.generated_tokens == b"".join(token.to_bytes(4, "little") for token in generation.ids)
        assert (state.epoch, state.prompt_tokens) == (1, 3)
        assert state.finish_reason == orchestrator_pb2.FINISH_REASON_LENGTH
        assert state.expire_time.seconds > 0


async def test_a_session_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    async with system() as one:
        client = Client(one.orchestrator, ask(PROMPT, max_tokens=200, temperature=0, session_id="twin"))
        await client.until_tokens(3)
        again = one.orchestrator.generate(ask(PROMPT, session_id="twin"))
        await refused(again, "SESSION_EXISTS", grpc.StatusCode.ALREADY_EXISTS)
        assert (await client.finish()).ids == greedy_output(PROMPT, 200)
        again = one.orchestrator.generate(ask(PROMPT, session_id="twin"))
        await refused(again, "SESSION_EXISTS", grpc.StatusCode.ALREADY_EXISTS)
        await one.until_freed()


async def test_admission_beyond_the_limit_is_refused_with_a_time_and_heals() -> None:
    async with system(max_sessions=3, max_waiting=0) as one:
        clients = [Client(one.orchestrator, ask(PROMPT, max_tokens=LONG)) for _ in range(3)]
        for client in clients:
            await client.until_tokens(1)
        error = await refused(one.orchestrator.generate(ask(PROMPT)), "QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.retry_after
        assert "3" in error.message
        clients[0].cancel()
        await eventually(lambda: one.orchestrator.core.sessions == 2)
        assert len((await one.orchestrator.generate(ask(PROMPT))).ids) == 20
        for client in clients:
            client.cancel()
        await one.until_freed()


async def test_an_unexpected_failure_has_a_status_without_its_details() -> None:
    async with system() as one:

        async def outcome(*_: object) -> None:
            raise ZeroDivisionError("secret")

        one.orchestrator.core.services.judge.outcome = outcome  # type: ignore[method-assign,assignment]
        error = await refused(one.orchestrator.generate(ask(PROMPT)), "ENGINE_FAILED")
        assert "secret" not in error.message
        assert "ZeroDivision" not in error.message
        await one.until_freed()


async def test_h7_a_reader_that_does_not_read_holds_back_its_own_session_only() -> None:
    async with system(copying=True) as one, small_window(one.orchestrator) as stub:
        request = ask(PROMPT, max_tokens=LONG, temperature=0, session_id="slow")
        slow = Client(one.orchestrator, request, timeout=60, stub=stub)
        length, before = 0, -1
        while before < length or not length:
            other = await one.orchestrator.generate(ask(PROMPT, max_tokens=500, temperature=0))
            assert other.ids == greedy_output(PROMPT, 500)
            before, length = length, len((await one.state_of("slow")).generated_tokens) // 4
        assert length < LONG // 2
        await slow.until_tokens(length)
        assert slow.generation.ids[:length] == greedy_output(PROMPT, length)
        slow.cancel()
        await one.until_freed()


async def test_h7_a_reader_that_never_reads_loses_its_session_with_the_time_to_live() -> None:
    async with system(copying=True, session_ttl=1.0) as one, small_window(one.orchestrator) as stub:
        client = Client(one.orchestrator, ask(PROMPT, max_tokens=LONG, temperature=0), timeout=60, stub=stub)
        await eventually(lambda: one.orchestrator.core.sessions == 1)
        await one.until_freed()
        # Whoever reads after all finds what was sent, and why there is no more.
        error = await refused(client.finish(), "SESSION_CANCELLED", grpc.StatusCode.ABORTED)
        assert "read nothing for 1 s" in error.message
        count = len(client.generation.ids)
        assert client.generation.ids == greedy_output(PROMPT, count)
