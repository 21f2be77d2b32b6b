"""One session's side of verifying: the item, and what to do about every answer but rows."""

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from orchestrator.costs import TargetCosts
from orchestrator.feeding import States, Wanted, features_of
from orchestrator.links.target import TargetLink
from orchestrator.metrics import Metrics
from orchestrator.pool import TargetPool
from orchestrator.prefix import PeerPrefix, TokenBuffer
from orchestrator.proposal import Proposal
from orchestrator.request import GenerationPlan
from orchestrator.stats import RoundStats, micros_since
from orchestrator.tenants import ANYONE, Caller
from outrider.law.logprobs import LogprobRows
from outrider.law.params import to_law_spec
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array
from outrider.net.arrays import (
    ArrayError,
    logits_from_message,
    logprobs_from_message,
    sample_from_message,
    support_from_message,
    to_bytes,
)
from outrider.net.bounds import MAX_LOOKAHEAD
from outrider.net.errors import OutriderError, from_status, reason_name
from outrider.v1 import target_pb2, types_pb2
from outrider.v1.target_pb2 import VerifyItem, VerifyResult

# Another worker, or the same one later, may do what this one did not.
_TRANSIENT = {
    types_pb2.ERROR_REASON_NO_WORKER,
    types_pb2.ERROR_REASON_DRAINING,
    types_pb2.ERROR_REASON_ENGINE_FAILED,
    types_pb2.ERROR_REASON_QUEUE_FULL,
}
_FIELDS = {
    target_pb2.ROW_FORMAT_LOGITS: "logits",
    target_pb2.ROW_FORMAT_SUPPORT: "support",
    target_pb2.ROW_FORMAT_SAMPLE: "sample",
}
_LOST = {types_pb2.ERROR_REASON_SESSION_NOT_FOUND, types_pb2.ERROR_REASON_PREFIX_MISMATCH}
# What ends a session as it is. Anything else that a target says is about our messages, not about the client's.
_FINAL = {
    types_pb2.ERROR_REASON_NON_FINITE_LOGITS,
    types_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
    types_pb2.ERROR_REASON_STALE_EPOCH,
    types_pb2.ERROR_REASON_NO_PROGRESS,
}
# A worker that misses a prefix that the same message carried is broken.
_MAX_LOST = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


# What the target says about a block: dense logits [lookahead + 1, vocab_size] float32, SupportRows, or its own tokens
# [lookahead + 1] int32.
Rows: TypeAlias = torch.Tensor | SupportRows | Int32Array


@dataclass(frozen=True)
class Verified:
    """The target's answer.

    Attributes:
        rows: about the block, in the plan's format.
        logprobs: of the rows, where the plan asks for them and the format is not LOGITS, which holds them.
        features: that were wanted, of the tokens up to the last that may be accepted; None where the worker has none.
    """

    rows: Rows
    logprobs: LogprobRows | None = None
    features: States | None = None


