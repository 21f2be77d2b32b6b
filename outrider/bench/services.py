"""Our own two ways: a running orchestrator, with and without speculation."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import grpc

from outrider.bench.prompts import PromptSet
from outrider.bench.sample import Asked, Sample
from outrider.cli.options import PROPOSERS, ProposerName
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from outrider.v1.types_pb2 import SamplingParams

# The names of the ways: ours, and those that make their blocks as ours does.
SPECULATIVE, PLAIN = "speculative", "plain"
LOOP, ASSISTED = "loop", "transformers assisted"


@dataclass(frozen=True)
class Drafted:
    """How blocks are made.

    Attributes:
        lookahead: longest block; 0 is plain decoding, None lets the orchestrator choose each round's.
        proposer: what makes them; None is the draft worker's default.
        fixed: longest block of ways that cannot choose, where `lookahead` is None.
    """

    lookahead: int | None
    proposer: ProposerName | None = None
    fixed: int = 4

    def chosen(self) -> "Drafted":
        """The same for ways that cannot choose."""
        return replace(self, lookahead=self.length)

    @property
    def length(self) -> int:
        """Longest block of ways that cannot choose."""
        return self.fixed if self.lookahead is None else self.lookahead


@dataclass(frozen=True)
class Services:
    """An orchestrator as a Way.

    Attributes:
        name: of the way.
        channel: to the orchestrator.
        asked: what every request asks for.
        drafted: how blocks are made, where the set has no entry in `by_set`.
        by_set: the same for single prompt sets.
        acceptance: the rule; None leaves it to the orchestrator.
        seconds: deadline of one call.
    """

    name: str
    channel: grpc.aio.Channel
    asked: Asked
    drafted: Drafted
    by_set: Mapping[str, Drafted] = field(default_factory=dict)
    acceptance: "pb.Acceptance.ValueType | None" = None
    seconds: float = 600.0

    def declines(self, prompts: PromptSet, concurrency: int) -> str:
        """Never."""
        return ""

    async def answer(self, prompts: PromptSet, index: int, max_tokens: int) -> Sample:
        """One Generate call."""
        request = self._request(prompts, index, max_tokens)
        sample, ids = Sample(index), list[int]()
        began = time.perf_counter()
        async for message in OrchestratorServiceStub(self.channel).Generate(request, timeout=self.seconds):
            now = time.perf_counter() - began
            if message.tokens:
                sample.arrivals.append(now)
                ids += (token.id for token in message.tokens)
            if message.HasField("round"):
                sample.stats.add_round(message.round)
        sample.seconds = sample.stats.seconds = time.perf_counter() - began
        sample.tokens = sample.stats.tokens = len(ids)
        sample.ids = tuple(ids)
        return sample

    def blocks_for(self, prompts: PromptSet) -> Drafted:
        """How the blocks of a set are made."""
        return self.by_set.get(prompts.name, self.drafted)

    def _request(self, prompts: PromptSet, index: int, max_tokens: int) -> pb.GenerateRequest:
        prompt, drafted = prompts.prompts[index], self.blocks_for(prompts)
        request = pb.GenerateRequest(
            sampling=SamplingParams(temperature=self.asked.temperature),
            stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=self.asked.ignore_eos),
            speculation=pb.Speculation(lookahead=drafted.lookahead),
            seed=self.asked.seed,
        )
        if prompt.messages:
            request.chat.messages.extend(pb.ChatMessage(role=it.role, content=it.content) for it in prompt.messages)
        else:
            request.prompt = prompt.prompt
        if self.acceptance is not None:
            request.speculation.acceptance = self.acceptance
        if drafted.proposer is not None and drafted.lookahead != 0:
            request.speculation.proposer = PROPOSERS[drafted.proposer]
        return request
