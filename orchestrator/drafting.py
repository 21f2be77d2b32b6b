"""One session's side of drafting: ask for the block early, wait for it briefly, believe nothing in it.

Whatever goes wrong here is never an error: the round runs without a block, and says why.
"""

import asyncio
import time

from orchestrator.block_reading import Bounds, Unusable, legal, read_block
from orchestrator.choosing import COPYING, ProposerChoice, Served, observe, told
from orchestrator.costs import RoundCost
from orchestrator.feeding import FeatureFeed, States, Wanted
from orchestrator.hedging import MOST_TOKENS
from orchestrator.links.draft import DraftLink
from orchestrator.lookahead import DraftHistory, SessionLookahead
from orchestrator.metrics import Metrics
from orchestrator.pool import DraftPool
from orchestrator.prefix import PeerPrefix, TokenBuffer
from orchestrator.proposal import Proposal, Reason, no_block
from orchestrator.request import GenerationPlan
from orchestrator.running import being_cancelled
from orchestrator.stats import RoundStats, micros_since
from orchestrator.turn import Turn
from outrider.law.audit import Claim
from outrider.law.noise import RoundNoise
from outrider.law.params import to_law_spec
from outrider.lm.grammars import SessionGrammar
from outrider.net.arrays import to_bytes
from outrider.net.errors import OutriderError, from_status
from outrider.v1 import draft_pb2, orchestrator_pb2, types_pb2
from outrider.v1.draft_pb2 import DraftCommand, DraftEvent, Proposer
from outrider.v1.types_pb2 import Features

# What makes the blocks of PROPOSER_SUFFIX_OR_MODEL.
_EITHER = {draft_pb2.PROPOSER_SUFFIX, draft_pb2.PROPOSER_MODEL}

# Tokens that the worker may have to read before a block without a round that waits for it: to compute them, or to copy
# from them.
_SHORT_GAP, _COPIED_GAP = 32, 4096

# The state at the worker is gone or wrong: open the session anew with the next command.
_LOST = {types_pb2.ERROR_REASON_SESSION_NOT_FOUND, types_pb2.ERROR_REASON_PREFIX_MISMATCH}


