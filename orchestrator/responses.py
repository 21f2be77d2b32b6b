"""The messages of a generation's stream."""

from collections.abc import Iterator

from orchestrator.names import told
from orchestrator.replay import Replay
from orchestrator.request import GenerationPlan
from orchestrator.session import Session
from orchestrator.stats import RoundStats
from orchestrator.text.output import Emission, EmittedToken
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import Finish, FinishReason, GenerateResponse, Started, Token, TopLogprob, Usage


def started(plan: GenerationPlan, committed: int = 0) -> GenerateResponse:
    """The first message; `committed` generated tokens are there already."""
    return GenerateResponse(
        started=Started(
            session_id=told(plan.session_id),
            prompt_tokens=len(plan.prompt),
            seed=plan.seed,
            acceptance=plan.acceptance,
            committed_tokens=committed,
        )
    )


def round_response(session: Session, emission: Emission, stats: RoundStats) -> GenerateResponse:
    """What a round gave; with `finish` in the last one."""
    response = GenerateResponse(tokens=map(_token, emission.tokens), round=stats.message())
    if emission.finish is not None:
        usage = session.output.usage(session.rounds)
        response.finish.CopyFrom(_finish(emission.finish.reason, emission.finish.matched_stop, usage))
    return response


def replay_response(left: Replay) -> GenerateResponse:
    """What was committed before; with `finish` when that was all."""
    response = GenerateResponse(tokens=map(_token, left.emission.tokens))
    if not left.running:
        matched = left.emission.finish.matched_stop if left.emission.finish else ""
        response.finish.CopyFrom(_finish(left.record.finish_reason, matched, left.output.usage(rounds=0)))
    return response


def in_parts(response: GenerateResponse, most: int) -> Iterator[GenerateResponse]:
    """The same tokens in messages of at most `most`; everything else goes with the last."""
    before_last = max(0, len(response.tokens) - 1) // most * most
    for start in range(0, before_last, most):
        yield GenerateResponse(tokens=response.tokens[start : start + most])
    del response.tokens[:before_last]
    yield response


def finished_by_cancel(plan: GenerationPlan, session: Session | None) -> GenerateResponse:
    """The last message of a choice whose session was cancelled, perhaps before it began."""
    usage = session.output.usage(session.rounds) if session else Usage(prompt_tokens=len(plan.prompt))
    return GenerateResponse(finish=Finish(reason=orchestrator_pb2.FINISH_REASON_CANCELLED, usage=usage))


def _finish(reason: int, matched_stop: str, usage: Usage) -> Finish:
    return Finish(reason=FinishReason.ValueType(reason), matched_stop=matched_stop, usage=usage)


def _token(token: EmittedToken) -> Token:
    message = Token(id=token.id, text=token.text, origin=token.origin)
    if token.logprobs is not None:
        message.logprob = token.logprobs.logprob
        message.top_logprobs.extend(TopLogprob(id=index, logprob=value) for index, value in token.logprobs.top)
    return message
