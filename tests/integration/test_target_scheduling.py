"""The target's scheduler: batching, decode before prefill, bounded queue, cancellation, pages, time-to-live."""

import asyncio

import grpc
import pytest

from outrider.net.errors import from_rpc_error
from tests.harness.engines import ScriptedEngine, SegmentSeen, next_token_script
from tests.harness.workers import RunningTarget, error_of, eventually, reason, rows_of, start_target, verify_item


def engine(**options: int) -> ScriptedEngine:
    return ScriptedEngine(next_token_script(16), **options)


async def queue(target: RunningTarget, items: int) -> None:
    """Returns when the worker has admitted that many items."""
    await eventually(lambda: target.service.queued >= items)


async def test_items_of_several_calls_share_a_pass() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        first = target.call(verify_item("first", [1]))
        await model.until_in_pass()
        calls = [target.call(verify_item(str(index), [1, 2], [3, 4])) for index in range(5)]
        await queue(target, 6)
        before = len(model.passes)
        model.let_go()
        answers = await asyncio.gather(first, *calls)
        assert [len(one) for one in model.passes[before:]] == [1, 5]
        timing = answers[-1].results[0].timing
        assert (timing.batch_items, timing.batch_positions, timing.passes) == (5, 20, 1)


async def test_f6_a_long_prompt_goes_in_chunks_and_decoding_goes_on_in_every_pass() -> None:
    model = engine()
    async with start_target(model, token_budget=64, max_lookahead=8) as target:
        await target.verify(verify_item("decoder", [1] * 20))
        model.hold()
        blocker = target.call(verify_item("blocker", [1]))
        await model.until_in_pass()
        prompt = target.call(verify_item("prompt", [2] * 1000))
        await queue(target, 2)
        before = len(model.passes) + 1
        model.let_go()
        await blocker
        committed = [1] * 20
        while not prompt.done():
            committed.append(1)
            (result,) = await target.verify(verify_item("decoder", committed, [3, 4], new=1))
            assert result.timing.passes == 1
            # It waited for the chunk that was running and then went with the next one: never longer.
            assert result.timing.batch_positions <= 64
        (answer,) = (await prompt).results
        rows_of(answer, 1)
        assert answer.timing.passes >= 1000 // 64
        assert max(sum(item.tokens for item in one) for one in model.passes[before:]) <= 64


async def test_prompts_do_not_starve_while_decoding_fills_the_budget() -> None:
    model = engine()
    async with start_target(model, token_budget=16, max_lookahead=3) as target:
        model.hold()
        blocker = target.call(verify_item("blocker", [1]))
        await model.until_in_pass()
        prompt = target.call(verify_item("prompt", [2] * 40))
        decoders = [target.call(verify_item(str(index), [1], [2, 3, 4])) for index in range(12)]
        await queue(target, 14)
        before = len(model.passes) + 1
        model.let_go()
        await asyncio.gather(blocker, prompt, *decoders)
        first = model.passes[before]
        assert first == [SegmentSeen(0, 4, 4)] * 3 + [SegmentSeen(0, 4, 0)]


async def test_blocks_beyond_the_budget_are_scored_in_pieces() -> None:
    model = engine()
    async with start_target(model, token_budget=3, max_lookahead=8) as target:
        (result,) = await target.verify(verify_item("s", [1, 2, 3, 4], [5, 6, 7, 8, 9]))
        assert rows_of(result, 6).argmax(dim=1).tolist() == [5, 6, 7, 8, 9, 10]
        assert [one[0].tokens for one in model.passes[-3:]] == [3, 3, 3]


async def test_a_full_queue_fails_the_call_with_retry_info() -> None:
    model = engine()
    async with start_target(model, max_queue_items=3) as target:
        model.hold()
        running = target.call(*(verify_item(str(index), [1]) for index in range(3)))
        await queue(target, 3)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await target.verify(verify_item("late", [1]))
        error = from_rpc_error(failure.value)
        assert error is not None
        assert error.reason == reason("QUEUE_FULL")
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_after == pytest.approx(0.1)
        model.let_go()
        await running
        await target.verify(verify_item("late", [1]))


async def test_items_beyond_the_queue_are_refused_one_by_one() -> None:
    async with start_target(engine(), max_queue_items=2) as target:
        results = await target.verify(*(verify_item(str(index), [1]) for index in range(4)))
        assert [result.status.code == 0 for result in results] == [True, True, False, False]
        assert error_of(results[3]).reason == reason("QUEUE_FULL")
        assert target.service.queued == 0


async def test_h1_a_cancelled_call_leaves_the_queue_and_the_rest_goes_on() -> None:
    model = engine()
    async with start_target(model, token_budget=8) as target:
        model.hold()
        blocker = target.call(verify_item("blocker", [1]))
        await model.until_in_pass()
        doomed = target.call(verify_item("doomed", [2] * 1000), verify_item("doomed2", [1]))
        await queue(target, 3)
        survivor = target.call(verify_item("survivor", [1, 2]))
        await queue(target, 4)
        doomed.cancel()
        await eventually(lambda: target.service.queued == 2)
        before = len(model.passes)
        model.let_go()
        await asyncio.gather(blocker, survivor)
        (after,) = await target.verify(verify_item("after", [1]))
        rows_of(after, 1)
        assert [len(one) for one in model.passes[before:]] == [1, 1, 1]
        assert target.service.queued == 0


