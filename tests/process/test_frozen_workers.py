"""G7: worker processes that freeze lose their work to others, and get work again when they wake."""

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from orchestrator.links.base import Link
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.v1.orchestrator_pb2 import PLAIN_REASON_DRAFT_UNAVAILABLE
from tests.harness.commands import SECONDS, Running, running
from tests.harness.faults import Client, greedy_output
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import eventually

SPEC = SyntheticSpec(vocab_size=26, seed=5, context_length=1 << 20)
MODEL = "synthetic:vocab_size=26,seed=5,context_length=1048576,pass_ms=20"
DRAFT = "synthetic:vocab_size=26,seed=5,context_length=1048576,noise=0.5"


@asynccontextmanager
async def frozen(worker: Running) -> AsyncIterator[None]:
    """Its connections stand, and nothing answers."""
    worker.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.process.send_signal(signal.SIGCONT)


async def streaming(orchestrator: RunningOrchestrator, number: int) -> Client:
    client = Client(orchestrator, ask((number, 1), max_tokens=500_000, temperature=0), timeout=10 * SECONDS)
    await client.until_tokens(5)
    return client


async def read_on(client: Client, number: int) -> None:
    """The stream gives more, and what it gave is the target's own output."""
    generation = await client.until_tokens(len(client.generation.ids) + 50)
    assert generation.ids == greedy_output((number, 1), len(generation.ids), SPEC)


async def test_g7_frozen_targets_and_drafts_lose_their_sessions_and_get_others_when_they_wake() -> None:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(running(service, "--model", model, "--port", "0"))
            for service, model in (("target_service", MODEL), ("target_service", MODEL), ("draft_service", DRAFT))
        ]
        first, second, draft = [await worker.address() for worker in workers]
        orchestrator = await stack.enter_async_context(
            start_orchestrator([first, second], [draft], tokenizer=MODEL, draft_timeout=0.2)
        )
        targets: list[Link] = list(orchestrator.core.targets.links)
        (drafts,) = orchestrator.core.drafts.links
        clients = [await streaming(orchestrator, number) for number in range(4)]
        assert [link.sessions for link in targets] == [2, 2]
        async with frozen(workers[0]):
            await eventually(lambda: not targets[0].usable)
            assert "frozen" in targets[0].reason
            await eventually(lambda: [link.sessions for link in targets] == [0, 4])
            for number, client in enumerate(clients):
                await read_on(client, number)
        await eventually(lambda: targets[0].usable)
        # It is told at last which sessions have left it.
        await eventually(lambda: targets[0].reported is not None and not targets[0].reported.open_sessions)
        clients.append(await streaming(orchestrator, 4))
        assert [link.sessions for link in targets] == [1, 4]
        async with frozen(workers[2]):
            await eventually(lambda: not drafts.usable)
            await clients[4].until_round(lambda one: one.plain_reason == PLAIN_REASON_DRAFT_UNAVAILABLE)
        await clients[4].until_round(lambda one: one.drafted > 0)
        await read_on(clients[4], 4)
        for client in clients:
            client.cancel()
