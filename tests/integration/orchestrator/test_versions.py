"""Old and new side by side: what speaks another protocol or another law is not used, says so, and disturbs nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

import draft_service.service
import target_service.service
from outrider.law.params import LAW_VERSION
from outrider.lm.engine import EngineInfo
from outrider.lm.model_info import model_info
from outrider.lm.synthetic import SyntheticEngine
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoRequest
from tests.harness.engines import DEADLINE
from tests.harness.faults import DRAFT_SPEC, SPEC, draft_engine, greedy_output, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import start_draft, start_target

PROMPT = (0, 1, 2)
NEWER = "newer"


@pytest.fixture
def newer_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers whose model is called NEWER say that they have the next version of the law."""

    def told(info: EngineInfo, *, include_token_hashes: bool) -> types_pb2.ModelInfo:
        message = model_info(info, include_token_hashes=include_token_hashes)
        message.law_version += info.model_id == NEWER
        return message

    for module in (target_service.service, draft_service.service):
        monkeypatch.setattr(module, "model_info", told)


@asynccontextmanager
async def other_protocol() -> AsyncIterator[str]:
    """The address of a worker that is healthy and knows none of our services."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def until_told(orchestrator: RunningOrchestrator, address: str, words: str) -> None:
    """Returns when GetInfo says so of every worker at the address."""
    async with asyncio.timeout(DEADLINE):
        while True:
            info = await orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest())
            reasons = [worker.reason.lower() for worker in info.workers if worker.address == address]
            if reasons and all(words in reason for reason in reasons):
                return
            await asyncio.sleep(0.02)


async def test_workers_of_another_law_are_refused_and_the_others_serve(newer_law: None) -> None:
    async with (
        start_target(target_engine()) as target,
        start_target(SyntheticEngine(SPEC, NEWER)) as newer_target,
        start_draft(draft_engine()) as draft,
        start_draft(SyntheticEngine(DRAFT_SPEC, NEWER)) as newer_draft,
        start_orchestrator(
            [newer_target.address, target.address], [newer_draft.address, draft.address], expect=(1, 1)
        ) as orchestrator,
    ):
        for _ in range(4):
            generation = await orchestrator.generate(ask(PROMPT, temperature=0))
            assert generation.ids == greedy_output(PROMPT, 20)
            assert sum(each.drafted for each in generation.rounds) > 0
        for address in (newer_target.address, newer_draft.address):
            await until_told(orchestrator, address, f"has law version {LAW_VERSION + 1}, ours is {LAW_VERSION}")


async def test_a_target_of_another_model_is_refused_where_one_is_named() -> None:
    """One of the same vocabulary: sessions that move between the two would have the law of neither."""
    async with (
        start_target(target_engine()) as target,
        start_target(SyntheticEngine(SPEC, NEWER)) as newer,
        start_orchestrator(
            [newer.address, target.address], expect=(1, 0), target_model=target_engine().info.model_id
        ) as orchestrator,
    ):
        generation = await orchestrator.generate(ask(PROMPT, temperature=0))
        assert generation.ids == greedy_output(PROMPT, 20)
        await until_told(orchestrator, newer.address, f"serves {NEWER}, --target-model is synthetic:")


async def test_workers_of_another_protocol_are_refused_and_the_others_serve() -> None:
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine()) as draft,
        other_protocol() as stranger,
        start_orchestrator([stranger, target.address], [stranger, draft.address], expect=(1, 1)) as orchestrator,
    ):
        generation = await orchestrator.generate(ask(PROMPT, temperature=0))
        assert generation.ids == greedy_output(PROMPT, 20)
        await until_told(orchestrator, stranger, "unimplemented")


async def test_a_client_of_another_protocol_is_told_so() -> None:
    async with start_target(target_engine()) as target, start_orchestrator([target.address]) as orchestrator:
        call = orchestrator.channel.unary_stream("/outrider.v2.OrchestratorService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call(b"", timeout=20):
                pass
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