async def test_h1_a_cancelled_prompt_stops_after_the_chunk_that_runs() -> None:
    model = engine()
    async with start_target(model, token_budget=8) as target:
        before = len(model.passes)
        model.hold()
        prompt = target.call(verify_item("prompt", [2] * 1000))
        await model.until_in_pass()
        prompt.cancel()
        await eventually(lambda: target.service.queued == 0)
        await target.release(("prompt", 1))
        model.let_go()
        await target.verify(verify_item("next", [1]))
        assert len(model.passes) - before == 2
        assert (await target.info()).load.open_sessions == 1


async def test_a_deadline_ends_the_wait_and_frees_the_queue() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        from outrider.v1 import target_pb2

        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await target.stub.Verify(target_pb2.VerifyRequest(items=[verify_item("s", [1])]), timeout=0.2)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: target.service.queued == 0)
        model.let_go()


async def test_jobs_of_one_session_run_in_order_of_arrival() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        blocker = target.call(verify_item("blocker", [1]))
        await model.until_in_pass()
        calls = []
        for length in (2, 3, 4):
            calls.append(target.call(verify_item("s", list(range(length)), new=None if length == 2 else 1)))
            await queue(target, length)
        model.let_go()
        answers = await asyncio.gather(*calls)
        assert [rows_of(answer.results[0], 1).argmax().item() for answer in answers] == [2, 3, 4]
        await blocker


async def test_a_newer_epoch_fences_what_is_still_queued() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        running = target.call(verify_item("s", [1, 2], epoch=1))
        await model.until_in_pass()
        waiting = target.call(verify_item("s", [1, 2, 3], epoch=1, new=1))
        await queue(target, 2)
        taken_over = target.call(verify_item("s", [1, 2, 5], epoch=2))
        await queue(target, 3)
        model.let_go()
        assert error_of((await waiting).results[0]).reason == reason("STALE_EPOCH")
        rows_of((await taken_over).results[0], 1)
        await running


async def test_release_ends_what_is_queued_for_the_session() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        blocker = target.call(verify_item("blocker", [1]))
        await model.until_in_pass()
        waiting = target.call(verify_item("s", [1, 2]))
        await queue(target, 2)
        await target.release(("s", 1))
        model.let_go()
        assert error_of((await waiting).results[0]).reason == reason("SESSION_NOT_FOUND")
        await blocker


async def test_idle_sessions_give_their_pages_to_new_ones_least_recently_used_first() -> None:
    model = engine(pages=4, page_size=4)
    async with start_target(model) as target:
        await target.verify(verify_item("old", [1] * 8))
        await target.verify(verify_item("young", [1] * 4))
        await target.verify(verify_item("new", [1] * 8))
        (old,) = await target.verify(verify_item("old", [1] * 9, new=1))
        assert error_of(old).reason == reason("SESSION_NOT_FOUND")
        (young,) = await target.verify(verify_item("young", [1] * 4, new=1))
        rows_of(young, 1)


async def test_a_sequence_that_no_page_can_hold_is_refused_alone() -> None:
    async with start_target(engine(pages=4, page_size=4)) as target:
        huge, small = await target.verify(verify_item("huge", [1] * 17), verify_item("small", [1] * 4))
        assert error_of(huge).reason == reason("QUEUE_FULL")
        assert error_of(huge).retry_after is not None
        rows_of(small, 1)
        assert (await target.info()).load.kv_pages_used == 1


async def test_sessions_that_crowd_each_other_out_all_finish() -> None:
    model = engine(pages=8, page_size=4)
    async with start_target(model, token_budget=8, max_lookahead=4) as target:
        items = [verify_item(str(index), [index] * 30) for index in range(4)]
        items += [verify_item(f"d{index}", [index], [1, 2, 3]) for index in range(6)]
        results = await target.verify(*items)
        for index, result in enumerate(results[:4]):
            assert rows_of(result, 1).argmax().item() == index + 1
        for result in results[4:]:
            rows_of(result, 4)


async def test_unused_sessions_are_freed_after_their_time_to_live() -> None:
    model = engine()
    async with start_target(model, session_ttl=0.05) as target:
        await target.verify(verify_item("s", [1, 2, 3]))
        await eventually(lambda: not target.service.load().open_sessions)
        assert not model.open_tokens


async def test_c8_no_session_is_left_after_many_came_and_went() -> None:
    model = engine(pages=64, page_size=4)
    async with start_target(model) as target:

        async def session(number: int) -> None:
            call = target.call(verify_item(str(number), [1, 2, 3], [4, 5]))
            if number % 5 == 0:
                call.cancel()
            else:
                await call
            await target.release((str(number), 1))

        for first in range(0, 300, 30):
            await asyncio.gather(*(session(first + index) for index in range(30)))
        await target.release(*((str(number), 1) for number in range(300)))
        (last,) = await target.verify(verify_item("last", [1]))
        rows_of(last, 1)
        load = (await target.info()).load
        assert (load.open_sessions, load.queued_items, load.kv_pages_used) == (1, 0, 1)
        assert model.open_tokens == [1]