@dataclass
class _Patience:
    """How much longer one verify may keep trying, counted from its first failure on: a call that came to nothing may
    have taken longer than that.

    Attributes:
        seconds: the fail-over timeout.
        tried: workers that failed.
    """

    seconds: float
    pause: float = _FIRST_PAUSE
    lost: int = 0
    tried: set[TargetLink] = field(default_factory=set)
    _deadline: float | None = None

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.seconds if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    def failed(self) -> None:
        """An attempt came to nothing."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self.seconds


class Verifying:
    """Rows for one session.

    Attributes:
        traceparent: of the round that is verified; empty where it is not traced.

    Args:
        name: of the session at the targets.
        failover_timeout: how long one verify may look for a worker that answers, in seconds.
        vocab_size: real token ids; an answer with another one is refused.
        caller: for whom.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        name: str,
        epoch: int,
        pool: TargetPool,
        metrics: Metrics,
        failover_timeout: float,
        vocab_size: int,
        caller: Caller = ANYONE,
    ) -> None:
        self.traceparent = ""
        self._plan = plan
        self._name = name
        self._epoch = epoch
        self._pool = pool
        self._metrics = metrics
        self._failover_timeout = failover_timeout
        self._vocab_size = vocab_size
        self._caller = caller
        self._link: TargetLink | None = None
        # Workers that the session was with before: each may hold its state still.
        self._former: set[TargetLink] = set()
        self._incarnation = 0
        self._peer = PeerPrefix()

    async def rows(
        self, tokens: TokenBuffer, proposal: Proposal, stats: RoundStats, wanted: Wanted | None = None
    ) -> tuple[Proposal, Verified]:
        """The block as it was verified, and the target's answer to it, with the features that are `wanted`.

        The block is cut when the worker takes only shorter ones. Moves to another worker and re-sends the prefix as
        needed. Raises OutriderError: when no worker answered within the fail-over timeout; NO_PROGRESS when
        one answered nonsense; or with the item's own reason (NON_FINITE_LOGITS, STALE_EPOCH, ...).
        """
        patience = _Patience(self._failover_timeout)
        start = stats.begins("verify")
        while True:
            try:
                answer = await self._attempt(tokens, proposal, stats, patience, wanted)
            except OutriderError as error:
                where = self._link.address if self._link is not None else ""
                stats.attempt_failed(reason_name(error.reason), where)
                await self._recover(error, patience)
            else:
                stats.verify_micros = micros_since(start)
                return answer

    @property
    def longest_block(self) -> int:
        """Most draft tokens that make sense; more than 0."""
        return max(1, self._link.max_lookahead) if self._link is not None else MAX_LOOKAHEAD

    @property
    def largest_tree(self) -> int:
        """Most draft tokens of a tree; 0 while no worker is known to take one."""
        return self._link.max_tree_nodes if self._link is not None else 0

    def away(self) -> None:
        """The next block will take longer than usual."""
        if self._link is not None:
            self._link.away(self._name)

    def costs(self) -> TargetCosts | None:
        """What rounds cost with the worker that the session is bound to, or would be now; None without one."""
        link = self._link or min(self._pool.usable, key=lambda each: each.sessions, default=None)
        return link.costs if link is not None else None

    def learned(self, length: int) -> None:
        """The worker holds the committed tokens up to `length`."""
        self._peer.known = length

    async def close(self) -> None:
        """Frees the session at the worker, and where it was before. Idempotent."""
        self._unbind()
        former, self._former = self._former, set()
        await asyncio.gather(*(link.release(self._name, self._epoch) for link in former))

    async def _attempt(
        self,
        tokens: TokenBuffer,
        proposal: Proposal,
        stats: RoundStats,
        patience: _Patience,
        wanted: Wanted | None,
    ) -> tuple[Proposal, Verified]:
        link = await self._bound(tokens, patience)
        most = link.max_lookahead if proposal.tree is None else link.max_tree_nodes
        proposal = proposal.head(min(len(proposal.tokens), most))
        item = self._item(tokens, proposal)
        wanted = wanted if wanted is not None and link.shows(wanted.feeding) else None
        if wanted is not None:
            item.feature_layers.extend(wanted.feeding.layers)
            item.feature_start = wanted.start
        result = await link.verify(item, self._caller, stats)
        stats.wire_bytes += item.ByteSize() + result.ByteSize()
        stats.target_passes += result.timing.passes
        stats.verify_forward_micros += result.timing.forward_micros
        stats.verify_queue_micros += result.timing.queue_micros
        link.costs.observe_pass(result.timing, link.sessions)
        if result.status.code:
            raise from_status(result.status)
        if self._former:
            self._leave()
        return proposal, self._verified(result, proposal, wanted)

    async def _bound(self, tokens: TokenBuffer, patience: _Patience) -> TargetLink:
        if self._link is not None and not self._link.usable:
            self._unbind()
        if self._link is None:
            self._link = await self._pool.acquire(patience.left(), tokens, patience.tried)
            self._link.bind()
            self._incarnation = 0
        if self._incarnation != self._link.incarnation:
            self._incarnation = self._link.incarnation
            self._peer.lost()
        return self._link

    def _item(self, tokens: TokenBuffer, proposal: Proposal) -> VerifyItem:
        prefix_tokens, prefix_hash = self._peer.suffix(tokens)
        item = VerifyItem(
            session_id=self._name,
            epoch=self._epoch,
            base_length=len(tokens),
            prefix_tokens=prefix_tokens,
            prefix_hash=prefix_hash,
            draft_tokens=to_bytes(proposal.tokens),
            row_format=self._plan.row_format,
            traceparent=self.traceparent,
        )
        if self._plan.row_format == target_pb2.ROW_FORMAT_SUPPORT:
            item.support_sizes = to_bytes(proposal.law.sizes)
            item.support_ids = to_bytes(proposal.law.token_ids)
        if proposal.tree is not None:
            item.draft_parents = to_bytes(proposal.tree.parents)
        if self._plan.logprobs is not None:
            item.logprobs = self._plan.logprobs
        opens = len(prefix_tokens) == len(tokens) * np.dtype(np.int32).itemsize
        if opens and self._plan.row_format != target_pb2.ROW_FORMAT_LOGITS:
            item.law.CopyFrom(to_law_spec(self._plan.law, self._plan.seed))
        return item

    def _verified(self, result: VerifyResult, proposal: Proposal, wanted: Wanted | None) -> Verified:
        try:
            rows, logprobs = self._rows(result, proposal), self._logprobs(result, proposal)
            return Verified(rows, logprobs, features_of(result, wanted))
        except ArrayError as error:
            raise _no_progress(f"the target's answer: {error}") from error

    def _rows(self, result: VerifyResult, proposal: Proposal) -> Rows:
        lookahead, row_format = len(proposal.tokens), self._plan.row_format
        if result.WhichOneof("rows") != _FIELDS[row_format]:
            raise ArrayError(f"rows hold {result.WhichOneof('rows')}, asked for {_FIELDS[row_format]}")
        if row_format == target_pb2.ROW_FORMAT_SUPPORT:
            entries = len(proposal.law.token_ids)
            return support_from_message(result.support, entries, lookahead, self._vocab_size)
        if row_format == target_pb2.ROW_FORMAT_SAMPLE:
            return sample_from_message(result.sample, lookahead, self._vocab_size)
        logits = logits_from_message(result.logits, lookahead + 1)
        if logits.shape[1] != self._vocab_size:
            raise ArrayError(f"rows of {logits.shape[1]} logits for {self._vocab_size} tokens")
        return logits

    def _logprobs(self, result: VerifyResult, proposal: Proposal) -> LogprobRows | None:
        """Raises ArrayError when the answer is not what was asked for."""
        if self._plan.logprobs is None or self._plan.row_format == target_pb2.ROW_FORMAT_LOGITS:
            return None
        entries = len(proposal.law.token_ids) if self._plan.row_format == target_pb2.ROW_FORMAT_SUPPORT else 0
        return logprobs_from_message(
            result.logprobs, entries, len(proposal.tokens), self._plan.logprobs, self._vocab_size
        )

    async def _recover(self, error: OutriderError, patience: _Patience) -> None:
        """Prepares the next attempt, or raises the error when there is none to make."""
        if error.reason in _LOST and patience.lost < _MAX_LOST:
            patience.lost += 1
            self._metrics.prefix_resent()
            self._peer.lost()
            return
        if error.reason not in _TRANSIENT:
            # Where a grammar leads is seen as it goes, and it is the client's.
            final = error.reason in _FINAL or error.message.startswith("grammar.")
            raise error if final else _no_progress(f"the target refused its work: {error.message}")
        patience.failed()
        if patience.left() <= 0 or self._link is None:
            raise error
        full = error.reason == types_pb2.ERROR_REASON_QUEUE_FULL
        # An answer with no room for one item more is no reason to leave: the next call's has room.
        elsewhere = not (full and error.retry_after == 0.0) and self._pool.others(patience.tried | {self._link})
        patience.tried = patience.tried | {self._link} if elsewhere else {self._link}
        if elsewhere or not full:
            self._unbind()
        if elsewhere:
            return
        pause = max(error.retry_after or 0.0, patience.pause)
        patience.pause = min(2 * patience.pause, _LONGEST_PAUSE)
        await asyncio.sleep(max(0.0, min(pause, patience.left())))

    def _unbind(self) -> None:
        if self._link is not None:
            self._former.add(self._link)
            self._link.unbind()
            self._link = None

    def _leave(self) -> None:
        """Releases the session where it was, but not before another worker holds it: it may have to go back."""
        for link in self._former:
            if link is not self._link:
                link.left_by(self._name, self._epoch)
        self._former.clear()


def _no_progress(message: str) -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_NO_PROGRESS, message)
