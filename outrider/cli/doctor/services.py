"""What the services say of themselves: health, token, state, GetInfo."""

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.access import Connection
from outrider.cli.doctor.findings import Finding, broken, ok, warning
from outrider.cli.doctor.handshake import agrees
from outrider.cli.doctor.network import Endpoint, connects
from outrider.net.address import is_loopback
from outrider.net.channel import connect
from outrider.net.errors import from_rpc_error, reason_name
from outrider.net.tls import explained
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2
from outrider.v1.orchestrator_pb2 import (
    OrchestratorServiceGetInfoRequest,
    OrchestratorServiceGetInfoResponse,
    WorkerStatus,
)
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

Info = target_pb2.TargetServiceGetInfoResponse | draft_pb2.DraftServiceGetInfoResponse
# Beyond the service's own deadline, which ends a call that hangs.
_CALL_SECONDS = 4.0


@dataclass(frozen=True)
class Worker:
    """What is known of a worker, from itself or from an orchestrator.

    Attributes:
        version: of its package; empty while unknown.
        proposers: that a draft worker offers; empty while unknown.
        history_tokens: of earlier outputs that a draft worker keeps of each tenant.
        endpoint: where it was asked; None when an orchestrator said it.
    """

    name: str
    kind: str
    model: types_pb2.ModelInfo
    version: str = ""
    proposers: tuple[str, ...] = ()
    endpoint: Endpoint | None = None
    history_tokens: int = 0


async def orchestrator(
    endpoint: Endpoint, connection: Connection
) -> tuple[OrchestratorServiceGetInfoResponse | None, list[Finding]]:
    """(what it serves, what was found), once it is known to be reachable."""
    async with connection.channel as channel:
        try:
            info = await _info(channel, connection.metadata)
            found = [await _token(endpoint, connection), await _orchestrator_health(endpoint, channel, info)]
        except grpc.aio.AioRpcError as error:
            return None, [_refused(endpoint, error, token=bool(connection.metadata))]
    version = ok("version", endpoint.name, f"Outrider {info.version}, protocol outrider.v1")
    return info, [*found, version, *(_as_used(endpoint, worker) for worker in info.workers), *_pool(endpoint, info)]


async def _info(
    channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()
) -> OrchestratorServiceGetInfoResponse:
    request = OrchestratorServiceGetInfoRequest()
    return await OrchestratorServiceStub(channel).GetInfo(request, timeout=_CALL_SECONDS, metadata=metadata)


async def _token(endpoint: Endpoint, connection: Connection) -> Finding:
    try:
        await _info(connection.channel)
    except grpc.aio.AioRpcError as error:
        if connection.metadata and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return ok("token", endpoint.name, "the token is accepted, and none is refused")
        raise
    if is_loopback(endpoint.split[0]):
        return ok("token", endpoint.name, "none is asked for")
    advice = "give it --keys-file (`outrider keys new NAME`), unless something in front asks for tokens"
    return warning("token", endpoint.name, "none is asked for: whoever reaches it may generate", advice)


async def _health(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_SECONDS)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _orchestrator_health(
    endpoint: Endpoint, channel: grpc.aio.Channel, info: OrchestratorServiceGetInfoResponse
) -> Finding:
    if await _health(channel):
        return ok("health", endpoint.name, f"serving, {info.running_sessions} sessions run")
    if any(worker.usable for worker in info.workers if worker.kind == "target"):
        advice = "if it was not told to end, look at its store (--store checks it from here) and at its log"
        return broken("health", endpoint.name, "not serving though it has a target: it drains, or has no store", advice)
    return broken("health", endpoint.name, "not serving: no target is in use", "see what it says of its targets")


def _as_used(endpoint: Endpoint, worker: WorkerStatus) -> Finding:
    """One worker in an orchestrator's eyes."""
    subject = f"{worker.kind} {worker.address}"
    if worker.usable and not worker.shortfalls:
        return ok("in use", subject, f"by {endpoint.address}, {worker.sessions} sessions")
    if worker.usable:
        advice = "start it with what the others have (--context-length, --max-lookahead), or live with it"
        return warning("in use", subject, f"by {endpoint.address}, short: {'; '.join(worker.shortfalls)}", advice)
    seen = f"not by {endpoint.address}: {worker.reason or 'no reason given'}"
    if "is shutting down" in worker.reason or "still loading" in worker.reason:
        return warning("in use", subject, seen, "wait: it ends, or begins; look again when it should be over")
    if "it is the same worker as" in worker.reason:
        return ok("in use", subject, seen)
    return broken("in use", subject, seen, "put right what the reason says; what is wrong with the worker stands below")


