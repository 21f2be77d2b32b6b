"""`ratio` where a position has several candidates: each is judged against what those before it have left of the law.

Miao et al. 2024, "SpecInfer: accelerating large language model serving with tree-based speculative inference and
verification", algorithm 2; with siblings drawn without replacement, as in Chen et al. 2024, "Sequoia: scalable and
robust speculative decoding", algorithm 2. docs/exactness.md has the proof.
"""

from dataclasses import dataclass

import numpy as np

from orchestrator.acceptance.laws import Block
from orchestrator.acceptance.outcome import Outcome, outcome_of_path
from outrider.law.noise import Float64Array, Int64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.sparse import Int32Array
from outrider.law.tree import Tree


@dataclass(frozen=True)
class Left:
    """What is left of both laws of a row, each summing to 1, when some of its candidates were rejected.

    Attributes:
        token_ids: [n] the draft's support S.
        target: [n] target_probs of S.
        tail: the target's mass outside S, where the draft has none: nothing is ever subtracted from it.
        draft: [n] draft_probs of S: the law of the next candidate, which is none of those before it.
    """

    token_ids: Int32Array
    target: Float64Array
    tail: float
    draft: Float64Array

    def where(self, token: int) -> int:
        """Where a candidate stands in S. Raises ValueError for one that cannot have been drawn."""
        found = np.flatnonzero((self.token_ids == token) & (self.draft > 0))
        if len(found) != 1:
            raise ValueError(f"draft tokens [{token}] have no draft probability, or more than one")
        return int(found[0])


def branching(block: Block, tree: Tree) -> Outcome:
    """Walks down the tree, from each row to the first candidate that is kept, and draws the token after the last one.

    Raises ValueError when shapes do not fit, a candidate cannot have been drawn, or a row of the target is no law.
    """
    rows = _Rows(block, tree)
    row, path, noise = 0, list[int](), block.noise
    while True:
        position = block.noise.base_length + len(path)
        children, left = tree.children(row), rows.of(row)
        for rank, child in enumerate(children):
            branch = noise.branch(position, rank)
            at = left.where(int(block.tokens[child]))
            if branch.uniform(Purpose.ACCEPT, position) < keep_probability(left, at):
                row, noise = child + 1, branch
                path.append(child)
                break
            left = rejected(left, at)
        else:
            token = draw(left, int(block.rows.tail_tokens[row]), block.noise, position)
            return outcome_of_path(path, token, children)


def keep_probability(left: Left, at: int) -> float:
    """How likely a candidate is kept when those before it are not."""
    return min(1.0, float(left.target[at] / left.draft[at]))


def rejected(left: Left, at: int) -> Left:
    """After a candidate was rejected: the residual of the target's law, and the draft's without the candidate."""
    return Left(left.token_ids, *residual(left), without(left.draft, at))


def residual(left: Left) -> tuple[Float64Array, float]:
    """max(target - draft, 0), divided by its sum: (on S, the tail). Where nothing is left the laws are equal up to
    rounding, and a rejection had probability 1e-16: the target's law."""
    rest = np.maximum(left.target - left.draft, 0.0)
    mass = float(rest.sum()) + left.tail
    return (rest / mass, left.tail / mass) if mass > 0 else (left.target, left.tail)


def without(draft: Float64Array, at: int) -> Float64Array:
    """The law of the next candidate, drawn without replacement; zeros when there can be none."""
    rest = draft.copy()
    rest[at] = 0.0
    mass = float(rest.sum())
    return rest / mass if mass > 0 else rest


def draw(left: Left, tail_token: int, noise: RoundNoise, position: int) -> int:
    """The token that ends the round, as `laws.draw` draws it: the round's noise, since a round ends at one row."""
    runners = scores(left.target, noise.exponentials(Purpose.RESAMPLE, position, left.token_ids))
    best = float(runners.min(initial=np.inf))
    tail = noise.tail(Purpose.RESAMPLE, position)[0] / left.tail if left.tail > 0 else np.inf
    return int(left.token_ids[runners.argmin()]) if best <= tail and best < np.inf else tail_token


class _Rows:
    """Both laws of every row, checked together; a round looks at few of them."""

    def __init__(self, block: Block, tree: Tree) -> None:
        sizes = np.append(block.law.sizes, 0).astype(np.int64)
        _check(block, tree, sizes)
        self._target, self._draft = block.rows.probs.astype(np.float64), block.law.probs.astype(np.float64)
        self._token_ids, self._tails = block.law.token_ids, block.rows.tail_masses
        if not (np.min(self._target, initial=0.0) >= 0 and (self._tails >= 0).all()):
            raise ValueError("the target's rows hold NaN or a probability below 0")
        self._ends, owners = np.cumsum(sizes), np.repeat(np.arange(len(sizes)), sizes)
        self._starts = self._ends - sizes
        self._target_sums = _positive(np.bincount(owners, self._target, len(sizes)) + self._tails)
        # Nothing is divided by the 1 of a row that no candidate follows.
        self._draft_sums = _positive(np.where(sizes > 0, np.bincount(owners, self._draft, len(sizes)), 1.0))

    def of(self, row: int) -> Left:
        """One row's, before any candidate was rejected."""
        entries = slice(self._starts[row], self._ends[row])
        target = self._target_sums[row]
        on_support, drawn = self._target[entries] / target, self._draft[entries] / self._draft_sums[row]
        return Left(self._token_ids[entries], on_support, float(self._tails[row] / target), drawn)


def _check(block: Block, tree: Tree, sizes: Int64Array) -> None:
    count = len(block.tokens)
    if not (len(tree.parents) == len(block.law.sizes) == count) or not (
        len(block.rows.tail_masses) == len(block.rows.tail_tokens) == count + 1
    ):
        raise ValueError(
            f"{count} draft tokens, {len(block.law.sizes)} draft rows, {len(block.rows.tail_masses)} target rows"
        )
    followed = np.bincount(tree.parents, minlength=count + 1) > 0
    if (sizes[followed] < 1).any() or sizes[~followed].any():
        raise ValueError("the draft law has an empty row that tokens follow, or entries where none does")
    total = int(sizes.sum())
    if not total == len(block.law.token_ids) == len(block.law.probs) == len(block.rows.probs):
        raise ValueError(f"{total} entries of draft law, {len(block.rows.probs)} of target law")


def _positive(sums: Float64Array) -> Float64Array:
    bad = np.flatnonzero(~((sums > 0) & (sums < np.inf)))
    if len(bad):
        raise ValueError(f"probabilities sum to {sums[bad[0]]}")
    return sums
