"""One generation: what is committed, and its hold on a draft and a target worker."""

import asyncio
import time
from typing import TypeAlias

from orchestrator.costs import round_cost
from orchestrator.drafting import Drafting
from orchestrator.lookahead import SessionLookahead
from orchestrator.prefix import TokenBuffer
from orchestrator.proposal import Proposal
from orchestrator.request import GenerationPlan
from orchestrator.stats import RoundStats
from orchestrator.text.output import Kept, Output
from orchestrator.tracing import SessionTrace
from orchestrator.verifying import Verified, Verifying
from outrider.law.sparse import Int32Array
from outrider.lm.grammars import SessionGrammar
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2

# The block of a round as it was verified, the target's answer, and what both took.
Scored: TypeAlias = tuple[Proposal, Verified, RoundStats]


class Session:
    """State of one generation in its owner.

    Attributes:
        plan: what was asked for.
        epoch: of this owner.
        tokens: prompt and committed tokens, during a commit those that it writes as well; its length is the base length
            of the next round.
        output: which tokens become text.
        grammar: where the output stands in its language; None without one.
        rounds: rounds run.
        drafted, accepted: draft tokens of these that were verified, and those that were kept.
        trace: its spans; None where it is not traced.
        ahead: the next round's block and rows, where they are made while this round's commit is under way.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        epoch: int,
        tokens: Int32Array,
        output: Output,
        drafting: Drafting,
        verifying: Verifying,
        lookahead: SessionLookahead,
        grammar: SessionGrammar | None = None,
        trace: SessionTrace | None = None,
    ) -> None:
        self.plan = plan
        self.epoch = epoch
        self.tokens = TokenBuffer(tokens)
        self.output = output
        self.drafting = drafting
        self.verifying = verifying
        self.lookahead = lookahead
        self.grammar = grammar
        self.trace = trace
        self.rounds = self.drafted = self.accepted = 0
        self.ahead: asyncio.Task[Scored] | None = None
        self._advanced_at = 0.0

    def begin(self) -> None:
        """Lets the draft worker cache the prompt while the target computes it."""
        self._trace_next()
        self.drafting.warm_up(self.tokens)

    @property
    def base_length(self) -> int:
        """Number of committed tokens."""
        return len(self.tokens)

    def take_ahead(self) -> "asyncio.Task[Scored] | None":
        """What was begun for this round, if anything."""
        ahead, self.ahead = self.ahead, None
        return ahead

    def drop_ahead(self) -> None:
        """There is no next round; `close` waits for the end of what was begun for it."""
        if self.ahead is not None:
            self.ahead.cancel()

    def check(self, kept: Kept) -> None:
        """Raises OutriderError NO_PROGRESS when the language does not allow what the round came to."""
        if self.grammar is None or self.grammar.legal(self.tokens.view(), kept.tokens) == len(kept.tokens):
            return
        message = f"the target's answer after {self.base_length} tokens is outside the grammar"
        raise OutriderError(types_pb2.ERROR_REASON_NO_PROGRESS, message)

    def advance(self, kept: Kept, stats: RoundStats) -> None:
        """Moves the base length, and asks for the next block. The round's commit may still be under way: it ends the
        session when it fails."""
        self._learn(stats, len(kept.tokens))
        accepted = stats.accepted
        # Of a tree the workers do not know which path was kept: the next messages bring it.
        agreed = self.base_length + (0 if stats.tree_depth else min(accepted, len(kept.tokens)))
        self.tokens.append(kept.tokens)
        self.verifying.learned(min(agreed, self.base_length - 1))
        if accepted and not stats.tree_depth:
            self.drafting.learned(min(agreed, self.base_length - 1))
        if kept.finish is None:
            self._trace_next()
            room = min(self._room(), self.verifying.longest_block)
            self.drafting.ask(self.tokens, room, min(self.plan.max_nodes, self.verifying.largest_tree))
            if self.lookahead.alone or self.lookahead.probing:
                self.verifying.away()

    def count(self, stats: RoundStats) -> None:
        """A round was committed."""
        self.rounds += 1
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    def _trace_next(self) -> None:
        """The messages of the next round carry its spans."""
        if self.trace is not None:
            self.drafting.traceparent, self.verifying.traceparent = self.trace.next_round()

    def _learn(self, stats: RoundStats, tokens: int) -> None:
        """Tells the lookahead control of the round; one with a prompt says nothing about those without."""
        now = time.perf_counter()
        since, self._advanced_at = now - self._advanced_at, now
        if self.rounds and stats.target_passes == 1:
            # A block that was drafted ahead is as long as the one before was to be.
            longest = stats.drafted if stats.drafted_ahead else None
            cost = round_cost(stats, since, tokens)
            self.lookahead.learn(cost, stats.accepted, longest)
            self.drafting.learn(cost)
        else:
            self.lookahead.withheld()

    def _room(self) -> int:
        """Longest block that makes sense: a round gives one token more than its block holds."""
        generated = self.base_length - len(self.plan.prompt)
        return self.plan.stop.max_tokens - generated - 1

    async def close(self) -> None:
        """Frees the session at both workers; what was begun for its next round is dropped. Idempotent."""
        self.drop_ahead()
        ahead = self.take_ahead()
        if ahead is not None:
            # What it came to is nobody's any more; a Verify that was not sent yet never is.
            await asyncio.gather(ahead, return_exceptions=True)
        if self.trace is not None:
            self.trace.close()
        # Complete only when its last commit was acknowledged.
        self.drafting.close(self.tokens if self.output.finish is not None else None)
        await self.verifying.close()
