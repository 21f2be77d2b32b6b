"""A way of answering that counts who asks."""

import asyncio
from dataclasses import dataclass, field

from outrider.bench.prompts import PromptSet
from outrider.bench.sample import Sample
from outrider.cli.run import Failure


@dataclass
class Counting:
    """Answers at once.

    Attributes:
        reason: why it declines more than one request at once; empty when it does not.
        asked: (index of the prompt, most tokens) of every request, in order.
        most: how many were under way together.
        fails_at: the request that fails.
    """

    name: str
    reason: str = ""
    asked: list[tuple[int, int]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    fails_at: int = 1 << 30

    def declines(self, prompts: PromptSet, concurrency: int) -> str:
        return self.reason if concurrency > 1 else ""

    async def answer(self, prompts: PromptSet, index: int, max_tokens: int) -> Sample:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if len(self.asked) == self.fails_at:
                raise Failure("no more")
            self.asked.append((index, max_tokens))
            await asyncio.sleep(0)
            return Sample(index, [0.0], 0.0, tokens=max_tokens)
        finally:
            self.under_way -= 1
