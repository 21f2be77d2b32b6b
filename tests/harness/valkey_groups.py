"""Several real servers that belong together: a master with replicas and Sentinels, and a cluster."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.harness.valkey import ValkeySentinel, ValkeyServer, free_port, valkey_server

_TIMEOUT = 180.0
_SLOTS = 16_384
_MASTERS = 3


@dataclass(frozen=True)
class SentinelGroup:
    """Three servers, of which one is the master, and three Sentinels."""

    servers: list[ValkeyServer]
    sentinels: list[ValkeySentinel]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/main/0"

    @property
    def master(self) -> ValkeyServer:
        """Whom the Sentinels call the master."""
        _, port = told(self.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        return next(server for server in self.servers if server.port == int(port))

    @property
    def replicas(self) -> list[ValkeyServer]:
        """The others."""
        master = self.master
        return [server for server in self.servers if server is not master]


@dataclass(frozen=True)
class ValkeyCluster:
    """Three masters without replicas; the slots in equal parts."""

    servers: list[ValkeyServer]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{one.port}' for one in self.servers)}"


def told(server: ValkeyServer, *command: str | int) -> Any:
    """A server's answer to one command."""
    with Redis(port=server.port, decode_responses=True, socket_timeout=_TIMEOUT) as client:
        return client.execute_command(*command)


def until(condition: Callable[[], Any], what: str) -> None:
    """Polls until the condition holds; an error of a server that is not up yet means no."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            if condition():
                return
        except (RedisError, OSError, StopIteration):
            pass
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.02)


@contextmanager
def sentinel_group(directory: Path, *, down_after: int = 60_000) -> Iterator[SentinelGroup]:
    """A master, two replicas that hold what it does, three Sentinels that know each other and all of them.

    Args:
        down_after: milliseconds of silence after which a server counts as down.
    """
    directory.mkdir(exist_ok=True)
    with ExitStack() as stack:
        master = stack.enter_context(valkey_server(directory / "s0"))
        replicas = [stack.enter_context(replica_of(master, directory / f"s{number}")) for number in (1, 2)]
        sentinels = []
        for number in range(3):
            (home := directory / f"sentinel{number}").mkdir()
            sentinel = ValkeySentinel(home, master.port, down_after)
            stack.callback(sentinel.kill)
            sentinel.start()
            sentinels.append(sentinel)
        group = SentinelGroup([master, *replicas], sentinels)
        until(lambda: all(_sees_all(sentinel) for sentinel in sentinels), "sentinels")
        yield group


@contextmanager
def replica_of(master: ValkeyServer, directory: Path) -> Iterator[ValkeyServer]:
    """A further server that has all that the master has, and follows it."""
    # Without this a master waits five seconds for more replicas to come.
    at_once = ("--repl-diskless-sync-delay", "0")
    told(master, "CONFIG", "SET", at_once[0].removeprefix("--"), at_once[1])
    with valkey_server(directory, "--replicaof", "127.0.0.1", str(master.port), *at_once) as replica:
        until(lambda: told(replica, "INFO", "replication")["master_link_status"] == "up", "replica")
        yield replica


@contextmanager
def valkey_cluster(directory: Path, *settings: str) -> Iterator[ValkeyCluster]:
    """A cluster that serves all slots; the settings are for each of its servers."""
    with ExitStack() as stack:
        servers: list[ValkeyServer] = []
        for number in range(_MASTERS):
            # The bus would take the port + 10000, which may be none.
            bus = free_port()
            words = ("--cluster-enabled", "yes", "--cluster-port", str(bus), *settings)
            server = stack.enter_context(valkey_server(directory / f"n{number}", *words))
            first, end = (_SLOTS * each // _MASTERS for each in (number, number + 1))
            told(server, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            for other in servers[:1]:
                told(other, "CLUSTER", "MEET", "127.0.0.1", server.port, bus)
            servers.append(server)
        for server in servers:
            until(lambda server=server: _serves_all(server), "cluster")  # type: ignore[misc]
        yield ValkeyCluster(servers)


def _sees_all(sentinel: ValkeySentinel) -> bool:
    words = told(sentinel, "SENTINEL", "MASTER", "main")
    seen = dict(zip(words[::2], words[1::2], strict=True)) if isinstance(words, list) else words
    return (int(seen["num-slaves"]), int(seen["num-other-sentinels"])) == (2, 2)


def _serves_all(server: ValkeyServer) -> bool:
    info = told(server, "CLUSTER", "INFO")
    lines = info if isinstance(info, dict) else dict(line.split(":") for line in info.split())
    return lines["cluster_state"] == "ok" and int(lines["cluster_known_nodes"]) == _MASTERS
