"""What each rule accepts, in closed form from the two laws: no noise is drawn.

Notation: `target` is the target's law of a position, `draft` the law that the draft token was drawn from, given as
(token_ids, probs) because it may be truncated. Laws are divided by their float64 sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    def said(self) -> float:
        """target_probs of the token."""
        return float(self.target[self.token])

    @property
    def drafted(self) -> float:
        """draft_probs of the token."""
        return float(self.draft[self.token_ids == self.token].sum())


def ratio_rate(target: Float64Array, token_ids: npt.NDArray[np.int32], draft: Float64Array) -> float:
    """Probability that one draft token is kept: sum of min(target, draft)."""
    return float(np.minimum(target[token_ids], draft).sum())


def coupled_rate(target: Float64Array, token_ids: npt.NDArray[np.int32], draft: Float64Array) -> float:
    """Probability that two races with the same noise have the same winner: sum of `coupled_wins`."""
    return float(coupled_wins(target, token_ids, draft).sum())


def coupled_wins(target: Float64Array, token_ids: npt.NDArray[np.int32], draft: Float64Array) -> Float64Array:
    """[n] probability that a token of the support wins both races.

    Token x wins both when E(y) >= E(x) * max(target(y) / target(x), draft(y) / draft(x)) for every y, and so with
    probability 1 / (sum over y of that maximum). Sorted by target / draft, the maximum is the first above, the second
    below.
    """
    target = target.astype(np.float64) / target.sum(dtype=np.float64)
    draft = draft.astype(np.float64) / draft.sum(dtype=np.float64)
    on_support = target[token_ids]
    order = np.argsort(on_support / draft, kind="stable")
    p, q = on_support[order], draft[order]
    above = 1.0 - on_support.sum() + p[::-1].cumsum()[::-1]  # x itself counts here: target(x) / target(x) = 1
    below = q.cumsum() - q
    wins = np.zeros(len(p))
    alive = p > 0
    wins[order[alive]] = 1.0 / (above[alive] / p[alive] + below[alive] / q[alive])
    return wins


def survival_ratio(places: Sequence[Place]) -> Float64Array:
    """[lookahead] how likely `ratio` keeps at least i tokens, in expectation over the last token of each prefix.

    The expectation is over texts of the *target*: the draft's own texts weigh draft / target as much, so a prefix of
    them is kept with product of min(draft / target, 1) along the target's text.
    """
    kept, result = 1.0, []
    for place in places:
        result.append(kept * ratio_rate(place.target, place.token_ids, place.draft))
        kept *= min(1.0, place.drafted / place.said)
    return np.array(result)


def survival_block(places: Sequence[Place]) -> Float64Array:
    """As `survival_ratio`, of `block`: c_i times the weight of the text is the least of the weights up to i, at most 1.

    With W_i the product of draft / target, c_i W_i = min(1, W_1, ..., W_i).
    """
    weight, least, result = 1.0, 1.0, []
    for place in places:
        support = place.target[place.token_ids]
        result.append(float(np.minimum(least * support, weight * place.draft).sum()))
        weight *= place.drafted / place.said
        least = min(least, weight)
    return np.array(result)


def survival_coupled(places: Sequence[Place]) -> Float64Array:
    """As `survival_ratio`, of `coupled`: noise of different positions is independent."""
    kept, result = 1.0, []
    for place in places:
        wins = coupled_wins(place.target, place.token_ids, place.draft)
        result.append(kept * float(wins.sum()))
        kept *= float(wins[place.token_ids == place.token].sum()) / place.said
    return np.array(result)
