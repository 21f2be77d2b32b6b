"""Trees instead of chains: whether the next block is one, and how deep, by the same goodput.

A tree costs the target more positions than a chain as deep, and the draft larger passes; it is never drafted ahead.
What it gives is measured by itself, since a tree gets further than a chain does.
"""

from dataclasses import dataclass, field

from orchestrator.costs import DraftCosts, Mean, TargetCosts
from orchestrator.survival import Survival, expected_tokens

# Trees of a draft of which nothing is known are at most so deep, and of every depth up to it.
_YOUNG_DEPTH = 6
# By which part trees must be better to be taken, and worse to be left.
_BETTER = 0.02
# One block in so many is of the shape that is worse: what it gives may have changed.
_RETRIES = 200
# Blocks after which the mean size forgets.
_BLOCKS = 64.0


@dataclass
class TreeHistory:
    """What the sessions of one kind of proposer of one draft worker, judged by one rule, learn together of trees of one
    size.

    Attributes:
        chosen: whether trees are better at present.
    """

    costs: DraftCosts = field(default_factory=DraftCosts)
    survival: Survival = field(default_factory=Survival)
    chosen: bool = False
    _nodes: Mean = field(default_factory=Mean)
    _choices: int = 0

    def choose(self, target: TargetCosts | None, chain_goodput: float, limit: int) -> int:
        """How deep the next block's tree is; 0 for a chain.

        Args:
            target: what rounds cost there.
            chain_goodput: tokens in a second of one session that are expected of chains; 0 while they are not known,
                which is found out first.
            limit: of the depth.
        """
        if target is None or not target.known or not chain_goodput:
            return 0
        if self.costs.young:
            return 1 + self.costs.asked % min(_YOUNG_DEPTH, limit)
        self._choices += 1
        goodput = self._goodput(target, limit)
        best = max(range(limit), key=goodput.__getitem__)
        margin = 1.0 - _BETTER if self.chosen else 1.0 + _BETTER
        self.chosen = goodput[best] > margin * chain_goodput
        return 1 + best if self.chosen != (self._choices % _RETRIES == 0) else 0

    def observe(self, asked: int, others: int, wait: float, accepted: int, nodes: int) -> None:
        """A round with a tree of `nodes` tokens that was to be `asked` deep, as in DraftCosts and Survival."""
        self.costs.observe(asked, others, wait, 0.0, ahead=False)
        self.survival.observe(asked, min(accepted, asked))
        if nodes:
            self._nodes.observe(nodes, _BLOCKS)

    def _goodput(self, target: TargetCosts, limit: int) -> list[float]:
        """[limit] of trees of each depth from 1 on."""
        tokens = expected_tokens(self.survival.rates(limit))
        nodes = self._nodes.value
        rest = target.rest_seconds(nodes)
        waits = [self.costs.wait(depth, target.sessions - 1, 0.0, rest) for depth in range(1, limit + 1)]
        return [given / target.cycle(wait, nodes) for given, wait in zip(tokens[1:], waits, strict=True)]
