"""The generators behind all noise: Philox 4x32-10 and Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011). A block of output is a pure function of (counter, key).
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
_WIDE_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WIDE_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


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


def wide_blocks(key: int, counter: int, blocks: int) -> npt.NDArray[np.uint64]:
    """Philox 4x64-10 of `blocks` successive counters: [4 * blocks] uint64, four words a block.

    Args:
        key: 128 bits.
        counter: the first counter, 256 bits; its lowest word counts up.
    """
    # numpy has the generator in C; it steps the counter before it makes a block. `integers` over all 64 bits gives its
    # words as they are and, other than `random_raw`, without the interpreter lock.
    generator = np.random.Generator(np.random.Philox(key=key, counter=(counter - 1) % (1 << 256)))
    return generator.integers(0, 1 << 64, size=4 * blocks, dtype=np.uint64)


def wide(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox 4x64-10 where numpy cannot go: 64-bit words as the bits of int64 tensors, which broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        (h0, l0), (h1, l1) = _product(_WIDE_MULTIPLIERS[0], c0), _product(_WIDE_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + signed(_WIDE_WEYL[0]), k1 + signed(_WIDE_WEYL[1])
    return c0, c1, c2, c3


def uniform_of(high: Int64Array, low: Int64Array) -> npt.NDArray[np.float64]:
    """Two 32-bit words -> float64 in (0, 1): 2^-65 at the least, in steps of 2^-64 near 0, where races are won."""
    return np.minimum((high + (low + 0.5) * 2.0**-32) * 2.0**-32, LARGEST_BELOW_ONE)


def key_of(seeds: npt.NDArray[np.uint64]) -> tuple[Int64Array, Int64Array]:
    """The Philox 4x32 key of each seed: its (low, high) half."""
    return (seeds & np.uint64(_MASK)).astype(np.int64), (seeds >> np.uint64(32)).astype(np.int64)


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _product(multiplier: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) words of the 128-bit product, from 32-bit halves; int64 products of them wrap and keep all bits."""
    m_high, m_low = multiplier >> 32, multiplier & _MASK
    high, low = words >> 32 & _MASK, words & _MASK
    middle = m_high * low + (m_low * low >> 32 & _MASK)
    carry = m_low * high + (middle & _MASK)
    return m_high * high + (middle >> 32 & _MASK) + (carry >> 32 & _MASK), words * signed(multiplier)
