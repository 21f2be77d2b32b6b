"""Where workers are: addresses that never change, and DNS names that are looked up again and again.

A name with many addresses, such as that of a headless service in Kubernetes, gives a worker for each of them.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from outrider.net.address import parse_addresses

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 2.0
# An address goes when so many lookups in a row were without it: resolvers drop records now and then.
_ABSENCES = 2
_DNS = "dns:"

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]


@dataclass(frozen=True)
class Sources:
    """A setting, taken apart.

    Attributes:
        addresses: HOST:PORT, in the order given.
        names: (name, port) of those to look up.
    """

    addresses: tuple[str, ...]
    names: tuple[tuple[str, int], ...]


def parse_sources(text: str) -> Sources:
    """Splits `HOST:PORT,dns:NAME:PORT,...`. Raises ValueError naming the entry that is neither."""
    parts = [part.strip() for part in text.split(",")]
    names = parse_addresses(",".join(part.removeprefix(_DNS) for part in parts if part.startswith(_DNS)))
    addresses = parse_addresses(",".join(part for part in parts if not part.startswith(_DNS)))
    split = [name.rpartition(":") for name in names]
    return Sources(tuple(dict.fromkeys(addresses)), tuple(dict.fromkeys((host, int(port)) for host, _, port in split)))


async def resolve(name: str, port: int) -> list[str]:
    """All addresses of a name, as HOST:PORT. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for _, _, _, _, address in found}
    return sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


class Members:
    """Which addresses a name stands for, from what its lookups found: grows at once, and shrinks with some patience."""

    def __init__(self) -> None:
        self._absences: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._absences))

    def __len__(self) -> int:
        return len(self._absences)

    def found(self, addresses: Iterable[str]) -> None:
        """What a lookup found, at least one address."""
        present = set(addresses)
        counts = {address: count + 1 for address, count in self._absences.items() if address not in present}
        stay = {address: count for address, count in counts.items() if count < _ABSENCES}
        self._absences = stay | dict.fromkeys(present, 0)


class Discovery:
    """Follows the sources of one pool.

    Attributes:
        problems: why the last lookup of a name was of no use, by dns:NAME:PORT.

    Args:
        sources: of the pool.
        changed: called with all addresses whenever there are others, and at the start.
        resolve: looks a name up.
    """

    def __init__(self, sources: Sources, changed: Callable[[Sequence[str]], None], resolve: Resolve = resolve) -> None:
        self._sources, self._changed, self._resolve = sources, changed, resolve
        self._members = {name: Members() for name in sources.names}
        self._told: list[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.problems: dict[str, str] = {}

    def start(self) -> None:
        """Tells the addresses that are known, and begins to look up names."""
        self._tell()
        self._tasks = [asyncio.create_task(self._follow(*name), name=f"lookups of {name[0]}") for name in self._members]

    async def close(self) -> None:
        """Ends the lookups. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, name: str, port: int) -> None:
        """One lookup at a time: a resolver that hangs holds one thread, however long it takes."""
        while True:
            try:
                await self.look_up(name, port)
            except Exception:
                log.exception("%s%s:%d: following it failed, and goes on", _DNS, name, port)
            await asyncio.sleep(LOOKUP_SECONDS * random.uniform(0.9, 1.1))

    async def look_up(self, name: str, port: int) -> None:
        """One lookup. One that fails or finds nothing changes no members: that the resolver is ill says nothing about
        the workers, whose health is watched."""
        source = f"{_DNS}{name}:{port}"
        try:
            found = list(await self._resolve(name, port))
        except (OSError, UnicodeError) as error:
            self._failed(source, f"the lookup failed: {error}", self._members[name, port])
        else:
            if found:
                self._members[name, port].found(found)
                if self.problems.pop(source, None) is not None:
                    log.info("%s is found again", source)
            else:
                self._failed(source, "the lookup found no address", self._members[name, port])
        self._tell()

    def _failed(self, source: str, problem: str, members: Members) -> None:
        problem = f"{problem}; the {len(members)} addresses found before stay"
        if self.problems.get(source) != problem:
            log.warning("%s: %s", source, problem)
        self.problems[source] = problem

    def _tell(self) -> None:
        looked_up = (address for members in self._members.values() for address in members)
        addresses = list(dict.fromkeys((*self._sources.addresses, *looked_up)))
        if addresses != self._told:
            self._told = addresses
            self._changed(addresses)
