import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from orchestrator.store import SessionStore, open_store
from tests.harness.valkey import ValkeyServer, valkey_server

TTL = 60.0


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that a test may break."""
    with valkey_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[SessionStore]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("valkey").url
    opened = open_store(url, TTL)
    yield opened
    await opened.close()


_numbers = itertools.count()


@pytest.fixture
def session_id() -> str:
    return f"session-{next(_numbers)}"