class Drafting:
    """Blocks for one session.

    Attributes:
        traceparent: of the round whose block is asked for; empty where it is not traced.

    Args:
        lookahead: how long its blocks are.
        audits: of the blocks of all sessions.
        timeout: how long a round waits for its block, in seconds.
        grammar: where the session stands in its language; None without one.
        tenant: whom the session is for.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        epoch: int,
        pool: DraftPool,
        lookahead: SessionLookahead,
        metrics: Metrics,
        audits: Turn[Claim, str | None],
        timeout: float,
        grammar: SessionGrammar | None = None,
        tenant: str = "",
    ) -> None:
        self.traceparent = ""
        self._plan = plan
        self._kind = plan.proposer
        self._choice: ProposerChoice | None = None
        if plan.proposer == draft_pb2.PROPOSER_UNSPECIFIED:
            self._choice = ProposerChoice(self._offered, lookahead.costs, pool.trials)
        # The newest choice, until a round has told of it.
        self._chosen = ""
        self._epoch = epoch
        self._pool = pool
        self._lookahead = lookahead
        self._metrics = metrics
        self._audits = audits
        self._timeout = timeout
        self._grammar = grammar
        self._tenant = tenant
        self._committed: TokenBuffer | None = None
        self._link: DraftLink | None = None
        self._incarnation = 0
        self._peer = PeerPrefix()
        self._asked = self._nodes = 0
        self._pending: asyncio.Future[DraftEvent] | None = None
        # The answer to a command that no round waits for, which may be an error.
        self._told: asyncio.Future[DraftEvent] | None = None
        # The answer to a command without a block, before which none is asked for.
        self._catching_up: asyncio.Future[DraftEvent] | None = None
        self._reason: Reason = orchestrator_pb2.PLAIN_REASON_PREFILL
        self._off: Reason | None = orchestrator_pb2.PLAIN_REASON_DISABLED if plan.lookahead == 0 else None
        self._moved_bytes = 0
        # Whether this session is the probe of its worker's breaker.
        self._probes = False
        self._feed = FeatureFeed()

    def warm_up(self, tokens: TokenBuffer) -> None:
        """Lets the worker cache the prompt while the target does the same; the first round has no block."""
        self._reason = self._off or orchestrator_pb2.PLAIN_REASON_PREFILL
        if not self._off:
            self._choose()
        link = None if self._off else self._bind(tokens)
        if isinstance(link, DraftLink) and self._lookahead.begins(self._history(link)):
            self._cache(link, tokens)

    def ask(self, tokens: TokenBuffer, room: int, nodes: int = 0) -> None:
        """Asks for the block at the current base length, at most `room` tokens; or, where that promises more, for a
        tree with paths of at most so many, and at most `nodes` tokens in all. Never waits."""
        self._pending, self._committed = None, tokens
        if self._told is not None and _came_to_nothing(self._told):
            self._peer.lost()
        self._told = None
        if not self._off:
            self._choose()
        if self._link is not None and not self._probes:
            self._move(self._pool.better(self._kind, self._link) or self._link)
        link = self._off or (self._bind(tokens) if room > 0 else orchestrator_pb2.PLAIN_REASON_LAST_TOKEN)
        if isinstance(link, DraftLink):
            self._ask(link, tokens, min(room, link.max_lookahead), nodes)
        else:
            self._reason = link

    def wanted(self, base_length: int) -> Wanted | None:
        """The features that the round at this base length is to bring; None where nothing is fed with any."""
        return self._feed.wanted(base_length) if self._link is not None else None

    def fed(self, states: States | None) -> None:
        """Those of the tokens that are committed now, if they came."""
        self._feed.take(states)

    @property
    def ready(self) -> bool:
        """Whether `block` would not wait for the worker."""
        return self._pending is None or self._pending.done()

    async def block(self, stats: RoundStats) -> Proposal:
        """The block that was asked for, or the reason for none. Waits at most the timeout."""
        stats.wire_bytes += self._moved_bytes
        self._moved_bytes = 0
        stats.proposer, stats.proposer_choice, self._chosen = self._kind, self._chosen, ""
        if self._pending is None:
            return no_block(self._reason)
        stats.asked = self._asked
        stats.block_ready = self._pending.done()
        if not stats.block_ready:
            start = stats.begins("draft wait")
            if self._pool.hedges.open:
                await self._hedge(stats)
            in_time = await self._came(self._pending, self._timeout - (time.perf_counter() - start))
            stats.draft_wait_micros = micros_since(start)
            if not in_time:
                return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_LATE)
        # Not kept: an event holds the whole message that it came with.
        pending, self._pending = self._pending, None
        return await self._outcome(pending, stats)

    def learned(self, length: int) -> None:
        """The worker's own block agrees with the committed tokens up to `length`."""
        self._peer.known = length

    def learn(self, cost: RoundCost) -> None:
        """A round with the present proposer."""
        if self._link is not None and self._kind:
            observe(self._history(self._link).served, cost, self._lookahead.costs())
        if self._choice is not None and not self._off:
            self._choice.learn(cost)

    def close(self, ended_with: TokenBuffer | None = None) -> None:
        """Frees the session at the worker. Idempotent.

        Args:
            ended_with: all committed tokens, where the generation is over; None where another worker goes on.
        """
        if self._link is not None:
            last = draft_pb2.Close() if ended_with is None else self._last(self._link, ended_with)
            self._link.close_session(self._plan.session_id, self._epoch, last)
            self._lookahead.close()
            self._link.unbind()
            self._link = None

    def _offered(self) -> "dict[Proposer.ValueType, Served]":
        return self._pool.offered(self._plan.acceptance, self._link)

    def _choose(self) -> None:
        """Where the request names no proposer: the one that is to make the next blocks. Another than before begins with
        all of the tokens, at another worker where this one does not offer it."""
        if self._choice is None or not self._choice.choose():
            return
        kind = self._choice.kind
        self._metrics.proposer_chosen(kind, self._choice.reason)
        self._chosen = told(self._choice)
        if kind == self._kind:
            return
        self._kind = kind
        self._peer.lost()
        if self._link is not None and kind not in self._link.proposers:
            self._move(None)
        elif self._link is not None:
            self._feed.bind(self._link.feeding(kind))

    def _last(self, link: DraftLink, tokens: TokenBuffer) -> draft_pb2.Close:
        """What the worker was not told yet, where it keeps outputs; nothing of a session that it has lost."""
        if not link.keeps_outputs or not self._peer.known or self._incarnation != link.incarnation:
            return draft_pb2.Close()
        told, prefix_hash = self._peer.suffix(tokens)
        return draft_pb2.Close(ended=True, base_length=len(tokens), tokens=told, prefix_hash=prefix_hash)

    def _bind(self, tokens: TokenBuffer) -> DraftLink | Reason:
        """The worker to ask, the present one as long as it works, or why there is none."""
        link = self._link
        self._probes = self._probes and link is not None and link.breaker.probing
        if link is None or not link.usable or not (link.breaker.closed or self._probes or link.breaker.ripe):
            picked = self._pool.pick(self._kind, tokens, link)
            self._move(picked if isinstance(picked, DraftLink) else None)
            if not isinstance(picked, DraftLink):
                if self._choice is not None:
                    self._choice.gone()
                return picked
            link = picked
        if link.model is not None and len(tokens) >= link.model.context_length:
            return self._switch_off(orchestrator_pb2.PLAIN_REASON_DRAFT_CONTEXT)
        if self._probes or link.breaker.allows():
            self._probes = not link.breaker.closed
            return link
        return orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE

    def _move(self, link: DraftLink | None) -> None:
        if link is self._link:
            return
        self.close()
        self._link, self._incarnation, self._catching_up, self._probes = link, 0, None, False
        if link is not None:
            link.bind()
            self._feed.bind(link.feeding(self._kind))

    def _ask(self, link: DraftLink, tokens: TokenBuffer, room: int, nodes: int) -> None:
        """Asks for as much as pays, once the worker has read most of the tokens: no round waits for that."""
        self._reason = orchestrator_pb2.PLAIN_REASON_DRAFT_PREFILL
        if self._catching_up is not None and not self._catching_up.done():
            return
        if self._catching_up is not None and _came_to_nothing(self._catching_up):
            link.breaker.failure()
        self._catching_up = None
        trees = link.trees[self._kind, self._plan.acceptance, nodes] if nodes > 1 else None
        lookahead = self._lookahead.choose(self._history(link), room, trees)
        if lookahead == 0:
            self._reason = orchestrator_pb2.PLAIN_REASON_NO_GAIN
            self._feed.asleep()
        elif not self._feed.complete(len(tokens)):
            self._lookahead.withheld()
            if self._feed.starved:
                self._reason = orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE
        elif self._plan.adaptive and len(tokens) - self._peer.known > self._gap:
            self._lookahead.withheld()
            self._cache(link, tokens)
        else:
            self._send(link, tokens, lookahead, nodes if self._lookahead.tree else 0)

    def _cache(self, link: DraftLink, tokens: TokenBuffer) -> None:
        """Lets the worker compute the tokens; no round waits for it."""
        self._send(link, tokens, 0)
        self._told, self._pending = self._pending, None
        self._catching_up = self._told if self._plan.adaptive else None

    @property
    def _gap(self) -> int:
        return _COPIED_GAP if self._kind in COPYING else _SHORT_GAP

    def _history(self, link: DraftLink) -> DraftHistory:
        return link.history[self._kind, self._plan.acceptance]

    def _send(self, link: DraftLink, tokens: TokenBuffer, lookahead: int, nodes: int = 0) -> None:
        command = self._command(link, tokens, lookahead, nodes)
        self._metrics.asked(lookahead, probe=self._lookahead.probing)
        # A session that is opened anew had another proposer, or something was wrong with it; a pushed block is a chain.
        useful = command.WhichOneof("action") == "advance" and not nodes
        pushed, missed_bytes = link.pushed(self._plan.session_id, self._epoch, tokens, useful=useful)
        self._moved_bytes += missed_bytes
        if pushed is not None:
            command.advance.held = True
        self._asked, self._nodes = lookahead, nodes
        self._pending = link.request(command, tokens)
        if not self._pending.cancelled():
            self._moved_bytes += command.ByteSize()
            self._peer.known = len(tokens)
            if lookahead:
                self._feed.told()
        if pushed is not None:
            self._told, self._pending = self._pending, _resolved(pushed)

    def _new_command(self) -> DraftCommand:
        return DraftCommand(session_id=self._plan.session_id, epoch=self._epoch, traceparent=self.traceparent)

    def _command(self, link: DraftLink, tokens: TokenBuffer, lookahead: int, nodes: int) -> DraftCommand:
        command = self._new_command()
        if self._incarnation != link.incarnation:
            self._incarnation = link.incarnation
            self._peer.lost()
        if self._peer.known == 0:
            command.open.CopyFrom(self._open(tokens, lookahead, nodes))
            self._feed.untold()
            if lookahead:
                _feed(command.open, self._feed.message())
        else:
            if lookahead:
                _feed(command.advance, self._feed.message())
            command.advance.base_length = len(tokens)
            command.advance.tokens, command.advance.prefix_hash = self._peer.suffix(tokens)
            command.advance.lookahead, command.advance.max_nodes = lookahead, nodes
        return command

    def _open(self, tokens: TokenBuffer, lookahead: int, nodes: int) -> draft_pb2.Open:
        return draft_pb2.Open(
            tokens=to_bytes(tokens.view()),
            law=to_law_spec(self._plan.law, self._plan.seed),
            proposer=self._kind,
            lookahead=lookahead,
            max_nodes=nodes,
            law_top=self._plan.law_top,
            coupled=self._plan.acceptance == orchestrator_pb2.ACCEPTANCE_COUPLED,
            omit_law=self._plan.judged_by_token,
            prediction=to_bytes(self._plan.prediction),
            tenant=self._tenant,
        )

    async def _hedge(self, stats: RoundStats) -> None:
        """Returns when the block came or is late by any measure; one that is later than nearly all is asked for at a
        second worker as well, and the session stays with the worker that answers first."""
        link, pending, tokens = self._link, self._pending, self._committed
        if link is None or pending is None or tokens is None:
            return
        self._pool.hedges.waited()
        start, patience = time.perf_counter(), link.waits.patience
        if patience is not None and patience < self._timeout and len(tokens) <= MOST_TOKENS:
            await asyncio.wait({pending}, timeout=patience)
            spare = None if pending.done() else self._pool.spare(self._kind, link)
            if spare is not None and self._pool.hedges.spend():
                await self._race(pending, spare, tokens, self._timeout - patience, stats)
        else:
            await asyncio.wait({pending}, timeout=self._timeout)
        link.waits.observe(time.perf_counter() - start)

    async def _race(
        self,
        pending: "asyncio.Future[DraftEvent]",
        spare: DraftLink,
        tokens: TokenBuffer,
        seconds: float,
        stats: RoundStats,
    ) -> None:
        """Asks a second worker. When it is the first to answer with a block, it becomes the session's."""
        command = self._new_command()
        command.open.CopyFrom(self._open(tokens, self._asked, self._nodes))
        self._feed.untold()
        _feed(command.open, self._feed.message())
        self._feed.told()
        second = spare.request(command, tokens)
        stats.wire_bytes += command.ByteSize()
        won = False
        try:
            await asyncio.wait({pending, second}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            won = not pending.done() and second.done() and not _came_to_nothing(second)
        finally:
            self._metrics.hedged(won=won)
            if not won:
                spare.close_session(self._plan.session_id, self._epoch)
        if won:
            self._move(spare)
            self._incarnation, self._peer.known, self._pending = spare.incarnation, len(tokens), second

    async def _came(self, pending: "asyncio.Future[DraftEvent]", seconds: float) -> bool:
        """Whether the answer, or why there is none, came in time. One that is late is cancelled: the link counts its
        block as discarded if it comes."""
        loop = asyncio.get_running_loop()
        late = loop.call_later(seconds, pending.cancel)
        try:
            await pending
        except OutriderError:
            return True
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            return False
        finally:
            late.cancel()
        return True

    async def _outcome(self, pending: "asyncio.Future[DraftEvent]", stats: RoundStats) -> Proposal:
        if pending.cancelled():
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_SATURATED)
        if pending.exception() is not None:
            self._peer.lost()
            return no_block(orchestrator_pb2.PLAIN_REASON_DRAFT_UNAVAILABLE)
        event = pending.result()
        stats.wire_bytes += event.ByteSize()
        if event.WhichOneof("outcome") == "block":
            return await self._checked(event, stats)
        return self._refused(from_status(event.error))

    async def _checked(self, event: DraftEvent, stats: RoundStats) -> Proposal:
        block, pushed = event.block, bool(event.hypothesis)
        stats.draft_forward_micros = block.timing.forward_micros
        if self._kind == draft_pb2.PROPOSER_SUFFIX_OR_MODEL and block.proposer in _EITHER:
            stats.proposer = block.proposer
        assert self._link is not None
        assert self._link.model is not None
        bounds = Bounds(self._asked, self._nodes, pushed, self._link.model.vocab_size)
        try:
            tokens, law, tree = read_block(block, self._plan, bounds)
        except Unusable as error:
            return self._invalid(error.label)
        claim = Claim(tokens, law, RoundNoise(self._plan.seed, event.base_length), bounds.vocab_size, tree)
        # A rule that compares tokens trusts the draft in nothing: there is nothing to audit.
        if len(tokens) and not self._plan.judged_by_token and await self._audits.result(claim) is not None:
            return self._invalid("audit")
        grammar, committed = self._grammar, self._committed
        if grammar is not None and committed is not None and not legal(grammar, committed.view(), tokens, tree):
            return self._invalid("grammar")
        self._link.breaker.success()
        if not len(tokens):
            return no_block(orchestrator_pb2.PLAIN_REASON_NO_PROPOSAL)
        stats.translation = block.translation
        stats.drafted_ahead = min(block.timing.ahead_tokens, len(tokens))
        if tree is not None:
            return Proposal(tokens, law, tree=tree)
        return Proposal(tokens, law).head(min(len(tokens), self._asked))

    def _refused(self, error: OutriderError) -> Proposal:
        if error.reason == types_pb2.ERROR_REASON_CONTEXT_EXCEEDED:
            return no_block(self._switch_off(orchestrator_pb2.PLAIN_REASON_DRAFT_CONTEXT))
        # What the worker did not take, it does not know.
        self._peer.lost()
        if error.reason in _LOST:
            return no_block(orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR)
        if error.reason == types_pb2.ERROR_REASON_QUEUE_FULL:
            return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_SATURATED)
        return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_ERROR)

    def _invalid(self, discarded: str) -> Proposal:
        """A block that cannot be used: the session's state at the worker is not to be built on either."""
        self._metrics.discarded(discarded)
        self._peer.lost()
        return self._failed(orchestrator_pb2.PLAIN_REASON_DRAFT_INVALID)

    def _failed(self, reason: Reason) -> Proposal:
        """Counts against the worker."""
        if self._link is not None:
            self._link.breaker.failure()
        return no_block(reason)

    def _switch_off(self, reason: Reason) -> Reason:
        """No block for the rest of the session."""
        self._off = reason
        self._metrics.speculation_disabled(reason)
        self.close()
        return reason


def _feed(action: draft_pb2.Open | draft_pb2.Advance, features: Features | None) -> None:
    if features is not None:
        action.features.CopyFrom(features)


def _resolved(event: DraftEvent) -> "asyncio.Future[DraftEvent]":
    future: asyncio.Future[DraftEvent] = asyncio.get_running_loop().create_future()
    future.set_result(event)
    return future


def _came_to_nothing(answer: "asyncio.Future[DraftEvent]") -> bool:
    """Whether a command is known not to have been taken."""
    if not answer.done():
        return False
    return answer.cancelled() or answer.exception() is not None or answer.result().WhichOneof("outcome") != "block"
