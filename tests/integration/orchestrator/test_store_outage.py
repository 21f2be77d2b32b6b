"""G, over a real server: nothing is emitted that is not committed, and an outage of the store has a clear end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.store.memory import MemoryStore
from orchestrator.store.redis import RedisStore
from outrider.net.arrays import int32s
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import GetSessionRequest, GetSessionResponse
from tests.harness.engines import DEADLINE
from tests.harness.faults import Client, draft_engine, greedy_output, refused, target_engine
from tests.harness.orchestrator import RunningOrchestrator, ask, start_orchestrator
from tests.harness.rogue_draft import start_rogue_draft
from tests.harness.valkey import ValkeyServer, valkey_server
from tests.harness.valkey_groups import SentinelGroup, sentinel_group, told, until
from tests.harness.workers import RunningTarget, eventually, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000
MINUTES = 180.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path) as running:
        yield running


@asynccontextmanager
async def over(
    server: ValkeyServer | SentinelGroup, **store: object
) -> AsyncIterator[tuple[RunningOrchestrator, RunningTarget]]:
    options = {"timeout": DEADLINE, **store}
    async with (
        start_target(target_engine()) as target,
        start_draft(draft_engine()) as draft,
        start_orchestrator(
            [target.address], [draft.address], store=RedisStore(server.url, 60, **options), draft_timeout=20
        ) as orchestrator,
    ):
        yield orchestrator, target


async def stored(orchestrator: RunningOrchestrator, session_id: str) -> GetSessionResponse:
    return await orchestrator.stub.GetSession(GetSessionRequest(session_id=session_id), timeout=DEADLINE)


def generated(state: GetSessionResponse) -> list[int]:
    return int32s(state.generated_tokens, "generated_tokens").tolist()


@pytest.mark.parametrize("outage", ["pause", "kill"])
async def test_an_outage_of_the_store_ends_streams_with_its_reason_and_nothing_uncommitted_was_seen(
    server: ValkeyServer, outage: str
) -> None:
    async with over(server, timeout=2.0) as (orchestrator, target):
        clients = [Client(orchestrator, ask(PROMPT, max_tokens=LONG, session_id=f"s{index}")) for index in range(4)]
        for client in clients:
            await client.until_tokens(10)
        getattr(server, outage)()
        for client in clients:
            await refused(client.finish(), "STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE)
        await refused(orchestrator.generate(ask(PROMPT)), "STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE)
        await refused(stored(orchestrator, "s0"), "STORE_UNAVAILABLE", grpc.StatusCode.UNAVAILABLE)
        # The workers are freed although the store cannot be told.
        await eventually(lambda: not orchestrator.core.sessions and not target.service.load().open_sessions)
        if outage == "pause":
            server.resume()
        else:
            server.start()
        for index, client in enumerate(clients):
            committed = generated(await stored(orchestrator, f"s{index}"))
            seen = client.generation.ids
            assert seen == committed[: len(seen)]
            # At most the round whose answer was lost.
            assert len(committed) - len(seen) <= 5
        assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)


async def test_a_hiccup_of_the_store_shorter_than_its_deadline_is_a_pause_and_no_more(server: ValkeyServer) -> None:
    async with over(server) as (orchestrator, target):
        client = Client(orchestrator, ask(PROMPT, max_tokens=200, temperature=0))
        await client.until_tokens(10)
        server.pause()
        # Nothing to wait for but the stream's own standstill: the commit is under way and unanswered.
        await eventually(lambda: target.service.queued == 0)
        server.resume()
        assert (await client.finish()).ids == greedy_output(PROMPT, 200)


async def streams_through(orchestrator: RunningOrchestrator, count: int, fault: Callable[[], object]) -> None:
    """Reads so many streams while the fault is there, and some way on. Nothing is lost or repeated."""
    prompts = [(index % 4, 1) for index in range(count)]
    clients = [
        Client(orchestrator, ask(prompt, max_tokens=LONG, temperature=0, session_id=f"s{index}"), MINUTES)
        for index, prompt in enumerate(prompts)
    ]
    over = asyncio.Event()

    async def read_on(client: Client) -> None:
        goal = LONG
        while len(client.generation.tokens) < goal:
            response = await client.call.read()
            assert response is not grpc.aio.EOF
            client.generation.add(response)
            if over.is_set() and goal == LONG:
                goal = len(client.generation.tokens) + 30
        client.cancel()

    for client in clients:
        await client.until_tokens(10)
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(read_on(client)) for client in clients]
        await asyncio.to_thread(fault)
        assert not any(task.done() for task in reading)
        over.set()
    longest = max(len(client.generation.ids) for client in clients)
    expected = {prompt: greedy_output(prompt, longest) for prompt in set(prompts)}
    for index, (prompt, client) in enumerate(zip(prompts, clients, strict=True)):
        seen = client.generation.ids
        assert seen == expected[prompt][: len(seen)]
        assert generated(await stored(orchestrator, f"s{index}"))[: len(seen)] == seen


@pytest.mark.timeout(2 * MINUTES)
async def test_a_restart_of_the_store_within_its_deadline_is_a_pause_and_no_more(server: ValkeyServer) -> None:
    def restart() -> None:
        server.kill()
        server.start()

    async with over(server, timeout=MINUTES) as (orchestrator, _):
        await streams_through(orchestrator, 8, restart)


def frozen(group: SentinelGroup) -> None:
    """The master stands still until a replica has its place, and wakes up believing to be the master still."""
    old = group.master
    old.pause()
    until(lambda: group.master is not old, "a promotion")
    old.resume()


def planned(group: SentinelGroup) -> None:
    """The master is alive and writes on until it is told."""
    old = group.master
    told(group.sentinels[0], "SENTINEL", "FAILOVER", "main")
    until(lambda: group.master is not old, "a promotion")


@pytest.mark.timeout(2 * MINUTES)
@pytest.mark.parametrize("promotion", [frozen, planned])
async def test_g10_streams_outlive_the_promotion_of_a_replica(
    tmp_path: Path, promotion: Callable[[SentinelGroup], None]
) -> None:
    """The old master gets no more writes, and the new one few connections."""
    with sentinel_group(tmp_path / "group", down_after=500) as group:
        old = group.master

        def fault() -> None:
            promotion(group)
            # As a Sentinel would some ten seconds later.
            told(old, "REPLICAOF", "127.0.0.1", group.master.port)

        async with over(group, timeout=MINUTES, replicas=2, max_connections=8) as (orchestrator, _):
            await streams_through(orchestrator, 20, fault)
            # Those of the Sentinels are two each.
            assert int(told(group.master, "INFO", "clients")["connected_clients"]) <= 8 + 3 * 2 + 1
        await asyncio.to_thread(until, lambda: told(old, "ROLE")[0] == "slave", "the old master is a replica")
        await asyncio.to_thread(until, lambda: told(group.master, "WAIT", 2, 1000) == 2, "it has what the new one has")
        assert told(old, "DBSIZE") == 2 * 20


async def test_g13_few_connections_are_waited_for_and_never_an_error(server: ValkeyServer) -> None:
    async with over(server, max_connections=2) as (orchestrator, _):
        prompts = [(index % 16, index // 16) for index in range(48)]
        generations = await asyncio.gather(
            *(orchestrator.generate(ask(prompt, max_tokens=10, temperature=0)) for prompt in prompts)
        )
        assert [one.ids for one in generations] == [greedy_output(prompt, 10) for prompt in prompts]


async def test_h1_a_client_that_goes_while_its_session_is_stored_leaves_none_that_seems_to_run(
    server: ValkeyServer,
) -> None:
    async with over(server) as (orchestrator, _):
        await orchestrator.generate(ask(PROMPT))
        server.pause()
        client = Client(orchestrator, ask(PROMPT, session_id="gone"))
        await eventually(lambda: orchestrator.core.sessions == 1)
        creating = orchestrator.core.store.inner._client.connection_pool
        await eventually(lambda: len(creating._in_use_connections) == 1)
        client.cancel()
        await eventually(lambda: orchestrator.core.sessions == 0)
        server.resume()
        await eventually(lambda: not orchestrator.core._endings)
        state = await stored(orchestrator, "gone")
        assert state.finish_reason == orchestrator_pb2.FINISH_REASON_CANCELLED


async def test_h1_the_workers_are_freed_without_waiting_for_a_store_that_does_not_answer(server: ValkeyServer) -> None:
    async with over(server, timeout=10 * DEADLINE) as (orchestrator, target):
        client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, session_id="gone"))
        await client.until_tokens(10)
        server.pause()
        client.cancel()
        await eventually(lambda: not orchestrator.core.sessions and not target.service.load().open_sessions)
        assert orchestrator.core._endings
        server.resume()
        await eventually(lambda: not orchestrator.core._endings)
        state = await stored(orchestrator, "gone")
        assert state.finish_reason == orchestrator_pb2.FINISH_REASON_CANCELLED


async def test_g11_an_owner_that_lost_its_session_stops(server: ValkeyServer) -> None:
    async with over(server) as (orchestrator, _):
        client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, session_id="taken"))
        await client.until_tokens(10)
        record = await orchestrator.core.store.take_over("taken")
        await refused(client.finish(), "STALE_EPOCH", grpc.StatusCode.ABORTED)
        assert client.generation.ids == record.tokens[record.prompt_length :].tolist()
        state = await stored(orchestrator, "taken")
        assert state.state == orchestrator_pb2.SESSION_STATE_RUNNING
        assert state.epoch == 2


async def test_an_expired_session_ends_its_stream(server: ValkeyServer) -> None:
    async with over(server) as (orchestrator, _):
        client = Client(orchestrator, ask(PROMPT, max_tokens=LONG, session_id="expired"))
        await client.until_tokens(10)
        pool_keys = ("outrider:{expired}:state", "outrider:{expired}:tokens")
        await orchestrator.core.store.inner._client.delete(*pool_keys)
        await refused(client.finish(), "SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND)
        await refused(stored(orchestrator, "expired"), "SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND)


async def test_l6_a_damaged_session_is_an_error_of_its_own(server: ValkeyServer) -> None:
    async with over(server) as (orchestrator, _):
        await orchestrator.generate(ask(PROMPT, session_id="damaged"))
        await orchestrator.core.store.inner._client.set("outrider:{damaged}:tokens", b"abc")
        await refused(stored(orchestrator, "damaged"), "SESSION_CORRUPT", grpc.StatusCode.DATA_LOSS)
        assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)


class AfterTheAsk(MemoryStore):
    """Its first commits wait until `asked` says that the block after the round was asked for."""

    def __init__(self, asked: Callable[[], int]) -> None:
        super().__init__(60)
        self._asked, self._commits = asked, 0

    async def commit(self, *round_: Any, finish_reason: int = 0) -> None:
        self._commits += 1
        if self._commits <= 3:
            await eventually(lambda: self._asked() == self._commits)
        await super().commit(*round_, finish_reason=finish_reason)


async def test_the_next_block_is_asked_for_while_the_commit_is_under_way() -> None:
    async with (
        start_target(target_engine()) as target,
        start_rogue_draft(draft_engine().info, lambda _, tokens, lookahead: tokens[:lookahead]) as (draft, rogue),
        start_orchestrator(
            [target.address], [draft], store=AfterTheAsk(lambda: len(rogue.asked)), draft_timeout=20
        ) as orchestrator,
    ):
        generation = await orchestrator.generate(ask(PROMPT, max_tokens=20, temperature=0))
        assert generation.ids == greedy_output(PROMPT, 20)