def _pool(endpoint: Endpoint, info: OrchestratorServiceGetInfoResponse) -> list[Finding]:
    used = {kind: sum(each.usable for each in info.workers if each.kind == kind) for kind in ("target", "draft")}
    found = []
    if not used["target"]:
        advice = "start a target worker, or correct its --targets"
        found.append(broken("pools", endpoint.name, "it has no target in use: it serves nothing", advice))
    if not any(each.kind == "draft" for each in info.workers):
        found.append(ok("pools", endpoint.name, "it has no draft workers (--drafts): it decodes plainly"))
    elif not used["draft"]:
        advice = "outputs are right and slow until a draft worker is in use"
        found.append(broken("pools", endpoint.name, "it has no draft in use: it decodes plainly", advice))
    return found


async def worker(endpoint: Endpoint, seconds: float) -> tuple[Worker | None, list[Finding]]:
    """(what it says of itself, what was found); its connection may take so many seconds."""
    tcp = await connects(endpoint, seconds)
    if tcp.level != "ok":
        return None, [tcp]
    spoken, tls = await agrees(endpoint)
    if not spoken:
        return None, [tcp, tls]
    async with connect(endpoint.address, endpoint.tls) as channel:
        try:
            state = await _state(endpoint, channel)
            info = await get_info(endpoint, channel)
        except grpc.aio.AioRpcError as error:
            return None, [tcp, tls, _refused(endpoint, error)]
    proposers = info.proposers if isinstance(info, draft_pb2.DraftServiceGetInfoResponse) else ()
    kept = info.history_tokens if isinstance(info, draft_pb2.DraftServiceGetInfoResponse) else 0
    names = tuple(map(_proposer, proposers))
    known = Worker(endpoint.name, endpoint.kind, info.model, info.version, names, endpoint, kept)
    seen = f"Outrider {info.version or 'before 0.1.0'}, protocol outrider.v1, law {info.model.law_version}"
    return known, [tcp, tls, state, ok("version", endpoint.name, seen)]


def _proposer(number: int) -> str:
    """Its name; a newer worker may have one that is not known here."""
    known = draft_pb2.Proposer.DESCRIPTOR.values_by_number.get(number)
    return known.name.removeprefix("PROPOSER_").lower() if known is not None else f"number {number}"


async def get_info(endpoint: Endpoint, channel: grpc.aio.Channel, *, hashes: bool = False) -> Info:
    """What a worker serves. Raises AioRpcError."""
    if endpoint.kind == "target":
        asked = target_pb2.TargetServiceGetInfoRequest(include_token_hashes=hashes)
        target: Info = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(asked, timeout=_CALL_SECONDS)
        return target
    wanted = draft_pb2.DraftServiceGetInfoRequest(include_token_hashes=hashes)
    draft: Info = await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(wanted, timeout=_CALL_SECONDS)
    return draft


async def _state(endpoint: Endpoint, channel: grpc.aio.Channel) -> Finding:
    """Health, and where it does not serve the reason that work would be refused with: work that is none asks for it."""
    if await _health(channel):
        return ok("health", endpoint.name, "serving")
    try:
        if endpoint.kind == "target":
            await target_pb2_grpc.TargetServiceStub(channel).Verify(target_pb2.VerifyRequest(), timeout=_CALL_SECONDS)
        else:
            stream = draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=_CALL_SECONDS)
            await stream.done_writing()
            await stream.read()
    except grpc.aio.AioRpcError as error:
        return _refused(endpoint, error)
    return warning("health", endpoint.name, "it turned from not serving to serving, or back", "look again")


def _refused(endpoint: Endpoint, error: grpc.aio.AioRpcError, *, token: bool = False) -> Finding:
    """Why a call failed, in terms of what to do."""
    known, details, subject = from_rpc_error(error), error.details() or "no details", endpoint.name
    if known is not None and known.reason == types_pb2.ERROR_REASON_NO_WORKER:
        return warning("health", subject, f"loading: {known.message}", "wait until its model is loaded")
    if known is not None and known.reason == types_pb2.ERROR_REASON_DRAINING:
        return warning("health", subject, f"draining: {known.message}", "it ends; if nobody told it to, see its log")
    if known is not None and known.reason == types_pb2.ERROR_REASON_ENGINE_FAILED:
        advice = "restart it; its log says what the pass was, --stall-timeout how long one may take"
        return broken("health", subject, f"stuck: {known.message}", advice)
    if known is not None:
        return broken("health", subject, f"{reason_name(known.reason)}: {known.message}", "see its log")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        advice = "--token-file or OUTRIDER_TOKEN; the hash of the token must be in its --keys-file"
        return broken("token", subject, "the token is unknown to it" if token else "it wants a token", advice)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        advice = "correct the address, or bring both to one version: the protocol here is outrider.v1"
        return broken("version", subject, f"it is no {endpoint.kind} of this protocol ({details})", advice)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        advice = "it is frozen, or far too busy: look at the process, and restart it"
        return broken("health", subject, "it is connected and answers nothing", advice)
    return broken("health", subject, f"{error.code().name}: {explained(details)}", "see its log")


def as_told(info: OrchestratorServiceGetInfoResponse) -> list[Worker]:
    """Workers as an orchestrator knows them."""
    return [
        Worker(f"{each.kind} {each.address}", each.kind, each.model) for each in info.workers if each.HasField("model")
    ]
