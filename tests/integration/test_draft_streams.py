"""Draft streams: order, overtaking, fences, flow control, ends; and the worker's life."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2

from draft_service.stream import MAX_WAITING_EVENTS
from outrider.law.params import LawParams
from outrider.lm.engine import Engine
from outrider.net.errors import OutriderError, from_status
from outrider.v1 import draft_pb2
from tests.harness.engines import DEADLINE, ScriptedEngine, next_token_script
from tests.harness.workers import (
    DraftStream,
    RunningDraft,
    advance_command,
    block_of,
    close_command,
    draft_error,
    eventually,
    health_of,
    open_command,
    reason,
    start_draft,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GREEDY = LawParams(temperature=0.0)


def engine(**options: int) -> ScriptedEngine:
    return ScriptedEngine(next_token_script(16), **options)


async def fails_with(stream: DraftStream, name: str) -> grpc.StatusCode:
    """Reads the stream to its end, which must be the error."""
    from grpc_status import rpc_status

    async with asyncio.timeout(DEADLINE):
        code = await stream.code()
        status = await rpc_status.aio.from_call(stream.call)
    assert status is not None, await stream.call.details()
    error: OutriderError = from_status(status)
    assert error.reason == reason(name)
    return code  # type: ignore[no-any-return]


async def until_pending(draft: RunningDraft, count: int) -> None:
    await eventually(lambda: draft.service.pending == count)


async def test_the_newest_command_of_a_session_wins() -> None:
    model = engine()
    async with start_draft(model) as draft:
        stream = draft.stream()
        model.hold()
        await stream.send(open_command("s", [1, 2], 3, law=GREEDY))
        await model.until_in_pass()
        await stream.send(advance_command("s", [1, 2, 9], 3), advance_command("s", [1, 2, 9, 10], 2))
        await until_pending(draft, 3)
        model.let_go()
        event = await stream.event()
        assert event.base_length == 4
        assert block_of(event)[0] == [11, 12]
        await until_pending(draft, 0)
        assert (await stream.ask(advance_command("s", [1, 2, 9, 10, 11], 1))).base_length == 5


async def test_close_gives_up_what_runs_and_frees_the_session() -> None:
    model = engine()
    async with start_draft(model, ahead_blocks=0) as draft:
        stream = draft.stream()
        model.hold()
        await stream.send(open_command("s", [1, 2], 8))
        await model.until_in_pass()
        before = len(model.passes)
        await stream.send(close_command("s"), open_command("other", [1], 1))
        await until_pending(draft, 2)
        model.let_go()
        assert (await stream.event()).session_id == "other"
        await draft.until_sessions(1)
        assert len(model.passes) - before == 2
        assert draft_error(await stream.ask(advance_command("s", [1, 2, 3], 1))).reason == reason("SESSION_NOT_FOUND")


async def test_stale_epochs_are_refused_and_do_no_harm() -> None:
    async with start_draft(engine()) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2], 1, epoch=5))
        for command in (open_command("s", [3], 1, epoch=4), advance_command("s", [1, 2, 3], 1, epoch=4)):
            event = await stream.ask(command)
            assert draft_error(event).reason == reason("STALE_EPOCH")
            assert event.epoch == 4
        await stream.send(close_command("s", epoch=4))
        block_of(await stream.ask(advance_command("s", [1, 2, 3], 1, epoch=5)))


async def test_a_mismatching_prefix_is_refused() -> None:
    async with start_draft(engine(), ahead_blocks=0) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2, 3], 2))
        event = await stream.ask(advance_command("s", [1, 2, 3, 4], 2, hash_of=[1, 2, 9]))
        assert draft_error(event).reason == reason("PREFIX_MISMATCH")
        event = await stream.ask(advance_command("s", [1, 2, 3, 4, 5, 6, 7, 8, 9], 2))
        assert draft_error(event).reason == reason("SESSION_NOT_FOUND")


async def test_sessions_of_different_streams_never_meet() -> None:
    async with start_draft(engine()) as draft:
        one, other = draft.stream(), draft.stream()
        await one.ask(open_command("s", [1, 2], 2, law=GREEDY, epoch=9))
        event = await other.ask(advance_command("s", [1, 2, 3], 1))
        assert draft_error(event).reason == reason("SESSION_NOT_FOUND")
        assert block_of(await other.ask(open_command("s", [7], 2, law=GREEDY)))[0] == [8, 9]
        assert block_of(await one.ask(advance_command("s", [1, 2, 3], 2, epoch=9)))[0] == [4, 5]


async def test_h1_c8_a_lost_stream_frees_its_sessions_and_stops_its_work() -> None:
    model = engine(pages=1000, page_size=4)
    async with start_draft(model, token_budget=16, ahead_blocks=0) as draft:
        lost, kept = draft.stream(), draft.stream()
        await kept.ask(open_command("kept", [1], 1))
        model.hold()
        await lost.send(*(open_command(str(index), [1] * 1000, 64) for index in range(10)))
        await model.until_in_pass()
        before = len(model.passes)
        lost.call.cancel()
        await eventually(lambda: draft.service.pending == 0)
        model.let_go()
        await draft.until_sessions(1)
        await kept.ask(advance_command("kept", [1, 2], 1))
        assert len(model.passes) - before == 2
        assert (await draft.info()).load.kv_pages_used == 1


async def test_c8_many_sessions_leave_nothing_behind() -> None:
    model = engine(pages=1000, page_size=4)
    async with start_draft(model) as draft:
        for _ in range(5):
            stream = draft.stream()
            await stream.send(*(open_command(str(index), [1, 2], 2) for index in range(40)))
            for _ in range(40):
                block_of(await stream.event())
            await stream.send(*(close_command(str(index)) for index in range(0, 40, 2)))
            assert await stream.end() is grpc.StatusCode.OK
        await draft.until_sessions(0)
        assert model.open_tokens == []
        assert draft.service.load().kv_pages_used == 0


async def test_half_closing_ends_the_stream_with_ok_after_what_is_pending() -> None:
    model = engine()
    async with start_draft(model) as draft:
        stream = draft.stream()
        model.hold()
        await stream.send(open_command("s", [1, 2], 3))
        await model.until_in_pass()
        await stream.call.done_writing()
        model.let_go()
        assert len(block_of(await stream.event())[0]) == 3
        assert await stream.code() is grpc.StatusCode.OK


async def test_half_closing_does_not_wait_for_what_was_given_up() -> None:
    model = engine()
    async with start_draft(model) as draft:
        stream = draft.stream()
        model.hold()
        await stream.send(open_command("s", [1, 2], 3))
        await model.until_in_pass()
        await stream.send(close_command("s"))
        await stream.call.done_writing()
        await eventually(lambda: draft.service.streams[0].read_all)
        model.let_go()
        assert await stream.end() is grpc.StatusCode.OK


async def test_a_full_queue_answers_with_retry_info() -> None:
    model = engine()
    async with start_draft(model, max_queue_items=2) as draft:
        stream = draft.stream()
        model.hold()
        await stream.send(*(open_command(str(index), [1], 1) for index in range(3)))
        event = await stream.event()
        assert event.session_id == "2"
        assert draft_error(event).reason == reason("QUEUE_FULL")
        assert draft_error(event).retry_after == pytest.approx(0.1)
        model.let_go()
        assert {(await stream.event()).session_id for _ in range(2)} == {"0", "1"}
        block_of(await stream.ask(open_command("2", [1], 1)))


async def test_too_many_commands_end_the_stream() -> None:
    async with start_draft(engine()) as draft:
        stream = draft.stream()
        await stream.send(*(close_command("s") for _ in range(1025)))
        assert await fails_with(stream, "INVALID_FIELD") is grpc.StatusCode.INVALID_ARGUMENT


async def test_h7_a_reader_that_never_reads_holds_up_nobody_and_is_bounded() -> None:
    async with start_draft(engine()) as draft:
        deaf, good = draft.stream(), draft.stream()
        await deaf.send(open_command("s", [1], 0))

        async def flood() -> None:
            # Invalid commands are answered at once; each answer is far bigger than its command.
            while True:
                await deaf.call.write(
                    draft_pb2.DraftRequest(commands=[draft_pb2.DraftCommand(session_id="x" * 100)] * 512)
                )

        flooding = asyncio.create_task(flood())
        await eventually(lambda: any(one.waiting >= MAX_WAITING_EVENTS for one in draft.service.streams))
        block_of(await good.ask(open_command("s", [1], 3)))
        block_of(await good.ask(advance_command("s", [1, 2], 3)))
        assert max(one.waiting for one in draft.service.streams) <= MAX_WAITING_EVENTS + 512
        flooding.cancel()
        deaf.call.cancel()


async def test_unused_sessions_are_freed_after_their_time_to_live() -> None:
    model = engine()
    async with start_draft(model, session_ttl=0.05) as draft:
        stream = draft.stream()
        await stream.ask(open_command("s", [1, 2, 3], 1))
        await draft.until_sessions(0)
        assert model.open_tokens == []
        assert draft_error(await stream.ask(advance_command("s", [1, 2, 3, 4], 1))).reason == reason(
            "SESSION_NOT_FOUND"
        )


async def test_j5_not_serving_until_the_warm_up_pass_is_done() -> None:
    may_load = threading.Event()
    model = engine()

    def load() -> Engine:
        assert may_load.wait(DEADLINE)
        return model

    async with start_draft(load, load=False) as draft:
        loading = asyncio.create_task(draft.host.load())
        assert await health_of(draft.channel) == NOT_SERVING
        assert await fails_with(draft.stream(), "NO_WORKER") is grpc.StatusCode.UNAVAILABLE
        may_load.set()
        await loading
        assert await health_of(draft.channel, draft.service_name) == SERVING
        assert len(model.passes) == 2
        block_of(await draft.stream().ask(open_command("s", [1], 1)))


async def test_g7_an_engine_that_dies_ends_the_streams() -> None:
    model = engine()
    async with start_draft(model) as draft:
        idle, busy = draft.stream(), draft.stream()
        await idle.ask(open_command("s", [1], 1))
        model.failure = RuntimeError("device assert")
        await busy.send(open_command("s", [1], 1))
        assert await fails_with(busy, "ENGINE_FAILED") is grpc.StatusCode.UNAVAILABLE
        await fails_with(idle, "ENGINE_FAILED")
        await fails_with(draft.stream(), "ENGINE_FAILED")
        async with asyncio.timeout(DEADLINE):
            while await health_of(draft.channel) != NOT_SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_j7_draining_sends_what_is_pending_and_ends_the_streams() -> None:
    model = engine()
    async with start_draft(model, grace=DEADLINE) as draft:
        busy, idle = draft.stream(), draft.stream()
        await idle.ask(open_command("s", [1], 1))
        model.hold()
        await busy.send(open_command("s", [1, 2], 2))
        await model.until_in_pass()
        stopping = asyncio.create_task(draft.host.stop())
        assert await fails_with(idle, "DRAINING") is grpc.StatusCode.UNAVAILABLE
        await fails_with(draft.stream(), "DRAINING")
        model.let_go()
        assert len(block_of(await busy.event())[0]) == 2
        await fails_with(busy, "DRAINING")
        assert await stopping


async def test_get_info_says_what_is_served() -> None:
    async with start_draft(engine(context_length=99), proposers="prompt_lookup,model") as draft:
        info = await draft.info()
        assert (info.model.vocab_size, info.model.context_length, info.max_lookahead) == (16, 99, 64)
        assert list(info.proposers) == [draft_pb2.PROPOSER_PROMPT_LOOKUP, draft_pb2.PROPOSER_MODEL]
