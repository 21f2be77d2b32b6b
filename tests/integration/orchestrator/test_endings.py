"""I6: metric, span and client agree about how a call ended, whichever way that was."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from orchestrator.metrics import Metrics
from outrider.net.errors import from_rpc_error, reason_name
from outrider.v1.orchestrator_pb2 import CancelSessionRequest, GenerateRequest, ResumeRequest
from tests.harness.engines import DEADLINE
from tests.harness.faults import Client, HookedEngine, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.spans import recorder
from tests.harness.workers import RunningTarget, eventually, start_target

LONG = ask((0, 1, 2), max_tokens=100_000, session_id="long")


class Told(Metrics):
    """Notes the error type of each request that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def request_ended(self, operation: str, seconds: float, error: str) -> None:
        super().request_ended(operation, seconds, error)
        self.errors.append(error)


@dataclass
class System:
    orchestrator: RunningOrchestrator
    target: RunningTarget
    engine: HookedEngine

    def call(self, request: GenerateRequest = LONG, timeout: float = DEADLINE) -> Client:
        return Client(self.orchestrator, request, timeout=timeout)

    async def begun(self) -> Client:
        """A call that would go on for long."""
        client = self.call()
        await client.until_tokens(3)
        return client


Way = Callable[[System], Awaitable[None]]


async def ends_well(one: System) -> None:
    await one.call(ask(max_tokens=4)).finish()


async def asks_for_nonsense(one: System) -> None:
    await one.call(ask(temperature=-1.0)).finish()


async def resumes_nothing(one: System) -> None:
    async for _ in one.orchestrator.stub.Resume(ResumeRequest(session_id="none"), timeout=DEADLINE):
        pass


async def client_cancels(one: System) -> None:
    client = await one.begun()
    client.cancel()
    await client.finish()


async def deadline_passes(one: System) -> None:
    one.engine.hold()
    try:
        await one.call(timeout=3.0).finish()
    finally:
        await eventually(lambda: one.orchestrator.core.sessions == 0)
        one.engine.let_go()


async def comes_while_draining(one: System) -> None:
    await one.orchestrator.servicer.drain(0.0)
    await one.call().finish()


async def drain_cuts_off(one: System) -> None:
    client = await one.begun()
    await one.orchestrator.servicer.drain(0.0)
    await client.finish()


async def task_is_cancelled(one: System) -> None:
    client = await one.begun()
    one.orchestrator.servicer.running._tasks["long"].cancel()
    await client.finish()


async def planning_is_cancelled(one: System) -> None:
    one.engine.hold()
    one.orchestrator.core._planner.submit(one.engine.until_let_go)
    client = one.call(ask())
    await eventually(lambda: one.orchestrator.core.sessions == 1)
    one.orchestrator.core._planner.shutdown(wait=False, cancel_futures=True)
    one.engine.let_go()
    await client.finish()


async def session_is_cancelled(one: System) -> None:
    client = await one.begun()
    await one.orchestrator.stub.CancelSession(CancelSessionRequest(session_id="long"), timeout=DEADLINE)
    await client.finish()


async def target_is_lost(one: System) -> None:
    client = await one.begun()
    await one.target.host.server.grpc.stop(0)
    await client.finish()


async def program_fails(one: System) -> None:
    client = await one.begun()

    async def broken(*_: object, **__: object) -> None:
        raise ValueError("secret")

    one.orchestrator.core.store.commit = broken  # type: ignore[method-assign]
    await client.finish()


@asynccontextmanager
async def system(metrics: Told, spans: object) -> AsyncIterator[System]:
    engine = target_engine()
    async with (
        start_target(engine) as target,
        start_orchestrator([target.address], metrics=metrics, spans=spans, failover_timeout=0.2) as orchestrator,  # type: ignore[arg-type]
    ):
        yield System(orchestrator, target, engine)


@pytest.mark.parametrize(
    ("way", "error", "code"),
    [
        (ends_well, "", "OK"),
        (asks_for_nonsense, "INVALID_FIELD", "INVALID_ARGUMENT"),
        (resumes_nothing, "SESSION_NOT_FOUND", "NOT_FOUND"),
        (client_cancels, "CANCELLED", "CANCELLED"),
        (deadline_passes, "CANCELLED", "CANCELLED"),
        (comes_while_draining, "DRAINING", "UNAVAILABLE"),
        (drain_cuts_off, "DRAINING", "UNAVAILABLE"),
        (task_is_cancelled, "DRAINING", "UNAVAILABLE"),
        (planning_is_cancelled, "DRAINING", "UNAVAILABLE"),
        (session_is_cancelled, "SESSION_CANCELLED", "ABORTED"),
        (target_is_lost, "NO_WORKER", "UNAVAILABLE"),
        (program_fails, "ENGINE_FAILED", "UNAVAILABLE"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_i6_metric_span_and_client_agree_how_a_call_ended(way: Way, error: str, code: str) -> None:
    metrics, (spans, exporter) = Told(), recorder()
    client_code, reason = "OK", ""
    async with system(metrics, spans) as one:
        try:
            await way(one)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as failure:
            client_code = failure.code().name if isinstance(failure, grpc.aio.AioRpcError) else "CANCELLED"
            known = from_rpc_error(failure) if isinstance(failure, grpc.aio.AioRpcError) else None
            reason = reason_name(known.reason) if known is not None else ""
        await eventually(lambda: bool(metrics.errors) and one.orchestrator.core.sessions == 0)
    (span,) = [span for span in exporter.get_finished_spans() if span.name.startswith("outrider.v1")]
    assert span.attributes is not None
    seen = metrics.errors, span.attributes.get("error.type", ""), span.attributes["rpc.response.status_code"]
    assert seen == ([error], error, code)
    # Who is not there any more is told nothing, and says by itself why it went.
    assert client_code in ((code,) if error != "CANCELLED" else ("CANCELLED", "DEADLINE_EXCEEDED"))
    assert reason == ("" if error == "CANCELLED" else error)
