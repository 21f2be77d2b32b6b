"""How a proposer draws: truncate, renormalise, round to the numbers on the wire, and only then draw from them."""

from collections.abc import Sequence

import numpy as np
import torch

from outrider.law.noise import Purpose, RoundNoise, exponentials_of_rows
from outrider.law.race import race
from outrider.law.sparse import Float32Array, Int32Array


def truncate(probs: torch.Tensor, top: int) -> list[tuple[Int32Array, Float32Array]]:
    """The `top` likeliest tokens of each row, lower id first among equals, renormalised.

    Args:
        probs: [rows, vocab_size] float32, not negative, any device.
        top: most entries that a row keeps, >= 1.

    Returns one (token_ids int32, probs float32) pair per row, likeliest first, without zeros.
    """
    vocab_size = probs.shape[1]
    # One key orders by probability, then by lower id: the bits of non-negative floats order as the floats do.
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=probs.device)
    keys = probs.contiguous().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(reversed_ids)
    best = keys.topk(min(top, vocab_size), dim=1).values
    ids = (vocab_size - 1 - (best & 0xFFFFFFFF)).to(torch.int32)
    kept = probs.gather(1, ids.long()).cpu().numpy()
    return [_normalised(row_ids, row) for row_ids, row in zip(ids.cpu().numpy(), kept, strict=True)]


def propose(
    token_ids: Int32Array, probs: Float32Array, noise: RoundNoise, position: int, purpose: Purpose = Purpose.PROPOSE
) -> int:
    """The token that wins the race over exactly these numbers, for the draft token at `position`.

    `purpose` is COUPLE where the target races with the same noise, PROPOSE otherwise.
    """
    return int(token_ids[race(probs, noise.exponentials(purpose, position, token_ids))])


def propose_each(
    rows: Sequence[tuple[Int32Array, Float32Array]],
    noises: Sequence[RoundNoise],
    positions: Sequence[int],
    purpose: Purpose = Purpose.PROPOSE,
) -> list[int]:
    """`propose` for the rows of many sessions at once: the same tokens for a tenth of the time."""
    sizes = [len(token_ids) for token_ids, _ in rows]
    token_ids = np.concatenate([ids for ids, _ in rows])
    exponentials = exponentials_of_rows(purpose, noises, positions, sizes, token_ids)
    ends = np.cumsum(sizes)[:-1]
    return [
        int(ids[race(probs, noise)]) for (ids, probs), noise in zip(rows, np.split(exponentials, ends), strict=True)
    ]


def point_mass(token: int) -> tuple[Int32Array, Float32Array]:
    """The law of a proposer that has none: it would always have said this token."""
    return np.array([token], dtype=np.int32), np.ones(1, dtype=np.float32)


def _normalised(token_ids: Int32Array, probs: Float32Array) -> tuple[Int32Array, Float32Array]:
    positive = probs > 0
    kept = probs[positive].astype(np.float64)
    rounded = (kept / kept.sum()).astype(np.float32)
    # Rounding may have turned the smallest into zero; they were not drawn from, so they are not shipped.
    return token_ids[positive][rounded > 0], rounded[rounded > 0]
