"""COUPLE noise: a number for every token of the vocabulary at every position, of which a race needs to look at few.

Each token has a v uniform in (0, 1), and E = -log(1 - v) as its race noise. With probability `LOW` a token is *low*,
which means v < LOW; which tokens are low is drawn first, by the gaps between them, and v within its part of (0, 1) by a
counter of the token's own. So v is independent and uniform, and since E >= v a token that is not low has a score of at
least LOW / p: only low tokens and likely ones can win. Nothing here depends on the base length.
"""

import numpy as np
import numpy.typing as npt

from outrider.law.philox import LARGEST_BELOW_ONE, Int64Array, key_of, philox_of_arrays, uniform_of

Float64Array = npt.NDArray[np.float64]
UInt64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]

LOW = 2.0**-10

# Purpose.COUPLE, the last word of every counter here; the word before it says which of the two draws it is.
_PURPOSE = 4
_OF_TOKENS, _OF_GAPS = 0, 1


def low_tokens(seeds: UInt64Array, positions: Int64Array, vocab_size: int) -> Int64Array:
    """The low tokens of each (seed, position), ascending: [rows, n] int64, ids from vocab_size on are none."""
    count = int(vocab_size * LOW + 6.0 * np.sqrt(vocab_size * LOW)) // 2 + 2
    while True:
        tokens = _low_tokens(seeds[:, None], positions[:, None], count)
        if (tokens[:, -1] >= vocab_size).all():
            return tokens
        count *= 2


def _low_tokens(seeds: UInt64Array, positions: Int64Array, count: int) -> Int64Array:
    """The first 2 * count of each row."""
    index = np.arange(count, dtype=np.int64)[None]
    zero = np.zeros_like(positions)
    words = philox_of_arrays((index, positions, zero + _OF_GAPS, zero + _PURPOSE), key_of(seeds))
    uniforms = np.stack([uniform_of(*words[:2]), uniform_of(*words[2:])], axis=2).reshape(len(seeds), -1)
    # Geometric: how many tokens stand between one low token and the next.
    gaps = np.floor(np.log1p(-uniforms) / np.log1p(-LOW)).astype(np.int64)
    return np.cumsum(gaps + 1, axis=1) - 1


def are_low(rows: Int64Array, token_ids: npt.NDArray[np.integer], low: Int64Array, vocab_size: int) -> BoolArray:
    """Whether each (row, token) is among `low` [rows, n] of `low_tokens`."""
    stride = vocab_size + 1
    known = (np.arange(len(low))[:, None] * stride + np.minimum(low, vocab_size)).ravel()
    keys = rows * stride + token_ids
    found: BoolArray = known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys
    return found


def exponentials(
    seeds: UInt64Array, positions: Int64Array, token_ids: npt.NDArray[np.integer], low: BoolArray | np.bool_
) -> Float64Array:
    """Race noise of tokens of which it is known whether they are low; the arguments broadcast."""
    zero = np.zeros_like(positions)
    counter = (token_ids.astype(np.int64), positions, zero + _OF_TOKENS, zero + _PURPOSE)
    uniforms = uniform_of(*philox_of_arrays(counter, key_of(seeds))[:2])
    v = np.where(low, LOW * uniforms, LOW + (1.0 - LOW) * uniforms)
    return -np.log1p(-np.minimum(v, LARGEST_BELOW_ONE))


def exponentials_of(seeds: UInt64Array, positions: Int64Array, token_ids: npt.NDArray[np.integer]) -> Float64Array:
    """Race noise of any tokens; all arrays are [n]. Cheapest where many in a row have one seed and position."""
    if not len(token_ids):
        return np.empty(0)
    begins = np.concatenate([[True], (seeds[1:] != seeds[:-1]) | (positions[1:] != positions[:-1])])
    rows, size = np.cumsum(begins) - 1, int(token_ids.max()) + 1
    low = low_tokens(seeds[begins], positions[begins], size)
    return exponentials(seeds, positions, token_ids, are_low(rows, token_ids, low, size))
