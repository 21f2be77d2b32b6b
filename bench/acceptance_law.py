"""What each rule accepts, in closed form from the two laws: no noise is drawn.

`target` is the target's law of a position, `draft` the law that a draft token is drawn from, over its support
`token_ids` alone because it may be truncated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """A position of a text that the target said, and both laws there.

    Attributes:
        token: what the target said.
        target: [vocab_size], sums to 1.
        token_ids: [n] the draft law's support.
        draft: [n], sums to 1.
    """

    token: int
    target: Float64Array
    token_ids: npt.NDArray[np.int32]
    draft: Float64Array

    @property
    def weight(self) -> float:
        """draft over target of the token."""
        return float(self.draft[self.token_ids == self.token].sum() / self.target[self.token])

    @cached_property
    def on_support(self) -> Float64Array:
        """[n] the target's law of the support."""
        return self.target[self.token_ids]

    @cached_property
    def ratio_rate(self) -> float:
        """Probability that `ratio` keeps one draft token: sum of min(target, draft)."""
        return float(np.minimum(self.on_support, self.draft).sum())

    @cached_property
    def coupled_wins(self) -> Float64Array:
        """[n] probability that a token of the support wins two races with the same noise, the target's and the draft's.

        Token x wins both when E(y) >= E(x) * max(target(y) / target(x), draft(y) / draft(x)) for every y, and so with
        probability 1 / (sum over y of that maximum). Sorted by target / draft, the maximum is the first from x on and
        the second before it.
        """
        order = np.argsort(self.on_support / self.draft, kind="stable")
        p, q = self.on_support[order], self.draft[order]
        from_here = max(0.0, 1.0 - p.sum()) + p[::-1].cumsum()[::-1]
        before = q.cumsum() - q
        wins, alive = np.zeros(len(p)), p > 0
        wins[order[alive]] = 1.0 / (from_here[alive] / p[alive] + before[alive] / q[alive])
        return wins

    @property
    def coupled_rate(self) -> float:
        """Probability that `coupled` keeps one draft token."""
        return float(self.coupled_wins.sum())

    @property
    def coupled_keeps(self) -> float:
        """Probability that the draft's winner is the token, given that the target's is."""
        return float(self.coupled_wins[self.token_ids == self.token].sum() / self.target[self.token])


# How likely each rule keeps at least 1, 2, .. tokens of a block, along one text of the target. Expectations are over
# such texts, except over the last token of each prefix, which is summed out. A text of the draft weighs draft / target
# of it as much: that turns the rules' own expectations, over texts of the draft, into these.


def survival_ratio(places: Sequence[Place]) -> Float64Array:
    """[lookahead]: min(1, target / draft) weighs min(draft / target, 1) here."""
    kept, result = 1.0, []
    for place in places:
        result.append(kept * place.ratio_rate)
        kept *= min(1.0, place.weight)
    return np.array(result)


def survival_block(places: Sequence[Place]) -> Float64Array:
    """[lookahead]: c_i weighs min(1, W_1, .., W_i) with W_i the product of draft / target up to i."""
    weight, least, result = 1.0, 1.0, []
    for place in places:
        result.append(float(np.minimum(least * place.on_support, weight * place.draft).sum()))
        weight *= place.weight
        least = min(least, weight)
    return np.array(result)


def survival_coupled(places: Sequence[Place]) -> Float64Array:
    """[lookahead]: noise of different positions is independent, so the chances multiply."""
    kept, result = 1.0, []
    for place in places:
        result.append(kept * place.coupled_rate)
        kept *= place.coupled_keeps
    return np.array(result)
