"""The generator behind all noise: Philox 4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A block of output is a pure
function of (counter, key).
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Words: TypeAlias = int | npt.NDArray[np.integer]

LARGEST_BELOW_ONE = 1.0 - 2.0**-53

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FACTORS = np.array(_MULTIPLIERS, np.uint64)[:, None]
_STEPS = np.array(_WEYL, np.uint32)[:, None]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _MASK, p0 >> 32 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3


def philox_of_arrays(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """`philox` of every element; words broadcast. Returns int64 words.

    numpy's calls are what it costs, not the arithmetic: both products of a round are made in one call.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    shape = np.broadcast_shapes(*(np.shape(word) for word in (*counter, *key)))
    words = np.empty((6, *shape), np.uint32)
    for place, word in enumerate((c0, c2, c1, c3, k0, k1)):
        words[place] = word
    # [2, n] each: the words that are multiplied, those beside them, and the key.
    factors, others, keys = words.reshape(3, 2, -1)
    for _ in range(_ROUNDS):
        products = np.multiply(factors, _FACTORS, dtype="<u8").view("<u4").reshape(2, -1, 2)[::-1]
        factors, others, keys = products[..., 1] ^ others ^ keys, products[..., 0], keys + _STEPS
    c0, c2, c1, c3 = np.concatenate([factors, others]).astype(np.int64).reshape(4, *shape)
    return c0, c1, c2, c3


def uniform_of(high: Int64Array, low: Int64Array) -> npt.NDArray[np.float64]:
    """Two 32-bit words -> float64 in (0, 1): 2^-65 at the least, in steps of 2^-64 near 0, where races are won."""
    return np.minimum((high + (low + 0.5) * 2.0**-32) * 2.0**-32, LARGEST_BELOW_ONE)


def key_of(seeds: npt.NDArray[np.uint64]) -> tuple[Int64Array, Int64Array]:
    """The Philox 4x32 key of each seed: its (low, high) half."""
    return (seeds & np.uint64(_MASK)).astype(np.int64), (seeds >> np.uint64(32)).astype(np.int64)
