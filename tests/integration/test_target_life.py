"""The target's life: readiness, loading, draining, and an engine that dies or hangs."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.lm.engine import Engine, ModelRefused
from outrider.net.errors import from_rpc_error
from outrider.net.server import LIVENESS
from tests.harness.engines import DEADLINE, ScriptedEngine, next_token_script
from tests.harness.workers import RunningTarget, eventually, health_of, reason, rows_of, start_target, verify_item

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def engine() -> ScriptedEngine:
    return ScriptedEngine(next_token_script(16))


async def fails_with(call: "asyncio.Future[object]", name: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = from_rpc_error(failure.value)
    assert error is not None, failure.value
    assert error.reason == reason(name)
    return failure.value


async def until_health(target: RunningTarget, wanted: int, service: str = "") -> None:
    async with asyncio.timeout(DEADLINE):
        while await health_of(target.channel, service or target.service_name) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_j5_not_serving_until_the_warm_up_pass_is_done() -> None:
    may_load = threading.Event()
    model = engine()

    def load() -> Engine:
        assert may_load.wait(DEADLINE)
        return model

    async with start_target(load, load=False) as target:
        loading = asyncio.create_task(target.host.load())
        assert await health_of(target.channel) == NOT_SERVING
        failure = await fails_with(target.call(verify_item("s", [1])), "NO_WORKER")
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError):
            await target.info()
        model.hold()
        may_load.set()
        await model.until_in_pass()
        assert await health_of(target.channel, target.service_name) == NOT_SERVING
        model.let_go()
        await loading
        assert await health_of(target.channel, target.service_name) == SERVING
        rows_of((await target.verify(verify_item("s", [1])))[0], 1)


async def test_a_refused_model_is_told_to_whoever_loads() -> None:
    def load() -> Engine:
        raise ModelRefused("the model is no good")

    async with start_target(load, load=False) as target:
        with pytest.raises(ModelRefused, match="no good"):
            await target.host.load()


async def test_g7_an_engine_that_dies_ends_pending_calls_and_readiness() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        running = target.call(verify_item("running", [1]))
        await model.until_in_pass()
        waiting = target.call(verify_item("waiting", [1]))
        await eventually(lambda: target.service.queued == 2)
        model.failure = RuntimeError("device assert")
        model.let_go()
        assert (await fails_with(running, "ENGINE_FAILED")).code() is grpc.StatusCode.UNAVAILABLE
        await fails_with(waiting, "ENGINE_FAILED")
        await fails_with(target.call(verify_item("late", [1])), "ENGINE_FAILED")
        await until_health(target, NOT_SERVING)
        await until_health(target, NOT_SERVING, LIVENESS)


async def test_g7_a_pass_that_hangs_ends_pending_calls_until_it_moves_again() -> None:
    model = engine()
    async with start_target(model, stall_timeout=0.2) as target:
        model.hold()
        await fails_with(target.call(verify_item("s", [1])), "ENGINE_FAILED")
        assert await health_of(target.channel, target.service_name) == NOT_SERVING
        await until_health(target, NOT_SERVING, LIVENESS)
        await fails_with(target.call(verify_item("late", [1])), "ENGINE_FAILED")
        model.let_go()
        await until_health(target, SERVING)
        await until_health(target, SERVING, LIVENESS)
        rows_of((await target.verify(verify_item("s", [1])))[0], 1)


async def test_health_answers_while_a_pass_runs() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        running = target.call(verify_item("s", [1]))
        await model.until_in_pass()
        assert await health_of(target.channel) == SERVING
        assert (await target.info()).load.queued_items == 1
        model.let_go()
        await running


async def test_h2_a_call_cancelled_inside_the_worker_ends_with_a_status() -> None:
    model = engine()
    async with start_target(model) as target:
        model.hold()
        call = target.call(verify_item("s", [1]))
        await model.until_in_pass()
        (pending,) = target.service._calls
        pending.done.cancel()
        async with asyncio.timeout(DEADLINE):
            await fails_with(call, "ENGINE_FAILED")
        model.let_go()
        await eventually(lambda: target.service.queued == 0)
        rows_of((await target.verify(verify_item("s", [1])))[0], 1)


async def test_j7_draining_finishes_running_calls_and_refuses_new_ones() -> None:
    model = engine()
    async with start_target(model, grace=DEADLINE) as target:
        model.hold()
        running = target.call(verify_item("running", [1]))
        await model.until_in_pass()
        stopping = asyncio.create_task(target.host.stop())
        await until_health(target, NOT_SERVING)
        await fails_with(target.call(verify_item("late", [1])), "DRAINING")
        model.let_go()
        rows_of((await running).results[0], 1)
        assert await stopping


async def test_draining_ends_after_the_grace_period_with_a_status() -> None:
    model = engine()
    async with start_target(model, grace=0.1) as target:
        model.hold()
        running = target.call(verify_item("running", [1]))
        await model.until_in_pass()
        stopping = asyncio.create_task(target.host.stop())
        await fails_with(running, "DRAINING")
        assert not await stopping
        model.let_go()


async def test_h5_calls_that_ended_are_forgotten_however_they_ended() -> None:
    model = engine()
    async with start_target(model) as target:
        await asyncio.gather(*(target.verify(verify_item(f"s{number}", [1])) for number in range(300)))
        model.hold()
        cancelled = [target.call(verify_item(f"c{number}", [1])) for number in range(20)]
        await model.until_in_pass()
        for call in cancelled:
            call.cancel()
        await eventually(lambda: not target.service._calls)
        model.let_go()
        await eventually(lambda: not target.service.queued)
        await target.release(*((f"{kind}{number}", 1) for kind in "sc" for number in range(300)))
        await eventually(lambda: not target.service.load().open_sessions)
