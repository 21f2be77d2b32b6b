"""The generator behind all noise: Philox 4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A block of output is a pure
function of (counter, key).
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]

# Words in whatever multiplies modulo 2^64 or without bound.
Words = TypeVar("Words", int, Int64Array, torch.Tensor)

LARGEST_BELOW_ONE = 1.0 - 2.0**-53

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words] | tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Philox 4x32-10.

    Takes and returns 32-bit words as Python ints, numpy int64 or torch int64 arrays; arrays broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps all bits; the mask undoes the arithmetic shift's sign.
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3


def uniform_of(high: Int64Array, low: Int64Array) -> npt.NDArray[np.float64]:
    """Two 32-bit words -> float64 in (0, 1): 2^-65 at the least, in steps of 2^-64 near 0, where races are won."""
    return np.minimum((high + (low + 0.5) * 2.0**-32) * 2.0**-32, LARGEST_BELOW_ONE)


def key_of(seeds: npt.NDArray[np.uint64]) -> tuple[Int64Array, Int64Array]:
    """The Philox 4x32 key of each seed: its (low, high) half."""
    return (seeds & np.uint64(_MASK)).astype(np.int64), (seeds >> np.uint64(32)).astype(np.int64)
