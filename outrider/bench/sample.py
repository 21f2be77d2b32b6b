"""One answered prompt, and what every way of answering must offer."""

from dataclasses import dataclass, field
from typing import Protocol

from outrider.bench.prompts import PromptSet
from outrider.cli.stats import RunStats


@dataclass(frozen=True)
class Asked:
    """What every way is asked for, the same for all.

    Attributes:
        max_tokens: most tokens of each output.
        ignore_eos: whether outputs go on past the end of the sequence, to exactly max_tokens.
        temperature: 0 is greedy.
        seed: of every request; None leaves it to each.
    """

    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int | None = None

    @property
    def repeatable(self) -> bool:
        """Whether every way that is exact gives the same tokens, speculative or not."""
        return self.temperature == 0 or self.seed is not None


@dataclass
class Sample:
    """One answer.

    Attributes:
        prompt: index in its set.
        arrivals: seconds from the request to each message that brought text or tokens.
        seconds: from the request to the end of the answer.
        tokens: of the answer.
        ids: these tokens; None where the other side does not tell them.
        stats: counts of its rounds; without rounds where the other side tells nothing of them.
    """

    prompt: int
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    ids: tuple[int, ...] | None = None
    stats: RunStats = field(default_factory=RunStats)


class Way(Protocol):
    """A way of answering prompts."""

    @property
    def name(self) -> str:
        """Its row in tables."""

    def declines(self, prompts: PromptSet, concurrency: int) -> str:
        """Why it cannot be measured there, for people; empty when it can."""

    async def answer(self, prompts: PromptSet, index: int, max_tokens: int) -> Sample:
        """Answers prompt `index` of the set with at most so many tokens. Raises Failure, or grpc.aio.AioRpcError."""
