"""J7: what an orchestrator does between SIGTERM and its end."""

import asyncio

import grpc
import pytest

from outrider.v1 import orchestrator_pb2
from tests.harness.engines import DEADLINE
from tests.harness.faults import Client, KeptStore, draft_engine, greedy_output, refused, target_engine
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.workers import eventually, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000


async def test_j7_a_running_stream_is_let_finish_and_a_new_one_is_refused() -> None:
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine()) as draft,
        start_orchestrator([target.address], [draft.address]) as orchestrator,
    ):
        client = Client(orchestrator, ask(PROMPT, max_tokens=300, temperature=0))
        await client.until_tokens(5)
        draining = asyncio.create_task(orchestrator.servicer.drain(DEADLINE))
        await eventually(lambda: orchestrator.servicer._draining)
        await refused(orchestrator.generate(ask(PROMPT)), "DRAINING", grpc.StatusCode.UNAVAILABLE)
        assert (await client.finish()).ids == greedy_output(PROMPT, 300)
        await draining


async def test_j7_a_stream_that_outlives_the_grace_ends_with_draining_and_frees_everything() -> None:
    store = KeptStore(60)
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        async with start_orchestrator([target.address], [draft.address], store=store) as orchestrator:
            clients = [Client(orchestrator, ask(PROMPT, max_tokens=LONG, session_id=f"s{index}")) for index in range(5)]
            for client in clients:
                await client.until_tokens(5)
            await orchestrator.servicer.drain(0.05)
            for client in clients:
                await refused(client.finish(), "DRAINING", grpc.StatusCode.UNAVAILABLE)
        await eventually(lambda: not target.service.load().open_sessions)
        await draft.until_sessions(0)
        for index in range(5):
            record = await store.load(f"s{index}")
            assert record is not None
            assert record.finish_reason == orchestrator_pb2.FINISH_REASON_ERROR


async def test_a_server_that_is_cut_still_ends_its_sessions_in_the_store_before_it_closes_it() -> None:
    store = KeptStore(60)
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        async with start_orchestrator([target.address], [draft.address], store=store) as orchestrator:
            client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, session_id="cut"))
            await client.until_tokens(5)
            await orchestrator.server.stop(0)
            with pytest.raises(grpc.aio.AioRpcError):
                await client.finish()
        record = await store.load("cut")
        assert record is not None
        assert record.finish_reason == orchestrator_pb2.FINISH_REASON_CANCELLED
        await eventually(lambda: not target.service.load().open_sessions)
        await draft.until_sessions(0)
