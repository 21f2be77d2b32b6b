"""All checks of an installation, in the order of a request's way through it."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outrider.cli.access import Connection, Reach
from outrider.cli.doctor import rounds, services
from outrider.cli.doctor.agreement import agreement
from outrider.cli.doctor.findings import Finding, Level, broken, unseen, within
from outrider.cli.doctor.handshake import agrees
from outrider.cli.doctor.network import DNS, Endpoint, connects, looked_up
from outrider.cli.doctor.scrape import scraped
from outrider.cli.doctor.services import Worker
from outrider.cli.doctor.store import StoreSettings, store
from outrider.cli.run import Failure
from outrider.net.tls import ClientTls, TlsError
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoResponse

# Of one kind; more are counted, and not looked at one by one.
_MOST = 64


@dataclass(frozen=True)
class WorkerTls:
    """As the orchestrator's flags of these names."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    target_name: str = ""
    draft_name: str = ""

    def client(self, kind: str) -> ClientTls | None:
        """How workers of a kind are checked. Raises TlsError."""
        name = self.target_name if kind == "target" else self.draft_name
        if not (self.ca or self.cert or self.key or name):
            return None
        return ClientTls(self.ca, self.cert, self.key, name, flags="--worker-tls")


@dataclass(frozen=True)
class Settings:
    """What to look at.

    Attributes:
        orchestrators, targets, drafts: HOST:PORT or dns:NAME:PORT.
        metrics: HOST:PORT of metrics endpoints.
        seconds: that a check may take; `round_seconds` for one that generates, or starts a process.
    """

    orchestrators: Sequence[str]
    targets: Sequence[str] = ()
    drafts: Sequence[str] = ()
    metrics: Sequence[str] = ()
    store: StoreSettings = field(default_factory=StoreSettings)
    reach: Reach = field(default_factory=Reach)
    worker_tls: WorkerTls = field(default_factory=WorkerTls)
    seconds: float = 5.0
    round_seconds: float = 60.0


@dataclass(frozen=True)
class _Edge:
    """An orchestrator, and how it is called."""

    endpoint: Endpoint
    reach: Reach
    info: OrchestratorServiceGetInfoResponse | None = None


async def examine(settings: Settings) -> AsyncIterator[list[Finding]]:
    """Findings, part after part. Raises Failure when the flags themselves cannot be used."""
    try:
        tls = {kind: settings.worker_tls.client(kind) for kind in ("target", "draft")}
        settings.reach.client_tls()
    except TlsError as error:
        raise Failure(str(error)) from None
    edges: list[_Edge] = []
    for source in settings.orchestrators:
        found, more = await _edges(settings, source)
        yield found
        edges += more
    for index, edge in enumerate(edges):
        edges[index], found = await _orchestrator(settings, edge)
        yield found
    endpoints, found = await _workers(settings, edges, tls)
    yield found
    answers = await asyncio.gather(*(_worker(settings, each) for each in endpoints))
    for _, found in answers:
        yield found
    known = [(edge.endpoint, edge.info) for edge in edges if edge.info is not None]
    workers = _merged([worker for worker, _ in answers if worker], (services.as_told(info) for _, info in known))
    yield await within(settings.round_seconds, "agreement", "all", agreement(known, workers))
    if settings.store.url:
        yield await within(settings.round_seconds, "store", "store", store(settings.store, settings.seconds))
    else:
        yield [unseen("store", "store", "not looked at: --store was not given")]
    for address in settings.metrics:
        work = scraped(address, settings.seconds)
        yield await within(settings.seconds + 1.0, "metrics", f"metrics {address}", work)
    async for found in _rounds(settings, [edge for edge in edges if edge.info is not None]):
        yield found


async def _edges(settings: Settings, source: str) -> tuple[list[Finding], list[_Edge]]:
    addresses, found = await _looked_up(settings, "orchestrator", source)
    reach = settings.reach
    if source.startswith(DNS) and reach.client_tls() and not reach.tls_server_name:
        # Clients call it by this name, whatever address they get.
        reach = replace(reach, tls_server_name=source.removeprefix(DNS).rpartition(":")[0])
    files = (reach.tls_ca, reach.tls_cert, reach.tls_key)
    found += _left_out("orchestrator", len(addresses))
    return found, [
        _Edge(Endpoint("orchestrator", address, reach.client_tls(), files), reach) for address in addresses[:_MOST]
    ]


