"""Real rounds through everything: one token plainly, some with blocks, and the session taken up elsewhere."""

import secrets

import grpc

from outrider.cli.access import Connection
from outrider.cli.client import Generation, generate_choices
from outrider.cli.doctor.findings import Finding, broken, ok, unseen, warning
from outrider.cli.doctor.network import Endpoint
from outrider.cli.report import number, percent, reason_text
from outrider.cli.run import rpc_failure
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

PROMPT = "abc"
# The first round computes the prompt, and the draft's own takes as long: some rounds until a block may be there.
_TOKENS, _LOOKAHEAD = 16, 2


def new_session() -> str:
    """An id that shows in logs and in the store whose session it was."""
    return f"doctor-{secrets.token_hex(8)}"


async def plain(endpoint: Endpoint, connection: Connection, session_id: str, seconds: float) -> list[Finding]:
    """One token without a block, in a session that outlives its stream."""
    request = _request(1, 0)
    request.session_id, request.resumable = session_id, True
    try:
        result = await _generated(connection, request, seconds)
    except grpc.aio.AioRpcError as error:
        return [_failed(endpoint, error)]
    stats = result.stats
    if len(result.tokens) != 1 or not stats.rounds:
        seen = f"{len(result.tokens)} tokens came where one was asked for"
        return [broken("round", endpoint.name, seen, "its log says more: this is a fault of the service")]
    around = 1e3 * (stats.verify_seconds - stats.verify_forward_seconds)
    seen = (
        f"one token in {1e3 * stats.seconds:.0f} ms: target {1e3 * stats.verify_forward_seconds:.1f} ms, around it "
        f"{around:.1f} ms, store {1e3 * stats.commit_seconds:.1f} ms"
    )
    return [ok("round", endpoint.name, seen)]


async def speculative(
    endpoint: Endpoint, connection: Connection, info: pb.OrchestratorServiceGetInfoResponse, seconds: float
) -> list[Finding]:
    """Some tokens with blocks of two: was one drafted, verified, kept?"""
    if not any(each.usable for each in info.workers if each.kind == "draft"):
        return [unseen("block", endpoint.name, "no round with a block was run: no draft worker is in use")]
    if not info.max_lookahead:
        return [unseen("block", endpoint.name, "no round with a block was run: --max-lookahead is 0")]
    try:
        result = await _generated(connection, _request(_TOKENS, min(_LOOKAHEAD, info.max_lookahead)), seconds)
    except grpc.aio.AioRpcError as error:
        return [_failed(endpoint, error)]
    stats = result.stats
    if not stats.drafted:
        reasons = ", ".join(f"{count} {reason_text(reason)}" for reason, count in stats.plain.most_common())
        advice = "see the draft workers above; operations.md says what each reason means"
        return [broken("block", endpoint.name, f"no block in {stats.rounds} rounds: {reasons or 'no reason'}", advice)]
    seen = (
        f"{stats.drafted} tokens drafted, {percent(stats.acceptance)} kept; a round: draft {number(stats.draft_ms)} ms "
        f"waited for, {number(1e3 * stats.draft_forward_seconds / stats.rounds)} ms computed, verify "
        f"{number(stats.verify_ms)} ms, accept {number(1e3 * stats.accept_seconds / stats.rounds)} ms"
    )
    if not stats.accepted:
        advice = (
            "of so few tokens it may be chance; if it stays so, the draft does not suit the target: `outrider plan`"
        )
        return [warning("block", endpoint.name, seen, advice)]
    return [ok("block", endpoint.name, seen)]


async def resumed(endpoint: Endpoint, connection: Connection, session_id: str, seconds: float) -> list[Finding]:
    """The session of `plain`, at another orchestrator: they have one store."""
    request = pb.ResumeRequest(session_id=session_id, offset=0)
    tokens = 0
    try:
        async with connection.channel as channel:
            stub = OrchestratorServiceStub(channel)
            async for answer in stub.Resume(request, timeout=seconds, metadata=connection.metadata):
                tokens += len(answer.tokens)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            seen = "it does not know the session of another orchestrator: their stores differ"
            return [broken("resume", endpoint.name, seen, "give all the same --store, a redis:// one (reliability.md)")]
        return [_failed(endpoint, error, "resume")]
    return [ok("resume", endpoint.name, f"it replays the {tokens} token of the session made elsewhere")]


def _request(tokens: int, lookahead: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(prompt=PROMPT)
    request.sampling.temperature = 0.0
    request.stop.max_tokens, request.stop.ignore_eos = tokens, True
    request.speculation.lookahead = lookahead
    return request


async def _generated(connection: Connection, request: pb.GenerateRequest, seconds: float) -> Generation:
    async with connection.channel as channel:
        (result,) = await generate_choices(
            channel, request, seconds=seconds, on_tokens=lambda _, __: None, metadata=connection.metadata
        )
    return result


def _failed(endpoint: Endpoint, error: grpc.aio.AioRpcError, check: str = "round") -> Finding:
    return broken(check, endpoint.name, rpc_failure(error), "operations.md says what each reason means, and what to do")
