"""Which proposer a session drafts with, where its request leaves that open: by goodput, as measured.

All sessions of a draft worker tell what rounds with each of its proposers come to; a session that is unlike the others
soon goes by its own rounds. What was seen little is thought better than it looks, so that it is seen more, and what
looks bad is tried again now and then, for a bounded part of the tokens. Copies before the model is the standing choice:
where there is nothing to copy it is the model, and only a session tells whether there is.

What is chosen depends on committed rounds and on measured time, never on the tokens of a block or their noise.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.costs import Mean, RoundCost, TargetCosts
from outrider.v1 import draft_pb2
from outrider.v1.draft_pb2 import Proposer

Kind: TypeAlias = Proposer.ValueType

# Rounds after which a proposer's numbers forget, of all sessions and of one.
_POOLED, _OWN = 256.0, 32.0
# Rounds that the numbers of all weigh beside those of one session.
_WEIGHT = 8.0
# Goodput of n rounds may be so much better than it looks, over the root of n, n being no less than this.
_HOPE, _FEWEST = 0.5, 4.0
# By which part another one must be better to take the place of the standing choice, or of what a session drafts with.
_BETTER, _BETTER_THAN_OWN = 0.03, 0.15
# A session thinks again after so many rounds with a proposer.
REVIEW = 12
# Part of the rounds that trials of what looks bad may cost, and how long a proposer is left alone before one.
TRIAL_SHARE, _ALONE = 0.005, 256
# A trial is over once it has cost so many tokens, but not before it had a few rounds; and so many sessions at most try
# one of which nothing was seen.
TRIAL_TOKENS, _TRIAL_ROUNDS, _TRIES = 4.0, 4, 4
# A round that takes so many times as long as others was stalled, unless the next one does as well.
_STALLED = 8.0

STANDING = draft_pb2.PROPOSER_SUFFIX_OR_MODEL
# A proposer that never finds more than the other does is not looked at beside it.
_COVERED = {draft_pb2.PROPOSER_PROMPT_LOOKUP: draft_pb2.PROPOSER_SUFFIX}
# Those that cost next to nothing, and no prefix.
COPYING = {draft_pb2.PROPOSER_SUFFIX, draft_pb2.PROPOSER_PROMPT_LOOKUP, draft_pb2.PROPOSER_PREDICTION}
# What needs something of the client is not chosen for it, nor what only a newer worker knows.
CHOOSABLE = {*Proposer.values()} - {
    draft_pb2.PROPOSER_UNSPECIFIED,
    draft_pb2.PROPOSER_PREDICTION,
    draft_pb2.PROPOSER_AUTO,
}

ONLY, MEASURED, TRIAL = "only", "measured", "trial"


@dataclass
class Served:
    """What rounds with a proposer came to. Time is told in plain passes of the target, which the load of the moment
    makes longer for all alike.

    Attributes:
        rounds: seen, as far as they are not forgotten.
    """

    rounds: float = 0.0
    _tokens: Mean = field(default_factory=Mean)
    _passes: Mean = field(default_factory=Mean)
    _stalled: bool = False

    def observe(self, cost: RoundCost, plain: float, memory: float) -> None:
        """One more round, while a plain pass takes so many seconds."""
        slow = self._passes.known and cost.seconds > _STALLED * plain * self._passes.value
        self._stalled = slow and not self._stalled
        if self._stalled:
            return
        self.rounds = min(self.rounds + 1.0, memory)
        self._tokens.observe(cost.tokens, memory)
        self._passes.observe(cost.seconds / plain, memory)

    @property
    def goodput(self) -> float:
        """Tokens in the time of a plain pass."""
        return self._tokens.value / self._passes.value if self._passes.value else 0.0

    @property
    def hoped(self) -> float:
        """What it may be: the less was seen of it, the more."""
        return self.goodput * (1.0 + _HOPE / math.sqrt(max(_FEWEST, self.rounds)))

    def beside(self, pool: "Served") -> float:
        """Goodput of a session that has its own rounds to go by, and those of all."""
        tokens = self.rounds * self._tokens.value + _WEIGHT * pool._tokens.value
        passes = self.rounds * self._passes.value + _WEIGHT * pool._passes.value
        return tokens / passes if passes else 0.0


@dataclass
class Trials:
    """What all sessions of an orchestrator share: rounds that trials may cost.

    Attributes:
        rounds: of sessions whose proposer is chosen, so far.
        credit: rounds.
        last: the round in which each proposer was drafted with last.
        begun: sessions that began to draft with each before anything was seen of it.
    """

    rounds: int = 0
    credit: float = 0.0
    last: dict[Kind, int] = field(default_factory=dict)
    begun: Counter[Kind] = field(default_factory=Counter)

    def unseen(self, pools: Mapping[Kind, Served]) -> Kind | None:
        """One of those that nothing was seen of: sessions that begin at once see different ones."""
        kinds = [kind for kind, pool in pools.items() if not pool.rounds and self.begun[kind] < _TRIES]
        if not kinds:
            return None
        kind = min(kinds, key=self.begun.__getitem__)
        self.begun[kind] += 1
        return kind

    def due(self, pools: Mapping[Kind, Served], best: float) -> Kind | None:
        """What was left alone for long enough and may be tried again, which is paid for here."""
        for kind, pool in pools.items():
            part = max(0.0, 1.0 - pool.goodput / best) if best else 0.0
            loss = min(REVIEW * part, max(_TRIAL_ROUNDS * part, TRIAL_TOKENS / best)) if part else 0.0
            if self.rounds - self.last.get(kind, self.rounds) >= _ALONE and self.credit >= loss:
                self.credit -= loss
                self.last[kind] = self.rounds
                return kind
        return None

    def went(self, kind: Kind) -> None:
        """One more round, with this proposer."""
        self.rounds += 1
        self.credit = min(self.credit + TRIAL_SHARE, REVIEW)
        self.last[kind] = self.rounds


def eligible(kinds: Mapping[Kind, Served]) -> dict[Kind, Served]:
    """Those that may be chosen, the standing choice first."""
    known = {kind: pool for kind, pool in kinds.items() if kind in CHOOSABLE and _COVERED.get(kind) not in kinds}
    return dict(sorted(known.items(), key=lambda each: (each[0] != STANDING, each[0] not in COPYING, each[0])))


class ProposerChoice:
    """The choice of one session.

    Args:
        offered: what the workers offer at present, with what all sessions saw of each.
        costs: of the target that the session is bound to; None while there is none.
        trials: of all sessions.

    Attributes:
        kind: what the session drafts with; unspecified before the first choice, and where nothing is offered.
        reason: ONLY, MEASURED or TRIAL; empty before the first choice.
        expected: goodput that it was chosen by, by proposer.
    """

    def __init__(
        self, offered: Callable[[], Mapping[Kind, Served]], costs: Callable[[], TargetCosts | None], trials: Trials
    ) -> None:
        self._offered, self._costs, self._trials = offered, costs, trials
        self.kind: Kind = draft_pb2.PROPOSER_UNSPECIFIED
        self.reason = ""
        self.expected: dict[Kind, float] = {}
        self._own: dict[Kind, Served] = {}
        self._rounds = 0
        # What a trial has cost, in tokens, and the goodput that it is held against.
        self._lost = self._against = 0.0
        self._tried: set[Kind] = set()

    def choose(self) -> bool:
        """Thinks again where it is time to. Returns whether there is a new choice, which may be the old one."""
        given_up = self._lost >= TRIAL_TOKENS and self._rounds >= _TRIAL_ROUNDS
        if self.kind and self._rounds < REVIEW and not given_up:
            return False
        pools = eligible(self._offered())
        self._rounds, self._lost = 0, 0.0
        if not pools:
            self.kind, self.reason, self.expected = draft_pb2.PROPOSER_UNSPECIFIED, "", {}
            return False
        self.kind, self.reason = self._best(pools)
        self._tried.add(self.kind)
        return True

    def gone(self) -> None:
        """No worker offers the present proposer any more: the next call of `choose` thinks again."""
        self._rounds = REVIEW

    def learn(self, cost: RoundCost) -> None:
        """A round of the session with its present proposer."""
        plain = self._plain_seconds()
        self._rounds += 1
        self._trials.went(self.kind)
        if not self.kind or not plain:
            return
        if self.reason == TRIAL:
            self._lost += cost.seconds / plain * max(self._against, _plain_goodput(cost, plain)) - cost.tokens
        if not cost.catching_up:
            self._own.setdefault(self.kind, Served()).observe(cost, plain, _OWN)

    def _best(self, pools: Mapping[Kind, Served]) -> tuple[Kind, str]:
        harder = self._harder(pools)
        self.expected = {kind: self._expected(kind, pool, harder) for kind, pool in pools.items()}
        self._against = max(pool.goodput for pool in pools.values())
        if len(pools) == 1:
            return next(iter(pools)), ONLY
        unseen = self._trials.unseen({kind: pool for kind, pool in pools.items() if kind not in self._tried})
        if unseen is not None:
            return unseen, TRIAL
        others = {kind: pool for kind, pool in pools.items() if kind != self.kind}
        due = self._trials.due(others, max(self.expected.values()))
        if due is not None:
            return due, TRIAL
        best = next(iter(pools))
        if self.kind in pools and self.kind in self._own:
            best = self.kind
        for kind, expected in self.expected.items():
            margin = _BETTER_THAN_OWN if best == self.kind else _BETTER if best == STANDING else 0.0
            if expected > (1.0 + margin) * self.expected[best]:
                best = kind
        return best, MEASURED

    def _expected(self, kind: Kind, pool: Served, harder: float) -> float:
        own = self._own.get(kind)
        if own is not None:
            return own.beside(pool)
        # What the standing choice is made of is no better at such a text than with others, nor the other way round.
        return pool.hoped * (harder if STANDING in (kind, self.kind) else 1.0)

    def _harder(self, pools: Mapping[Kind, Served]) -> float:
        """How the session's text compares to those of others with the present proposer; 1 where it is no harder."""
        own, pool = self._own.get(self.kind), pools.get(self.kind)
        return min(1.0, own.beside(pool) / pool.goodput) if own and pool and pool.rounds else 1.0

    def _plain_seconds(self) -> float:
        target = self._costs()
        return target.plain_seconds if target is not None and target.known else 0.0


def _plain_goodput(cost: RoundCost, plain: float) -> float:
    """What the round would have been worth without a block."""
    return plain / (cost.seconds - cost.draft_wait - max(0.0, cost.passes - plain))


def observe(pool: Served, cost: RoundCost, target: TargetCosts | None) -> None:
    """A round with a proposer, of any session."""
    if target is not None and target.known and not cost.catching_up:
        pool.observe(cost, target.plain_seconds, _POOLED * target.sessions)


def told(choice: ProposerChoice) -> str:
    """A choice in words: why, and what goodput was expected of each, in tokens for the time of a plain pass."""
    expected = ", ".join(f"{name(kind)} {value:.2f}" for kind, value in choice.expected.items())
    return f"{choice.reason}: {name(choice.kind)} of {expected}"


def name(kind: Kind) -> str:
    """As the command line spells it; the number of one that is not known."""
    known = Proposer.DESCRIPTOR.values_by_number.get(kind)
    return str(kind) if known is None else known.name.removeprefix("PROPOSER_").lower()
