"""What only a cluster does: slots that move, and one of several servers that is away."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from orchestrator.store import SessionRecord
from orchestrator.store.redis import RedisStore
from outrider.law.sparse import Int32Array
from tests.harness.engines import DEADLINE
from tests.harness.rights import PASSWORD
from tests.harness.valkey import ValkeyServer
from tests.harness.valkey_groups import ValkeyCluster, told


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


class Moving:
    """The slot of a session on its way from its server to another one."""

    def __init__(self, cluster: ValkeyCluster, session_id: str) -> None:
        self.keys = [f"outrider:{{{session_id}}}:{part}" for part in ("state", "tokens")]
        self._slot = int(told(cluster.servers[0], "CLUSTER", "KEYSLOT", self.keys[0]))
        self._ids = {server.port: str(told(server, "CLUSTER", "MYID")) for server in cluster.servers}
        self._cluster = cluster
        self.source = next(server for server in cluster.servers if self._has_slot(server))
        self.target = next(server for server in cluster.servers if server is not self.source)

    def begin(self) -> None:
        self._slot_is(self.target, "IMPORTING", self.source)
        self._slot_is(self.source, "MIGRATING", self.target)

    def move(self, *keys: str) -> None:
        told(self.source, "MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys)

    def end(self) -> None:
        for server in (self.target, self.source, *self._cluster.servers):
            self._slot_is(server, "NODE", self.target)

    def _slot_is(self, at: ValkeyServer, what: str, other: ValkeyServer) -> None:
        told(at, "CLUSTER", "SETSLOT", self._slot, what, self._ids[other.port])

    def _has_slot(self, server: ValkeyServer) -> bool:
        shards: Any = told(server, "CLUSTER", "SLOTS")
        ranges = shards if isinstance(shards, dict) else {(s[0], s[1]): {"primary": (s[2][0], s[2][1])} for s in shards}
        return any(
            first <= self._slot <= last and nodes["primary"][1] == server.port
            for (first, last), nodes in ranges.items()
        )


def answers(server: ValkeyServer, code: str) -> int:
    return int(told(server, "INFO", "errorstats").get(f"errorstat_{code}", {}).get("count", 0))


async def until_answered(server: ValkeyServer, code: str, before: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while answers(server, code) == before:  # noqa: ASYNC110 (only the server knows)
            await asyncio.sleep(0.01)


@pytest.fixture
async def over(cluster: ValkeyCluster) -> AsyncIterator[RedisStore]:
    """As a user who may do what docs/reliability.md says and no more."""
    store = RedisStore(cluster.url.replace("//", f"//outrider:{PASSWORD}@"), 60, timeout=DEADLINE)
    yield store
    await store.close()


async def commit(store: RedisStore, session_id: str, base: int) -> None:
    """Among others, which have connections too: what belongs together must take the same."""
    await asyncio.gather(
        *(store.commit(one, 1, base, ints(base)) for one in (session_id, *(f"{session_id}.{n}" for n in range(20))))
    )


async def test_a_session_whose_slot_moves_goes_on(over: RedisStore, cluster: ValkeyCluster, session_id: str) -> None:
    ids = [session_id, *(f"{session_id}.{number}" for number in range(20))]
    await asyncio.gather(*(over.create(SessionRecord(one, ints(1, 2, 3), 3)) for one in ids))
    moving = Moving(cluster, session_id)
    moving.begin()
    await commit(over, session_id, 3)  # where it was

    split, asked = answers(moving.source, "TRYAGAIN"), answers(moving.source, "ASK")
    moving.move(moving.keys[0])
    pending = asyncio.create_task(commit(over, session_id, 4))
    await until_answered(moving.source, "TRYAGAIN", split)  # one key here and one there
    assert not pending.done()
    moving.move(moving.keys[1])
    await pending
    await commit(over, session_id, 5)
    assert answers(moving.source, "ASK") > asked

    moved = answers(moving.source, "MOVED")
    moving.end()
    await commit(over, session_id, 6)
    assert (learned := answers(moving.source, "MOVED")) > moved
    await commit(over, session_id, 7)
    assert answers(moving.source, "MOVED") == learned
    for one in ids:
        record = await over.load(one)
        assert record is not None
        assert record.tokens.tolist() == [1, 2, 3, 3, 4, 5, 6, 7]


async def test_a_server_that_is_away_holds_up_its_own_sessions_only(
    over: RedisStore, cluster: ValkeyCluster, session_id: str
) -> None:
    ids = [f"{session_id}.{number}" for number in range(30)]
    await asyncio.gather(*(over.create(SessionRecord(one, ints(1, 2, 3), 3)) for one in ids))
    away = cluster.servers[0]
    away.kill()
    commits = [asyncio.create_task(over.commit(one, 1, 3, ints(4))) for one in ids]
    async with asyncio.timeout(DEADLINE):
        _, pending = await asyncio.wait(commits, return_when=asyncio.FIRST_COMPLETED)
    assert pending
    away.start()
    await asyncio.gather(*commits)
    for one in ids:
        record = await over.load(one)
        assert record is not None
        assert record.tokens.tolist() == [1, 2, 3, 4]
