"""`outrider doctor` over session stores with each fault that it is there to find."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.store.checkup import Check, _clock, checks
from tests.harness.rights import PASSWORD, RIGHTS
from tests.harness.tls_front import tls_front
from tests.harness.valkey import ValkeyServer, free_port, valkey_server
from tests.harness.valkey_groups import SentinelGroup, ValkeyCluster, told

USER = ("--user", "outrider", "on", f">{PASSWORD}", *RIGHTS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey"), "--appendfsync", "everysec", *USER) as running:
        yield running


async def checked(url: str, replicas: int = 0, seconds: float = 30.0) -> list[Check]:
    environment = {
        "OUTRIDER_STORE": url,
        "OUTRIDER_STORE_TIMEOUT": str(seconds),
        "OUTRIDER_STORE_WAIT_REPLICAS": str(replicas),
    }
    return [each async for each in checks(environment)]


def of(found: list[Check], check: str) -> Check:
    (one,) = [each for each in found if each.check == check]
    return one


async def test_one_that_is_well_keeps_nothing(server: ValkeyServer) -> None:
    found = await checked(server.url)
    assert [each for each in found if each.level != "ok" and each.check != "store"] == []
    assert of(found, "persistence").seen.endswith("append-only file, appendfsync everysec")
    assert "what they wrote is removed" in of(found, "scripts").seen
    assert told(server, "KEYS", "*doctor*") == []


async def test_a_user_with_no_more_rights_than_it_needs(server: ValkeyServer) -> None:
    found = await checked(f"redis://outrider:{PASSWORD}@127.0.0.1:{server.port}/0")
    assert of(found, "server").level == "unseen"
    assert of(found, "scripts").level == "ok"
    assert "goes within 30 s" in of(found, "scripts").seen


# Settings of the server while it is looked at -> which check, how bad, what it says.
SETTINGS = {
    "evicts": ({"maxmemory-policy": "volatile-lru", "maxmemory": "100mb"}, "memory", "broken", "volatile-lru"),
    "would evict": ({"maxmemory-policy": "allkeys-lru"}, "memory", "warning", "of no limit, allkeys-lru"),
    "full": ({"maxmemory": "1mb"}, "memory", "broken", "of 1.00M, noeviction"),
    "never synced": ({"appendfsync": "no"}, "persistence", "warning", "never synced"),
    "no file": ({"appendonly": "no"}, "persistence", "warning", "sessions end with the server"),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_settings_that_lose_sessions(server: ValkeyServer, name: str) -> None:
    settings, check, level, words = SETTINGS[name]
    before = [(key, told(server, "CONFIG", "GET", key)[key]) for key in settings]
    try:
        for key, value in settings.items():
            told(server, "CONFIG", "SET", key, value)
        found = of(await checked(server.url), check)
    finally:
        for key, value in before:
            told(server, "CONFIG", "SET", key, value)
    assert found.level == level
    assert words in found.seen
    assert found.advice


async def test_a_full_one_is_not_told_to_be_started(server: ValkeyServer) -> None:
    told(server, "CONFIG", "SET", "maxmemory", "1mb")
    try:
        scripts = of(await checked(server.url), "scripts")
    finally:
        told(server, "CONFIG", "SET", "maxmemory", "0")
    assert scripts.level == "broken"
    assert "raise maxmemory" in scripts.advice


async def test_one_that_knows_fewer_commands(tmp_path: Path) -> None:
    """A proxy, or a service that only speaks Redis's protocol."""
    missing = [word for name in ("INFO", "EVAL", "EVALSHA") for word in ("--rename-command", name, "")]
    with valkey_server(tmp_path, *missing) as proxy:
        found = await checked(proxy.url, seconds=5.0)
    assert (of(found, "server").level, "unknown command" in of(found, "server").seen) == ("unseen", True)
    assert of(found, "scripts").level == "broken"
    assert "must run Lua scripts" in of(found, "scripts").advice


async def test_replicas(server: ValkeyServer, tmp_path: Path) -> None:
    found = of(await checked(server.url, replicas=1), "replicas")
    assert (found.level, found.seen) == ("broken", f"127.0.0.1:{server.port}/0: 0 online")
    assert "--store-wait-replicas" in found.advice
    with valkey_server(tmp_path / "replica", "--replicaof", "127.0.0.1", str(server.port)) as replica:
        followed = await checked(replica.url, seconds=1.0)
        assert (of(followed, "replicas").level, of(followed, "scripts").level) == ("broken", "broken")
        assert "it refuses writes" in of(followed, "replicas").seen
        assert "name the master" in of(followed, "scripts").advice


@pytest.mark.parametrize(
    ("url", "words", "advice", "seconds"),
    [
        ("redis://outrider:hunter2@127.0.0.1:{port}/0", "invalid username-password", "correct the user", 30.0),
        ("redis://127.0.0.1:{free}/0", "failed", "start it, or correct --store", 0.5),
        ("rediss://127.0.0.1:{port}/0", "failed", "redis:// where it does not", 0.5),
        ("rediss://127.0.0.1:{tls}/0", "certificate", "must hold the CA", 30.0),
        ("redis://127.0.0.1:{port}/0?nonsense=hunter2", "invalid", "correct --store", 30.0),
    ],
)
async def test_one_that_lets_nobody_in(
    server: ValkeyServer, tmp_path: Path, url: str, words: str, advice: str, seconds: float
) -> None:
    with tls_front(server.port, tmp_path) as front:
        (found,) = await checked(url.format(port=server.port, free=free_port(), tls=front.port), seconds=seconds)
    assert (found.check, found.level) == ("store", "broken")
    assert words.lower() in found.seen.lower()
    assert advice in found.advice
    assert "hunter2" not in str(found)


async def test_a_master_behind_sentinels(sentinels: SentinelGroup) -> None:
    found = await checked(sentinels.url, replicas=2)
    assert {each.check: each.level for each in found if each.level == "broken"} == {}
    assert of(found, "replicas").seen.endswith("2 online, 2 waited for")


async def test_every_master_of_a_cluster(cluster: ValkeyCluster) -> None:
    found = await checked(cluster.url)
    assert {each.check: each.level for each in found if each.level == "broken"} == {}
    names = {f"127.0.0.1:{one.port}" for one in cluster.servers}
    for check in ("version", "memory", "replicas", "persistence", "clock"):
        assert {each.seen.partition(": ")[0] for each in found if each.check == check} == names
    assert "what they wrote is removed" in of(found, "scripts").seen


async def test_memory_is_no_store_for_many() -> None:
    (found,) = await checked("memory://")
    assert found.level == "warning"


def test_clocks() -> None:
    assert _clock("a", 0.01, 0.0).level == "ok"
    assert _clock("a", None, 0.0).level == "unseen"
    assert _clock("a", 3.0, 2.5).level == "ok", "the answer took five seconds"
    behind = _clock("a", -3.0, 0.1)
    assert (behind.level, "-3000 ms" in behind.seen) == ("warning", True)
