"""Lookahead control: each round's block length by goodput, expected tokens over measured time.

Sessions of a target share its passes, and whoever shares a pass waits for the slowest draft. So they have a common
length: the one with the largest goodput if all drafted so far, 0 included. Below it a session's own length is a matter
of the target's positions alone: a token is worth verifying when it is likelier to be kept than what the time of its
position gives elsewhere, so that a pass is spent on the likeliest tokens of all its sessions. Where the common length
is 0, a session with blocks much better than the others' may draft on its own account, and nobody waits for it.

A session that has a target for itself goes by its own blocks, within the bounds of own_blocks.py.

From length 0 a rare probe, whose cost is measured and bounded, finds out whether blocks would pay.

What is chosen depends on committed rounds and on measured time, never on the tokens of the block or their noise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.choosing import Served
from orchestrator.costs import DraftCosts, Mean, RoundCost, TargetCosts, Wait
from orchestrator.own_blocks import OwnBlocks
from orchestrator.plain_trials import PlainTrials
from orchestrator.survival import SessionSurvival, Survival, expected_tokens
from orchestrator.trees import TreeHistory

# Blocks of a draft of which nothing is known are at most so long, and of every length up to it.
YOUNG_LOOKAHEAD = 4
PROBE_LOOKAHEAD = 2
# Part of the time of plain rounds that probes may cost.
PROBE_SHARE = 0.01
# After so many probes in a row without a token, each session's are as many times rarer and one.
_VAIN_PROBES = 3
# One probe at a time for so many sessions of a target.
_SESSIONS_PER_PROBE = 16
# By which part another common length must be better to be taken, and one of a session alone, below it and beyond.
_BETTER, _BETTER_BELOW, _BETTER_ALONE = 0.01, 0.1, 0.25
# Blocks are given up when they do not pay though they be so many standard errors better than they look.
_ERRORS = 1.5
# By how much a session's acceptance must exceed the others' before it is looked at where none drafts.
_BETTER_ACCEPTANCE = 0.1
# Probes after which their mean cost forgets.
_PROBES = 8.0
# Rounds of time that a session is given for probes at its start: it may be unlike those before it.
_FIRST_CREDIT = 0.25


@dataclass
class DraftHistory:
    """What the sessions of one kind of proposer of one draft worker, judged by one rule, learn together.

    Attributes:
        common: the length that suits all of them.
        goodput: tokens in a second of one session that are expected of it.
        waits: by length, what rounds are expected to wait for such a block.
        extra: by length, seconds by which a round is longer with a block for which nobody waits.
        probing: how many of them probe.
        probe_seconds: what a probe adds to a round.
        trials: of plain decoding, where blocks seem to pay.
        served: what their rounds came to, beside those with other proposers.
    """

    costs: DraftCosts = field(default_factory=DraftCosts)
    survival: Survival = field(default_factory=Survival)
    served: Served = field(default_factory=Served)
    common: int = 0
    goodput: float = 0.0
    waits: list[Wait] = field(default_factory=list)
    extra: list[float] = field(default_factory=list)
    probing: int = 0
    trials: PlainTrials = field(default_factory=PlainTrials)
    _length: int = 0
    _choices: int = 0
    _settled_for: int = -1
    probe_seconds: Mean = field(default_factory=Mean)

    def settle(self, target: TargetCosts, survival: Survival | SessionSurvival, longest: int) -> int:
        """The common length, for blocks that survive like these; anew once in a round of all sessions."""
        self._choices += 1
        if self._choices < target.sessions and longest == self._settled_for:
            return self._length
        self._choices, self._settled_for = 0, longest
        tokens, came = expected_tokens(survival.rates(longest + 1)), self.costs.came
        waits = self.waits = [
            self.costs.wait(k, target.sessions - 1, tokens[k + 1] - tokens[k], target.rest_seconds(k, came))
            for k in range(longest + 1)
        ]
        seconds = [target.cycle(wait, k, came) for k, wait in enumerate(waits)]
        best, goodput = _largest(tokens, seconds)
        if not best:
            # Plain rounds tell nothing of blocks: they must be better than blocks may well be.
            best, goodput = _largest(expected_tokens(survival.rates(longest, _ERRORS)), seconds)
        if goodput[best] > (1.0 + _BETTER) * goodput[min(self.common, longest)]:
            self.common = best
        common = min(self.common, longest)
        self.goodput = goodput[common]
        if target.sessions > 1:
            cycle = target.cycle(waits[common], common, came)
            self.extra = [cycle * math.ceil(wait.mean / cycle) for wait in waits]
        self.trials.round(target, 1.0 - goodput[0] / goodput[common], blocks=self.common > 0)
        self._length = 0 if self.trials.on else common
        return self._length


def _largest(tokens: list[float], seconds: list[float]) -> tuple[int, list[float]]:
    """(the length with the largest goodput, the goodput of each), for what rounds of each length give and take."""
    goodput = [given / taken for given, taken in zip(tokens, seconds, strict=False)]
    return max(range(len(goodput)), key=goodput.__getitem__), goodput


class SessionLookahead:
    """The lookahead of one session.

    Args:
        longest: most tokens of a block.
        costs: of the target that the session is bound to; None while there is none.
        adaptive: whether the length is chosen; otherwise every block is as long as it may be.

    Attributes:
        costs: as given.
        alone: whether the block that was chosen last is drafted while the others have none.
        probing: whether it is a probe.
        tree: whether it may be a tree.
    """

    def __init__(self, longest: int, costs: Callable[[], TargetCosts | None], *, adaptive: bool = True) -> None:
        self._longest, self.costs, self._adaptive = longest, costs, adaptive
        self._draft: DraftHistory | None = None
        self._on = False
        self._credit = 0.0
        self._fresh = True
        self._vain = 0
        self._plain = Mean()
        self._asked = 0
        self._others = 0
        self.alone = self.probing = self.tree = False
        self._trees: TreeHistory | None = None

    def begins(self, draft: DraftHistory) -> bool:
        """Whether a new session would be given blocks."""
        self._bind(draft)
        return not self._adaptive or self._best(draft, self._longest) > 0 or draft.trials.on

    def choose(self, draft: DraftHistory, room: int, trees: TreeHistory | None = None) -> int:
        """The length of the next block; at most `room`, which is more than 0. `tree` says whether it is to be a tree,
        of whose longest path it is the length then.

        Args:
            trees: what is known of trees; None for a chain in any case.
        """
        self._bind(draft)
        self.tree, self._trees = False, None
        limit = min(self._longest, room)
        best = self._best(draft, limit) if self._adaptive else limit
        self._turn(best > 0)
        if not best and self._may_probe(draft):
            best = min(PROBE_LOOKAHEAD, limit)
        self._asked, self._others = best, draft.costs.speculating - self._on
        return self._shape(trees, draft, best, limit) if trees is not None and limit else best

    def _shape(self, trees: TreeHistory, draft: DraftHistory, chain: int, limit: int) -> int:
        """A tree instead of the chain, where that promises more."""
        depth = limit
        if self._adaptive:
            # While chains are being tried, and while plain rounds are, nothing is compared with them.
            settled = not (draft.costs.young or draft.trials.on or self.probing)
            depth = trees.choose(limit) if settled else 0
            self._trees = trees if settled else None
        self.tree = depth > 0
        if self.tree:
            self._trees, self._asked = trees, depth
        return depth or chain

    def withheld(self) -> None:
        """The block that was chosen was not asked for after all."""
        self._asked, self._trees = 0, None

    def learn(self, cost: RoundCost, accepted: int, longest: int | None = None) -> None:
        """What came of the round. `longest`: how long its block could be, where that was less than was asked for."""
        target, draft, asked = self.costs(), self._draft, self._asked
        if target is None:
            return
        target.observe_round(cost)
        if draft is None:
            return
        trees, self._trees = self._trees, None
        if trees is not None:
            trees.observe(asked if self.tree else 0, cost.tokens, cost.seconds, cost.reach)
            if self.tree:
                self._asked = 0
                return
        if asked:
            self._fresh = False
            tokens = expected_tokens(self._survival.rates(asked + 1))
            reach = tokens[asked + 1] - tokens[asked]
            tried = asked if longest is None else min(asked, longest)
            came = min(1.0, cost.drafted / tried) if tried else 1.0
            ahead = longest is not None
            draft.costs.observe(asked, self._others, cost.draft_wait, reach, ahead=ahead, came=came)
            draft.survival.observe(tried, accepted)
            self._survival.observe(tried, accepted)
            self._own.grow(asked, cost.drafted, accepted)
            if target.sessions == 1 and asked < len(draft.waits):
                # As expected, not as measured: what held up this very round is not the block's affair.
                taken = target.cycle(draft.waits[asked], cost.drafted)
                lost = taken - cost.tokens * target.cycle(Wait(0.0), 0)
                # A probe is paid for.
                self._own.lose(min(lost, 0.0) if self.probing else lost)
        elif not self._on:
            self._plain.observe(cost.seconds, _PROBES)
            earned = (PROBE_SHARE / (1 + self._vain) + _FIRST_CREDIT * self._fresh) * cost.seconds
            self._fresh = False
            self._credit = min(self._credit + earned, 2.0 * max(cost.seconds, draft.probe_seconds.value))
        if self.probing and asked:
            self._probed(target, draft, cost, accepted)
        self._asked = 0

    def close(self) -> None:
        """The session ended or has no draft any more. Idempotent."""
        if self._draft is not None:
            self._turn(False)
            self._draft.probing -= self.probing
        self._draft, self.probing = None, False

    def _bind(self, draft: DraftHistory) -> None:
        if draft is not self._draft:
            self.close()
            self._draft, self._survival = draft, SessionSurvival(draft.survival)
            self._own = OwnBlocks(expected_tokens(draft.survival.rates(self._longest))[-1])

    def _turn(self, on: bool) -> None:
        if self._draft is not None and on != self._on:
            self._draft.costs.speculating += 1 if on else -1
            self._on = on

    def _best(self, draft: DraftHistory, limit: int) -> int:
        target = self.costs()
        self.alone = False
        if not limit:
            return 0
        if draft.costs.young or target is None or not target.known:
            return 1 + draft.costs.asked % min(YOUNG_LOOKAHEAD, limit)
        if target.sessions == 1:
            # No longer ones are looked at: it takes part of every round.
            best = draft.settle(target, self._survival, self._own.window(limit))
            return 0 if self._own.spent(target.cycle(Wait(0.0), 0)) else best
        common = draft.settle(target, draft.survival, self._longest)
        better = self._survival.rates(1)[0] - draft.survival.rates(1)[0]
        if not common and better < _BETTER_ACCEPTANCE:
            return 0
        tokens = expected_tokens(self._survival.rates(limit))
        # Sessions that waste their time must not make it cheap.
        worth = max(target.goodput, draft.goodput)
        price = worth * target.position_seconds * target.sessions * draft.costs.came
        gains = [tokens[k] - price * k for k in range(limit + 1)]
        if not common:
            return self._apart(gains, worth, draft)
        most = min(common, limit)
        best = max(range(most + 1), key=gains.__getitem__)
        return best if gains[best] > (1.0 + _BETTER_BELOW) * gains[most] else most

    def _apart(self, gains: list[float], worth: float, draft: DraftHistory) -> int:
        """The length for a session whose blocks pay where those of the others do not: nobody waits for it."""
        alone = [gain - worth * extra for gain, extra in zip(gains, draft.extra, strict=False)]
        best = max(range(len(alone)), key=alone.__getitem__)
        self.alone = alone[best] > (1.0 + _BETTER_ALONE) * gains[0]
        return best if self.alone else 0

    def _may_probe(self, draft: DraftHistory) -> bool:
        """Whether the next block is a probe; a probe that could not be asked for stays one."""
        target = self.costs()
        if self.probing or target is None:
            return self.probing
        cost = draft.probe_seconds.value or target.round_seconds
        if self._credit < cost or draft.probing > target.sessions // _SESSIONS_PER_PROBE:
            return False
        self.probing = True
        draft.probing += 1
        return True

    def _probed(self, target: TargetCosts, draft: DraftHistory, cost: RoundCost, accepted: int) -> None:
        """Pays for a probe: what it took longer than plain rounds and held up others, less the worth of its tokens."""
        self.probing = False
        draft.probing -= 1
        others = (target.sessions - 1) * target.block_seconds(self._asked)
        extra = max(0.0, cost.seconds - self._plain.value) + others
        if not cost.drafted:
            # Whatever else made the round longer was not the probe.
            extra = min(extra, cost.draft_wait)
        # One that nothing came of took hardly any time.
        self._vain = 0 if accepted else min(self._vain + (cost.drafted > 0), _VAIN_PROBES)
        draft.probe_seconds.observe(extra, _PROBES)
        self._credit -= max(0.0, extra - accepted / target.goodput)
