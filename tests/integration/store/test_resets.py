"""G10: connections to the store that are reset, on the event loop that the services run on."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import uvloop

from bench.chaos.proxy import Proxy
from orchestrator.store.base import SessionRecord, StoreError
from orchestrator.store.redis import RedisStore
from tests.harness.valkey import valkey_server

COMMITS, SESSIONS = 40, 4


def test_g10_commits_go_on_over_connections_that_are_reset(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as valkey:
        uvloop.run(commit_while_connections_are_reset(valkey.port))


async def commit_while_connections_are_reset(port: int) -> None:
    proxy = Proxy()
    await proxy.start()
    proxy.upstream = f"127.0.0.1:{port}"
    store = RedisStore(f"redis://{proxy.address}/0", 600, timeout=60)
    try:
        names = [f"session {number}" for number in range(SESSIONS)]
        for name in names:
            await store.create(SessionRecord(name, np.zeros(1, np.int32), 1))

        async def commit_all(name: str) -> None:
            for base in range(1, 1 + COMMITS):
                await store.commit(name, 1, base, np.full(1, base, np.int32))
                if base % SESSIONS == names.index(name):
                    proxy.reset()
                    await asyncio.sleep(0)  # so that the other end hears of it

        await asyncio.gather(*map(commit_all, names))
        for _ in range(COMMITS):
            proxy.reset()
            await asyncio.sleep(0)
            with contextlib.suppress(StoreError):  # and nothing else: whoever asks is told
                await store.ping()
        for name in names:
            record = await store.load(name)
            assert record is not None
            assert record.tokens.tolist() == list(range(1 + COMMITS))
    finally:
        await store.close()
        await proxy.close()