def _left_out(kind: str, count: int) -> list[Finding]:
    return [unseen("many", f"{kind}s", f"{count - _MOST} more were not looked at one by one")] if count > _MOST else []


async def _orchestrator(settings: Settings, edge: _Edge) -> tuple[_Edge, list[Finding]]:
    info: OrchestratorServiceGetInfoResponse | None = None

    async def asked() -> list[Finding]:
        nonlocal info
        tcp = await connects(edge.endpoint, settings.seconds)
        if tcp.level is not Level.ok:
            return [tcp]
        spoken, tls = await agrees(edge.endpoint)
        if not spoken:
            return [tcp, tls]
        try:
            connection = edge.reach.to(edge.endpoint.address)
        except Failure as failure:
            return [
                tcp,
                tls,
                broken("token", edge.endpoint.name, str(failure), "give --tls-ca, so that the token is sent over TLS"),
            ]
        info, found = await services.orchestrator(edge.endpoint, connection)
        return [tcp, tls, *found]

    found = await within(2 * settings.seconds, "reach", edge.endpoint.name, asked())
    return replace(edge, info=info), found


async def _looked_up(settings: Settings, kind: str, source: str) -> tuple[list[str], list[Finding]]:
    addresses: list[str] = []

    async def look_up() -> list[Finding]:
        nonlocal addresses
        addresses, found = await looked_up(kind, source)
        return found

    found = await within(settings.seconds, "dns", f"{kind} {source}", look_up())
    return addresses, found


async def _workers(
    settings: Settings, edges: Iterable[_Edge], tls: dict[str, ClientTls | None]
) -> tuple[list[Endpoint], list[Finding]]:
    """Whom to ask: those that were named, and those that orchestrators use."""
    found: list[Finding] = []
    endpoints: dict[tuple[str, str], Endpoint] = {}
    files = (settings.worker_tls.ca, settings.worker_tls.cert, settings.worker_tls.key)
    for kind, sources in (("target", settings.targets), ("draft", settings.drafts)):
        for source in sources:
            addresses, lookups = await _looked_up(settings, kind, source)
            found += lookups
            for address in addresses:
                endpoints[kind, address] = Endpoint(kind, address, tls[kind], files, "--worker-tls")
        for worker in (each for edge in edges if edge.info for each in edge.info.workers if each.kind == kind):
            if not worker.address.startswith(DNS):
                told = Endpoint(kind, worker.address, tls[kind], files, "--worker-tls", told=True)
                endpoints.setdefault((kind, worker.address), told)
        mine = [each for each in endpoints if each[0] == kind]
        for each in mine[_MOST:]:
            del endpoints[each]
        found += _left_out(kind, len(mine))
    return list(endpoints.values()), found


async def _worker(settings: Settings, endpoint: Endpoint) -> tuple[Worker | None, list[Finding]]:
    worker: Worker | None = None

    async def asked() -> list[Finding]:
        nonlocal worker
        worker, found = await services.worker(endpoint, settings.seconds)
        return found

    found = await within(2 * settings.seconds, "reach", endpoint.name, asked())
    return worker, found


def _merged(asked: Iterable[Worker], told: Iterable[Iterable[Worker]]) -> list[Worker]:
    """Each worker once: what it said itself before what others say of it."""
    merged = {worker.name: worker for worker in asked}
    for workers in told:
        for worker in workers:
            merged.setdefault(worker.name, worker)
    return list(merged.values())


async def _rounds(settings: Settings, edges: Sequence[_Edge]) -> AsyncIterator[list[Finding]]:
    if not edges:
        yield [unseen("round", "all", "no round was run: no orchestrator answers")]
        return
    session, made = rounds.new_session(), False
    for edge in edges:
        name, seconds = edge.endpoint.name, settings.round_seconds

        def connection(edge: _Edge = edge) -> Connection:
            return edge.reach.to(edge.endpoint.address)

        assert edge.info is not None
        if made:
            work = rounds.resumed(edge.endpoint, connection(), session, seconds)
            yield await within(seconds + 1.0, "resume", name, work)
        one = session if not made else rounds.new_session()
        found = await within(seconds + 1.0, "round", name, rounds.plain(edge.endpoint, connection(), one, seconds))
        yield found
        if all(each.level is Level.ok for each in found):
            made = True
            work = rounds.speculative(edge.endpoint, connection(), edge.info, seconds)
            yield await within(seconds + 1.0, "block", name, work)
