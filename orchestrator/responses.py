"""The messages of a generation's stream."""

from collections.abc import Iterator

from orchestrator.request import GenerationPlan
from orchestrator.session import Session
from orchestrator.stats import RoundStats
from orchestrator.text.output import Emission, EmittedToken
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import Finish, GenerateResponse, Started, Token, TopLogprob, Usage


def started(plan: GenerationPlan) -> GenerateResponse:
    """The first message."""
    return GenerateResponse(
        started=Started(
            session_id=plan.session_id,
            prompt_tokens=len(plan.prompt),
            seed=plan.seed,
            acceptance=plan.acceptance,
        )
    )


def round_response(session: Session, emission: Emission, stats: RoundStats) -> GenerateResponse:
    """What a round gave; with `finish` in the last one."""
    response = GenerateResponse(tokens=map(_token, emission.tokens), round=stats.message())
    if emission.finish is not None:
        usage = session.output.usage(session.rounds)
        response.finish.CopyFrom(
            Finish(reason=emission.finish.reason, matched_stop=emission.finish.matched_stop, usage=usage)
        )
    return response


def token_by_token(response: GenerateResponse) -> Iterator[GenerateResponse]:
    """The same tokens in messages of at most one; everything else goes with the last."""
    for token in response.tokens[:-1]:
        yield GenerateResponse(tokens=[token])
    del response.tokens[:-1]
    yield response


def finished_by_cancel(plan: GenerationPlan, session: Session | None) -> GenerateResponse:
    """The last message of a choice whose session was cancelled, perhaps before it began."""
    usage = session.output.usage(session.rounds) if session else Usage(prompt_tokens=len(plan.prompt))
    return GenerateResponse(finish=Finish(reason=orchestrator_pb2.FINISH_REASON_CANCELLED, usage=usage))


def _token(token: EmittedToken) -> Token:
    message = Token(id=token.id, text=token.text, origin=token.origin)
    if token.logprobs is not None:
        message.logprob = token.logprobs.logprob
        message.top_logprobs.extend(TopLogprob(id=index, logprob=value) for index, value in token.logprobs.top)
    return message
