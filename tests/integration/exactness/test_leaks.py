"""Row C8 of shared/FAILURES.md: nothing is left of a session that has ended, whichever way it ended."""

import asyncio
import gc
import os
import time
from pathlib import Path

import grpc
import pytest

from orchestrator.store.base import FINISHED
from orchestrator.store.memory import MemoryStore
from outrider.v1.orchestrator_pb2 import (
    FINISH_REASON_CANCELLED,
    CancelSessionRequest,
    OrchestratorServiceGetInfoRequest,
)
from tests.harness.engines_lm import served_tiny_engine, text
from tests.harness.models import VOCAB
from tests.harness.orchestrator import ask
from tests.harness.system import RunningSystem, start_system, synthetic
from tests.harness.workers import eventually

# The row asks for 5; a machine that is busy with other things gets three times that.
GAUGE_SECONDS = 15.0
STORED = 100


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def until_empty(system: RunningSystem) -> None:
    """Both workers and the orchestrator hold no session soon after the last one's end."""
    assert system.draft is not None
    draft, target, core = system.draft.service, system.target.service, system.orchestrator.core
    async with asyncio.timeout(GAUGE_SECONDS):
        await eventually(lambda: (draft.load().open_sessions, target.load().open_sessions, core.sessions) == (0, 0, 0))
    links = [*core.targets.links, *core.drafts.links]
    assert [link.sessions for link in links] == [0, 0]
    assert (draft.load().queued_items, target.load().queued_items) == (0, 0)
    info = await system.orchestrator.stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=10)
    assert info.running_sessions == 0


async def test_c8_nothing_is_left_of_sessions_that_ended_or_were_aborted() -> None:
    """1000 one after another, then 200 that their clients leave, at every stage: gauges at 0, memory where it was."""
    prompt = [token % 16 for token in text(40, 1).tolist()]
    # A store of 100 records is full, and stays so, before memory is first looked at.
    store = MemoryStore(3600.0, max_sessions=STORED)
    async with start_system(synthetic(), synthetic(noise=0.7), store=store) as system:

        async def sequential(count: int) -> None:
            for index in range(count):
                one = await system.generate(ask(prompt, max_tokens=6, lookahead=4, seed=index))
                assert len(one.ids) == 6

        async def aborted(index: int) -> None:
            """Leaves before the first message, or after so many."""
            call = system.orchestrator.stub.Generate(
                ask(prompt, max_tokens=200, lookahead=index % 6, session_id=f"aborted-{time.monotonic_ns()}"),
                timeout=30,
            )
            for _ in range(index % 5):
                await call.read()
            call.cancel()

        await sequential(200)
        await asyncio.gather(*map(aborted, range(50)))
        await until_empty(system)
        before = resident_bytes()
        await sequential(1000)
        await until_empty(system)
        for first in range(0, 200, 50):
            await asyncio.gather(*map(aborted, range(first, first + 50)))
        await until_empty(system)
        assert resident_bytes() < 1.02 * before


async def test_c8_sessions_that_fail_or_are_cancelled_by_id_leave_nothing() -> None:
    async with start_system(synthetic(), synthetic(noise=0.7)) as system:
        stub = system.orchestrator.stub

        async def cancelled(index: int) -> None:
            name = f"cancelled-{index}"
            call = stub.Generate(ask(max_tokens=3000, lookahead=4, session_id=name), timeout=30)
            await anext(aiter(call))
            await stub.CancelSession(CancelSessionRequest(session_id=name), timeout=30)
            # gRPC shows the status to whoever has read the messages before it.
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                _ = [response async for response in call]
            assert failure.value.code() == grpc.StatusCode.ABORTED
            record = await system.orchestrator.core.store.load(name)
            assert record is not None
            assert (record.state, record.finish_reason) == (FINISHED, FINISH_REASON_CANCELLED)

        async def refused() -> None:
            with pytest.raises(grpc.aio.AioRpcError):
                await system.generate(ask(max_tokens=5, lookahead=99))

        await asyncio.gather(*map(cancelled, range(30)), *(refused() for _ in range(30)))
        await until_empty(system)


@pytest.mark.parametrize("proposers", ["model", "prompt_lookup", "suffix"])
async def test_c8_no_kv_page_is_held_when_all_sessions_are_gone(proposers: str) -> None:
    """Paged caches: what is used afterwards is nothing, at the draft and at the target."""
    async with start_system(
        served_tiny_engine("llama"),
        served_tiny_engine("llama"),
        tokenizer=f"synthetic:vocab_size={VOCAB}",
        proposers=proposers,
    ) as system:
        prompt = text(40, 1).tolist()
        requests = (ask(prompt, max_tokens=30, lookahead=index % 6, seed=index) for index in range(40))
        await system.generate_all(requests, concurrency=8)
        calls = [system.orchestrator.stub.Generate(ask(prompt, max_tokens=200, lookahead=4)) for _ in range(10)]
        for call in calls:
            await call.read()
            await call.read()
            call.cancel()
        await until_empty(system)
        assert system.draft is not None
        assert system.draft.service.load().kv_pages_used == 0
        assert system.target.service.load().kv_pages_used == 0
