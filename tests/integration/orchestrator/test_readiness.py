"""J5: ready means that a request would be served."""

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from orchestrator.__main__ import keep_readiness
from orchestrator.store.redis import RedisStore
from outrider.lm.engine import Engine
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoRequest
from tests.harness.engines import DEADLINE
from tests.harness.faults import draft_engine, greedy_output, refused, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.valkey import valkey_server
from tests.harness.workers import health_of, start_draft, start_target

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = (0, 1, 2)
NOBODY = "127.0.0.1:1"


async def until_health(orchestrator: RunningOrchestrator, wanted: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while await health_of(orchestrator.channel) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def watched(orchestrator: RunningOrchestrator) -> "asyncio.Task[None]":
    """What the orchestrator's process does beside serving."""
    return asyncio.create_task(keep_readiness(orchestrator.server, orchestrator.core))


async def test_j5_the_orchestrator_is_ready_once_a_target_has_warmed_up_and_whatever_the_draft_does() -> None:
    may_load, model = threading.Event(), target_engine()

    def load() -> Engine:
        assert may_load.wait(DEADLINE)
        return model

    async with (
        start_target(load, load=False) as target,
        start_orchestrator([target.address, NOBODY], [NOBODY], expect=(0, 0)) as orchestrator,
    ):
        await orchestrator.server.ready(False)
        readiness = watched(orchestrator)
        loading = asyncio.create_task(target.host.load())
        await refused(orchestrator.generate(ask(PROMPT)), "NO_WORKER", grpc.StatusCode.UNAVAILABLE)
        model.hold()
        may_load.set()
        await model.until_in_pass()
        # The model is there, its first pass is not done.
        assert await health_of(target.channel, target.service_name) == NOT_SERVING
        assert await health_of(orchestrator.channel) == NOT_SERVING
        model.let_go()
        await loading
        await until_health(orchestrator, SERVING)
        assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)
        info = await orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=DEADLINE)
        assert [(one.kind, one.usable) for one in info.workers] == [
            ("target", True),
            ("target", False),
            ("draft", False),
        ]
        assert all(one.usable or one.reason for one in info.workers)
        readiness.cancel()


async def test_j5_readiness_follows_the_targets() -> None:
    async with start_target(target_engine()) as target, start_orchestrator([target.address]) as orchestrator:
        readiness = watched(orchestrator)
        await until_health(orchestrator, SERVING)
        await target.host.server.grpc.stop(0)
        await until_health(orchestrator, NOT_SERVING)
        port = int(target.address.rpartition(":")[2])
        async with start_target(target_engine(), port=port):
            await until_health(orchestrator, SERVING)
        readiness.cancel()


async def test_j5_the_orchestrator_is_not_ready_while_its_store_does_not_answer(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as server:
        store = RedisStore(server.url, 60, timeout=0.3)
        async with (
            start_target(target_engine()) as target,
            start_orchestrator([target.address], store=store) as orchestrator,
        ):
            readiness = watched(orchestrator)
            await until_health(orchestrator, SERVING)
            server.pause()
            await until_health(orchestrator, NOT_SERVING)
            server.resume()
            await until_health(orchestrator, SERVING)
            readiness.cancel()


async def test_readiness_is_looked_at_again_whatever_a_look_comes_to(caplog: pytest.LogCaptureFixture) -> None:
    """What a server of another kind answers is beyond what the store's client reckons with."""
    nonsense = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            pings = data.count(b"PING")
            setup = data.count(b"\r\nCLIENT\r\n") + data.count(b"\r\nHELLO\r\n")
            writer.write(b"+OK\r\n" * setup + (b"-MOVED\r\n" if nonsense.is_set() else b"+PONG\r\n") * pings)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    store = RedisStore(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", 60, timeout=5.0)
    async with (
        server,
        start_target(target_engine()) as target,
        start_orchestrator([target.address], store=store) as orchestrator,
    ):
        readiness = watched(orchestrator)
        await until_health(orchestrator, SERVING)
        nonsense.set()
        await until_health(orchestrator, NOT_SERVING)
        assert "not ready: it cannot be found out" in caplog.text
        nonsense.clear()
        await until_health(orchestrator, SERVING)
        readiness.cancel()


async def test_a_draft_that_comes_later_is_used() -> None:
    may_load = threading.Event()

    def load() -> Engine:
        assert may_load.wait(DEADLINE)
        return draft_engine()

    async with (
        start_target(target_engine()) as target,
        start_draft(load, load=False) as draft,
        start_orchestrator([target.address], [draft.address], expect=(1, 0)) as orchestrator,
    ):
        assert (await orchestrator.generate(ask(PROMPT))).drafted == 0
        may_load.set()
        await draft.host.load()
        await orchestrator.until_linked(1, 1)
        assert (await orchestrator.generate(ask(PROMPT))).drafted > 0
