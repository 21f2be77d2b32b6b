"""One Generate call, as the commands make it."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc

from outrider.cli.stats import RunStats
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

OnTokens = Callable[[Iterable[pb.Token]], None]
OnChoiceTokens = Callable[[int, Iterable[pb.Token]], None]


@dataclass
class Generation:
    """What a call returned.

    Attributes:
        started, finish: the first and the last word of the service.
        tokens: delivered token ids.
        text: their text.
        pieces: the tokens as they came.
        stats: counts from the rounds.
        first_token_seconds: from the request to the first token, or None without one.
    """

    started: pb.Started = field(default_factory=pb.Started)
    finish: pb.Finish = field(default_factory=pb.Finish)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[pb.Token] = field(default_factory=list)
    stats: RunStats = field(default_factory=RunStats)
    first_token_seconds: float | None = None


async def generate(
    channel: grpc.aio.Channel, request: pb.GenerateRequest, *, seconds: float, on_tokens: OnTokens
) -> Generation:
    """Streams one generation to its end. Cancelling it cancels the call.

    Args:
        channel: to the orchestrator.
        request: what to generate.
        seconds: deadline of the call.
        on_tokens: gets the tokens of each message as they arrive.

    Raises grpc.aio.AioRpcError.
    """
    choices = await generate_choices(channel, request, seconds=seconds, on_tokens=lambda _, tokens: on_tokens(tokens))
    return choices[0]


async def generate_choices(
    channel: grpc.aio.Channel,
    request: pb.GenerateRequest,
    *,
    seconds: float,
    on_tokens: OnChoiceTokens,
    metadata: tuple[tuple[str, str], ...] = (),
) -> list[Generation]:
    """Streams all n generations to their ends; as `generate`, but `on_tokens` gets the number of the choice too.

    `metadata` travels with the call.
    """
    choices = [Generation()]
    began = time.perf_counter()
    async for answer in OrchestratorServiceStub(channel).Generate(request, timeout=seconds, metadata=metadata):
        choices += (Generation() for _ in range(len(choices), answer.choice + 1))
        result = choices[answer.choice]
        if answer.HasField("started"):
            result.started = answer.started
        if answer.tokens and result.first_token_seconds is None:
            result.first_token_seconds = time.perf_counter() - began
        _take(result, answer)
        on_tokens(answer.choice, answer.tokens)
        result.stats.seconds = time.perf_counter() - began
    return choices


def _take(result: Generation, answer: pb.GenerateResponse) -> None:
    result.pieces.extend(answer.tokens)
    result.tokens.extend(token.id for token in answer.tokens)
    result.text += "".join(token.text for token in answer.tokens)
    result.stats.tokens = len(result.tokens)
    if answer.HasField("round"):
        result.stats.add_round(answer.round)
    if answer.HasField("finish"):
        result.finish = answer.finish
