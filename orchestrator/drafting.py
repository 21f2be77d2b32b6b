"""One session's side of drafting: ask for the block early, wait for it briefly, believe nothing in it.

Whatever goes wrong here is never an error: the round runs without a block, and says why.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.links.draft import DraftLink
from orchestrator.metrics import Metrics
from orchestrator.pool import DraftPool
from orchestrator.prefix import PeerPrefix, TokenBuffer
from orchestrator.request import GenerationPlan
from orchestrator.stats import RoundStats, micros_since
from outrider.law.audit import audit
from outrider.law.noise import RoundNoise
from outrider.law.params import to_law_spec
from outrider.law.sparse import Int32Array, SparseLaw
from outrider.lm.grammars import SessionGrammar
from outrider.net.arrays import ArrayError, int32s, law_from_message, to_bytes
from outrider.net.errors import OutriderError, from_status
from outrider.v1 import orchestrator_pb2, types_pb2
from outrider.v1.draft_pb2 import Block, DraftCommand, DraftEvent
from outrider.v1.orchestrator_pb2 import PlainReason

Reason: TypeAlias = PlainReason.ValueType

_NO_TOKENS = int32s(b"", "tokens")
_NO_LAW = SparseLaw.concatenate([])

# The state at the worker is gone or wrong: open the session anew with the next command.
_LOST = {types_pb2.ERROR_REASON_SESSION_NOT_FOUND, types_pb2.ERROR_REASON_PREFIX_MISMATCH}


@dataclass(frozen=True)
class Proposal:
    """A block that passed the audit, or the reason why there is none.

    Attributes:
        tokens: [lookahead] int32.
        law: the laws that they were drawn from; without rows where the acceptance rule looks at none.
        reason: unspecified exactly when there are tokens.
    """

    tokens: Int32Array
    law: SparseLaw
    reason: Reason = orchestrator_pb2.PLAIN_REASON_UNSPECIFIED


def no_block(reason: Reason) -> Proposal:
    """A round without a block."""
    return Proposal(_NO_TOKENS, _NO_LAW, reason)


class Drafting:
    """Blocks for one session.

    Args:
        timeout: how long a round waits for its block, in seconds.
        grammar: where the session stands in its language; None without one.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        epoch: int,
        pool: DraftPool,
        metrics: Metrics,
        timeout: float,
        grammar: SessionGrammar | None = None,
    ) -> None:
        self._plan = plan
        self._epoch = epoch
        self._pool = pool
        self._metrics = metrics
        self._timeout = timeout
        self._grammar = grammar
        self._committed: TokenBuffer | None = None
        self._link: DraftLink | None = None
        self._incarnation = 0
        self._peer = PeerPrefix()
        self._asked = 0
        self._pending: asyncio.Future[DraftEvent] | None = None
        self._reason: Reason = orchestrator_pb2.PLAIN_REASON_DISABLED
        self._off: Reason | None = orchestrator_pb2.PLAIN_REASON_DISABLED if plan.lookahead == 0 else None
        self._sent_bytes = 0

    def warm_up(self, tokens: TokenBuffer) -> None:
        """Lets the worker cache the prompt while the target does the same."""
        self.ask(tokens, 0)
        self._pending, self._reason = None, orchestrator_pb2.PLAIN_REASON_PREFILL

    def ask(self, tokens: TokenBuffer, room: int) -> None:
        """Asks for the block at the current base length, at most `room` tokens. Never waits."""
        self._pending, self._sent_bytes, self._committed = None, 0, tokens
        reason = self._off or self._bind(len(tokens))
        link = self._link
        if reason or link is None:
            self._reason = reason or orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE
            return
        self._asked = min(self._plan.lookahead, room, link.max_lookahead)
        command = self._command(tokens)
        self._sent_bytes = command.ByteSize()
        self._pending = link.request(command, len(tokens))
        self._peer.known = len(tokens)
        if room == 0:
            self._pending, self._reason = None, orchestrator_pb2.PLAIN_REASON_LAST_TOKEN

    async def block(self, stats: RoundStats) -> Proposal:
        """The block that was asked for, or the reason for none. Waits at most the timeout."""
        if self._pending is None:
            return no_block(self._reason)
        start = time.perf_counter()
        await asyncio.wait({self._pending}, timeout=self._timeout)
        stats.draft_wait_micros = micros_since(start)
        stats.wire_bytes += self._sent_bytes
        return self._outcome(self._pending, stats)

    def learned(self, length: int) -> None:
        """The worker's own block agrees with the committed tokens up to `length`."""
        self._peer.known = length

    def close(self) -> None:
        """Frees the session at the worker. Idempotent."""
        if self._link is not None:
            self._link.close_session(self._plan.session_id, self._epoch)
            self._link.sessions -= 1
            self._link = None

    def _bind(self, base_length: int) -> Reason | None:
        """Makes sure that there is a worker to ask; returns why there is none."""
        if self._link is None or not self._link.usable:
            self.close()
            picked = self._pool.pick(self._plan.proposer)
            if not isinstance(picked, DraftLink):
                return picked
            self._link = picked
            self._link.sessions += 1
            self._incarnation = 0
        if self._link.model is not None and base_length >= self._link.model.context_length:
            return self._switch_off(orchestrator_pb2.PLAIN_REASON_DRAFT_CONTEXT)
        if not self._link.breaker.allows():
            return orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE
        return None

    def _command(self, tokens: TokenBuffer) -> DraftCommand:
        link = self._link
        assert link is not None
        command = DraftCommand(session_id=self._plan.session_id, epoch=self._epoch)
        if self._incarnation != link.incarnation or self._peer.known == 0:
            self._incarnation = link.incarnation
            self._peer.lost()
            command.open.tokens = to_bytes(tokens.view())
            command.open.law.CopyFrom(to_law_spec(self._plan.law, self._plan.seed))
            command.open.proposer = self._plan.proposer
            command.open.lookahead = self._asked
            command.open.law_top = self._plan.law_top
            command.open.coupled = self._plan.acceptance == orchestrator_pb2.ACCEPTANCE_COUPLED
            command.open.omit_law = self._plan.judged_by_token
        else:
            command.advance.base_length = len(tokens)
            command.advance.tokens, command.advance.prefix_hash = self._peer.suffix(tokens)
            command.advance.lookahead = self._asked
        return command

    def _outcome(self, pending: "asyncio.Future[DraftEvent]", stats: RoundStats) -> Proposal:
        if not pending.done():
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_LATE, "late")
        if pending.cancelled():
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_SATURATED, "saturated")
        if pending.exception() is not None:
            self._peer.lost()
            return no_block(orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE)
        event = pending.result()
        stats.wire_bytes += event.ByteSize()
        if event.WhichOneof("outcome") == "block":
            return self._checked(event.block, event.base_length, stats)
        return self._refused(from_status(event.error))

    def _checked(self, block: Block, base_length: int, stats: RoundStats) -> Proposal:
        stats.draft_forward_micros = block.timing.forward_micros
        assert self._link is not None
        assert self._link.model is not None
        vocab_size, by_token = self._link.model.vocab_size, self._plan.judged_by_token
        try:
            tokens = int32s(block.tokens, "block.tokens")
            law = _NO_LAW if by_token else law_from_message(block.law)
        except ArrayError:
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID, "malformed")
        if len(tokens) > self._asked or not (by_token or len(law.sizes) == len(tokens)):
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID, "wrong_length")
        if ((tokens < 0) | (tokens >= vocab_size)).any():
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID, "token_outside_vocabulary")
        noise = RoundNoise(self._plan.seed, base_length)
        # A rule that compares tokens trusts the draft in nothing: there is nothing to audit.
        if len(tokens) and not by_token and audit(tokens, law, noise, vocab_size) is not None:
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID, "audit")
        if not self._allowed(tokens):
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID, "grammar")
        self._link.breaker.success()
        if not len(tokens):
            return no_block(orchestrator_pb2.PLAIN_REASON_NO_PROPOSAL)
        return Proposal(tokens, law)

    def _allowed(self, tokens: Int32Array) -> bool:
        """Whether the session's language allows the whole block."""
        if self._grammar is None or self._committed is None:
            return True
        return self._grammar.legal(self._committed.view(), tokens) == len(tokens)

    def _refused(self, error: OutriderError) -> Proposal:
        if error.reason in _LOST:
            self._peer.lost()
            return no_block(orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR)
        if error.reason == types_pb2.ERROR_REASON_CONTEXT_EXCEEDED:
            return no_block(self._switch_off(orchestrator_pb2.PLAIN_REASON_DRAFT_CONTEXT))
        if error.reason == types_pb2.ERROR_REASON_QUEUE_FULL:
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_SATURATED, "saturated")
        self._peer.lost()
        return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR, "error")

    def _failed(self, reason: Reason, discarded: str) -> Proposal:
        """Counts against the worker."""
        self._metrics.discarded(discarded)
        if self._link is not None:
            self._link.breaker.failure()
        return no_block(reason)

    def _switch_off(self, reason: Reason) -> Reason:
        """No block for the rest of the session."""
        self._off = reason
        self._metrics.speculation_disabled(PlainReason.Name(reason))
        self.close()
        return reason
