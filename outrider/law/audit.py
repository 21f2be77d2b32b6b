"""Checks a proposal instead of believing it: PROPOSE noise is a function, so the draw can be repeated."""

import numpy as np
import numpy.typing as npt

from outrider.law.noise import Float64Array, Int64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.sparse import Int32Array, SparseLaw

# How far a row's sum may be from 1, and, relatively, a winner's score from the smallest: the last bits of float32 and
# of another machine's logarithm.
SUM_TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-5


def audit(tokens: Int32Array, law: SparseLaw, noise: RoundNoise, vocab_size: int) -> str | None:
    """Why a block must be dropped, or None when it may be used.

    A law that passes is one that the tokens can have been drawn from, under the round's own noise: every accidental lie
    about the draft's law (a stale temperature, truncation after the draw, another seed) is caught here, at once.

    Args:
        tokens: [lookahead] draft tokens; token i stands at position noise.base_length + i.
        law: [lookahead] rows.
        noise: of the round that the block was made for.
        vocab_size: real token ids.

    Returns one sentence that names the first failing check, without a full stop.
    """
    return _bad_shape(tokens, law) or _bad_entries(tokens, law, vocab_size) or _bad_draw(tokens, law, noise)


def _bad_shape(tokens: Int32Array, law: SparseLaw) -> str | None:
    if len(law.sizes) != len(tokens):
        return f"{len(tokens)} draft tokens with {len(law.sizes)} rows of draft law"
    if (law.sizes < 1).any():
        return "a row of the draft law is empty"
    total = int(law.sizes.sum(dtype=np.int64))
    if not total == len(law.token_ids) == len(law.probs):
        return f"draft law of {total} entries with {len(law.token_ids)} ids and {len(law.probs)} probabilities"
    return None


def _bad_entries(tokens: Int32Array, law: SparseLaw, vocab_size: int) -> str | None:
    for name, ids in (("draft token", tokens), ("draft law token", law.token_ids)):
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            return f"{name} {ids[outside][0]} is outside [0, {vocab_size})"
    # Written so that NaN fails too; infinity fails the sum.
    if not (law.probs > 0).all():
        return f"draft probability {law.probs[~(law.probs > 0)][0]} is not above 0"
    keys = np.sort(_rows(law) * vocab_size + law.token_ids)
    repeated = keys[1:][keys[1:] == keys[:-1]]
    if len(repeated):
        return f"draft law token {repeated[0] % vocab_size} stands twice in row {repeated[0] // vocab_size}"
    return None


def _bad_draw(tokens: Int32Array, law: SparseLaw, noise: RoundNoise) -> str | None:
    if not len(tokens):
        return None
    starts = np.cumsum(law.sizes, dtype=np.int64) - law.sizes
    sums = np.add.reduceat(law.probs, starts, dtype=np.float64)
    for row in np.flatnonzero(~(np.abs(sums - 1.0) <= SUM_TOLERANCE)):
        return f"draft law row {row} sums to {sums[row]:.8g}"
    drawn, best = _scores(tokens, law, noise, starts)
    for row in np.flatnonzero(~(drawn <= best * (1.0 + SCORE_TOLERANCE))):
        fault = "is not in" if np.isinf(drawn[row]) else "was not drawn from"
        return f"draft token {tokens[row]} {fault} row {row} of its law"
    return None


def _scores(
    tokens: Int32Array, law: SparseLaw, noise: RoundNoise, starts: Int64Array
) -> tuple[Float64Array, Float64Array]:
    """(score of the draft token, smallest score) of each row; infinite for a token that is not in its row."""
    rows = _rows(law)
    race = scores(law.probs, noise.exponentials(Purpose.PROPOSE, noise.base_length + rows, law.token_ids))
    own = np.where(law.token_ids == tokens[rows], race, np.inf)
    return np.minimum.reduceat(own, starts), np.minimum.reduceat(race, starts)


def _rows(law: SparseLaw) -> npt.NDArray[np.int64]:
    """The row of each entry."""
    return np.repeat(np.arange(len(law.sizes), dtype=np.int64), law.sizes)
