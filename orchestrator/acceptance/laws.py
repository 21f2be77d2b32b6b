"""The target's law and the draft's side by side, and the draw of the token that ends a round.

Every row is divided by its float64 sum before it is used. The draft's race draws in proportion to the float32 numbers
shipped, whatever their sum, so a sum of 0.9999999 is no error as long as it is divided out: the output law is then the
target's to the last bits of float64.
"""

from dataclasses import dataclass

import numpy as np

from outrider.law.noise import Float64Array, Int64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array, SparseLaw


@dataclass(frozen=True)
class BlockLaws:
    """Both laws of a block on the draft's support S, each row with its tail summing to 1.

    Attributes:
        starts: [lookahead + 2] row i is starts[i]:starts[i + 1] of what follows; the last row's S is empty.
        token_ids: [entries] of S, row after row.
        target: [entries] target_probs of S.
        draft: [entries] draft_probs of S.
        tails: [lookahead + 1] the target's mass outside S; the last is 1.
        tail_tokens: [lookahead + 1] the token that the target draws outside S.
        ratios: [lookahead] target_probs over draft_probs of each draft token.
    """

    starts: Int64Array
    token_ids: Int32Array
    target: Float64Array
    draft: Float64Array
    tails: Float64Array
    tail_tokens: Int32Array
    ratios: Float64Array

    def row(self, index: int) -> slice:
        """Where the entries of row `index` stand."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))


def side_by_side(draft_tokens: Int32Array, draft_law: SparseLaw, rows: SupportRows) -> BlockLaws:
    """Both laws of a block.

    Args:
        draft_tokens: [lookahead].
        draft_law: [lookahead] rows, the laws that the tokens were drawn from; audited.
        rows: [lookahead + 1] rows of the target over the support of draft_law.

    Raises ValueError when shapes do not fit, a draft token has no draft probability, or a row is no law.
    """
    _require_shapes(draft_tokens, draft_law, rows)
    lookahead, sizes = len(draft_tokens), draft_law.sizes
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    target, draft = rows.probs.astype(np.float64), draft_law.probs.astype(np.float64)
    if not ((target >= 0).all() and (rows.tail_masses >= 0).all()):
        raise ValueError("the target's rows hold NaN or a probability below 0")
    target_sums = _positive(np.append(row_sums(target, starts[:-1]), 0.0) + rows.tail_masses)
    draft_sums = _positive(row_sums(draft, starts[:-1]))
    target /= np.repeat(target_sums[:lookahead], sizes)
    draft /= np.repeat(draft_sums, sizes)
    return BlockLaws(
        np.append(starts, starts[-1]),
        draft_law.token_ids,
        target,
        draft,
        rows.tail_masses / target_sums,
        rows.tail_tokens,
        _ratios(draft_tokens, draft_law, target, draft),
    )


def row_sums(entries: Float64Array, starts: Int64Array) -> Float64Array:
    """Sum of each row, none of them empty: [len(starts)]."""
    return np.add.reduceat(entries, starts) if len(starts) else np.empty(0)


def residual(laws: BlockLaws, index: int, weight: float) -> tuple[Float64Array, float]:
    """max(weight * target - draft, 0) of a row: ([size] on its support, the rest together), not normalised.

    Where nothing is left the laws are equal up to rounding, and a rejection had probability 1e-16: the target's law.
    """
    row = laws.row(index)
    target, tail = laws.target[row], float(laws.tails[index])
    weights: Float64Array = np.maximum(weight * target - laws.draft[row], 0.0)
    return (weights, weight * tail) if weights.any() or weight * tail > 0 else (target, tail)


def draw(laws: BlockLaws, index: int, weight: float, noise: RoundNoise) -> int:
    """The token after `index` accepted ones, from the residual law of that row, by the RESAMPLE noise of its position.

    The tokens of the support race one by one, all others as one runner with the sum of their weights; if that one wins,
    the token is the one that the target drew among them. Equal in law to a race of all, with noise for few.
    """
    position, support = noise.base_length + index, laws.token_ids[laws.row(index)]
    weights, tail = residual(laws, index, weight)
    runners = scores(weights, noise.exponentials(Purpose.RESAMPLE, position, support))
    best = float(runners.min(initial=np.inf))
    tail_score = noise.tail(Purpose.RESAMPLE, position)[0] / tail if tail > 0 else np.inf
    return int(support[np.argmin(runners)] if best <= tail_score and best < np.inf else laws.tail_tokens[index])


def _ratios(draft_tokens: Int32Array, draft_law: SparseLaw, target: Float64Array, draft: Float64Array) -> Float64Array:
    rows = np.repeat(np.arange(len(draft_tokens)), draft_law.sizes)
    drawn = np.flatnonzero((draft_law.token_ids == draft_tokens[rows]) & (draft > 0))
    if len(drawn) != len(draft_tokens) or (rows[drawn] != np.arange(len(draft_tokens))).any():
        missing = np.setdiff1d(np.arange(len(draft_tokens)), rows[drawn])
        raise ValueError(f"draft tokens {draft_tokens[missing].tolist()} have no draft probability, or more than one")
    return target[drawn] / draft[drawn]


def _require_shapes(draft_tokens: Int32Array, draft_law: SparseLaw, rows: SupportRows) -> None:
    lookahead, entries = len(draft_tokens), int(draft_law.sizes.sum(dtype=np.int64))
    if len(draft_law.sizes) != lookahead or not len(rows.tail_masses) == len(rows.tail_tokens) == lookahead + 1:
        raise ValueError(
            f"{lookahead} draft tokens, {len(draft_law.sizes)} draft rows, {len(rows.tail_masses)} target rows"
        )
    if (draft_law.sizes < 1).any() or not entries == len(draft_law.token_ids) == len(draft_law.probs):
        raise ValueError("the draft law has an empty row, or another number of entries than its sizes say")
    if len(rows.probs) != entries:
        raise ValueError(f"{entries} entries of draft law, {len(rows.probs)} of target law")


def _positive(sums: Float64Array) -> Float64Array:
    """The sums themselves. Raises ValueError when one is not finite and positive."""
    bad = sums[~((sums > 0) & (sums < np.inf))]
    if len(bad):
        raise ValueError(f"probabilities sum to {bad[0]}")
    return sums
