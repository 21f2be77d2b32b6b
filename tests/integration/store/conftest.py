import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store import SessionStore, open_store
from tests.harness.engines import DEADLINE
from tests.harness.rights import CLUSTER_RIGHTS, PASSWORD, RIGHTS
from tests.harness.tls_front import TlsFront, tls_front
from tests.harness.valkey import ValkeyServer, valkey_server
from tests.harness.valkey_groups import SentinelGroup, ValkeyCluster, sentinel_group, valkey_cluster

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


@pytest.fixture(scope="session")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    with sentinel_group(tmp_path_factory.mktemp("sentinels")) as group:
        yield group


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    user = ("--user", "outrider", "on", f">{PASSWORD}", *CLUSTER_RIGHTS)
    with valkey_cluster(tmp_path_factory.mktemp("cluster"), *user) as group:
        yield group


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsFront]:
    """A server that lets in one user, over TLS, who may do what docs/reliability.md says and no more."""
    directory = tmp_path_factory.mktemp("guarded")
    users = ("--user", "default", "off", "--user", "outrider", "on", f">{PASSWORD}", *RIGHTS)
    with valkey_server(directory, *users) as server, tls_front(server.port, directory) as front:
        yield front


@pytest.fixture(params=["memory", "redis", "guarded", "sentinel", "cluster"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionStore]:
    opened = _open(request.param, request.getfixturevalue, tmp_path)
    yield opened
    await opened.close()


def _open(kind: str, fixture: Callable[[str], Any], directory: Path) -> SessionStore:
    if kind == "guarded":
        front: TlsFront = fixture("guarded")
        (directory / "password").write_text(f"{PASSWORD}\n")
        url = f"rediss://outrider@127.0.0.1:{front.port}/0?{front.query}"
        return open_store(url, TTL, timeout=DEADLINE, password_file=str(directory / "password"))
    if kind == "sentinel":
        return open_store(fixture("sentinels").url, TTL, timeout=DEADLINE, replicas=2)
    urls = {"redis": "valkey", "cluster": "cluster"}
    return open_store(fixture(urls[kind]).url if kind in urls else "memory://", TTL, timeout=DEADLINE)


_numbers = itertools.count()


@pytest.fixture
def session_id() -> str:
    return f"session-{next(_numbers)}"
