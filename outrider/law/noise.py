"""All randomness of the system: a pure function of (seed, base length, position, purpose, token id).

The generator is Philox (philox.py); COUPLE noise has a construction of its own (couple.py). A retry, a fail-over or
another replica repeats every draw bit for bit, and nobody holds a stream that could run out of step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from outrider.law import couple
from outrider.law.philox import LARGEST_BELOW_ONE, Int64Array, key_of, philox, philox_of_arrays, uniform_of
from outrider.law.sparse import Int32Array

Float64Array = npt.NDArray[np.float64]

__all__ = [
    "BatchNoise",
    "Float64Array",
    "Int64Array",
    "Purpose",
    "RoundNoise",
    "derived_seed",
    "exponential_of",
    "exponentials_of_rows",
    "philox",
    "philox_of_arrays",
    "uniform_of",
]

_MASK = 0xFFFFFFFF

# In the place of a token id: the noise of all tokens outside a draft law's support together. Never a token id.
_TAIL = _MASK


class Purpose(IntEnum):
    """What a draw is for. Different purposes never share noise."""

    PROPOSE = 1
    ACCEPT = 2
    RESAMPLE = 3
    COUPLE = 4
    CHOICE = 5
    BRANCH = 6


def derived_seed(seed: int, number: int) -> int:
    """The seed of choice `number` of a request whose first choice has `seed`: [0, 2^64)."""
    high, low, _, _ = philox((number, 0, 0, int(Purpose.CHOICE)), (seed & _MASK, seed >> 32))
    return high << 32 | low


def exponential_of(high: Int64Array, low: Int64Array) -> Float64Array:
    """Two words -> float64, exponential with rate 1, always positive and finite."""
    return -np.log1p(-uniform_of(high, low))


@dataclass(frozen=True)
class RoundNoise:
    """The noise of one session's round.

    Attributes:
        seed: the session's seed, 0 <= seed < 2^64.
        base_length: committed tokens when the round began. COUPLE noise does not depend on it.
    """

    seed: int
    base_length: int

    def uniform(self, purpose: Purpose, position: int) -> float:
        """A number in (0, 1)."""
        high, low, _, _ = philox((0, position, self.base_length, int(purpose)), self._key())
        return _uniform(high, low)

    def uniforms(self, purpose: Purpose, positions: npt.NDArray[np.integer]) -> Float64Array:
        """`uniform` of every position: float64 array of the same length."""
        high, low, _, _ = self._words(purpose, positions, 0)
        return uniform_of(high, low)

    def exponentials(
        self, purpose: Purpose, position: int | npt.NDArray[np.integer], token_ids: Int32Array
    ) -> Float64Array:
        """Race noise of each token: float64 array as long as token_ids. `position` is one for all or one for each."""
        if purpose is Purpose.COUPLE:
            positions = np.broadcast_to(np.asarray(position, dtype=np.int64), token_ids.shape)
            seeds = np.full(len(token_ids), self.seed, dtype=np.uint64)
            return couple.exponentials_of(seeds, positions, token_ids)
        high, low, _, _ = self._words(purpose, position, token_ids)
        return exponential_of(high, low)

    def tail(self, purpose: Purpose, position: int) -> tuple[float, float]:
        """(exponential, uniform) for all tokens outside a support together: the smallest of independent exponentials is
        exponential with the sum of the rates, and independent of which of them it is.
        """
        words = philox((_TAIL, position, self.base_length, int(purpose)), self._key())
        return -math.log1p(-_uniform(*words[:2])), _uniform(*words[2:])

    def branch(self, position: int, rank: int) -> "RoundNoise":
        """The noise of what follows one of several candidates for a position; the first has rank 0, and its parent's
        noise, so that a chain is drawn as it always was.

        Prefixes that end at one position must not share noise: what is drawn after one of them may decide how much is
        drawn after another.
        """
        if not rank:
            return self
        high, low, _, _ = philox((rank, position, self.base_length, int(Purpose.BRANCH)), self._key())
        return RoundNoise(high << 32 | low, self.base_length)

    def _words(
        self, purpose: Purpose, position: int | npt.NDArray[np.integer], token: int | Int32Array
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        return philox_of_arrays((token, position, self.base_length, int(purpose)), self._key())

    def _key(self) -> tuple[int, int]:
        return self.seed & _MASK, self.seed >> 32


@dataclass(frozen=True)
class BatchNoise:
    """The noise of many rounds in one call, bit for bit what each RoundNoise says alone.

    What is asked for is [n] long: `rounds` says whose noise, `positions` for which position.

    Attributes:
        seeds: [rounds] uint64.
        base_lengths: [rounds] int64.
    """

    seeds: npt.NDArray[np.uint64]
    base_lengths: Int64Array

    @staticmethod
    def of(noises: Sequence[RoundNoise]) -> "BatchNoise":
        """The noise of these rounds, which are called by their index."""
        return BatchNoise(
            np.array([noise.seed for noise in noises], dtype=np.uint64),
            np.array([noise.base_length for noise in noises], dtype=np.int64),
        )

    def uniforms(self, purpose: Purpose, rounds: Int64Array, positions: Int64Array) -> Float64Array:
        """`RoundNoise.uniform` of each: [n]."""
        high, low, _, _ = self._words(purpose, rounds, positions, 0)
        return uniform_of(high, low)

    def exponentials(
        self, purpose: Purpose, rounds: Int64Array, positions: Int64Array, token_ids: Int32Array
    ) -> Float64Array:
        """`RoundNoise.exponentials` of each: [n]."""
        if purpose is Purpose.COUPLE:
            return couple.exponentials_of(self.seeds[rounds], positions, token_ids)
        high, low, _, _ = self._words(purpose, rounds, positions, token_ids)
        return exponential_of(high, low)

    def tails(self, purpose: Purpose, rounds: Int64Array, positions: Int64Array) -> Float64Array:
        """The exponential of `RoundNoise.tail` of each: [n]."""
        high, low, _, _ = self._words(purpose, rounds, positions, _TAIL)
        # numpy's logarithm may have other last bits.
        return np.array([-math.log1p(-uniform) for uniform in uniform_of(high, low).tolist()])

    def _words(
        self, purpose: Purpose, rounds: Int64Array, positions: Int64Array, token: int | Int32Array
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        return philox_of_arrays((token, positions, self.base_lengths[rounds], int(purpose)), key_of(self.seeds[rounds]))


def exponentials_of_rows(
    purpose: Purpose,
    noises: Sequence[RoundNoise],
    positions: Sequence[int],
    sizes: Sequence[int],
    token_ids: Int32Array,
) -> Float64Array:
    """`RoundNoise.exponentials` for rows of many sessions at once, bit for bit.

    Args:
        noises: [rows] each row's noise.
        positions: [rows] each row's position.
        sizes: [rows] entries of each row.
        token_ids: [sum(sizes)] int32, the rows' tokens one after another.

    Returns [sum(sizes)] float64.
    """
    rows = np.repeat(np.arange(len(noises)), sizes)
    return BatchNoise.of(noises).exponentials(purpose, rows, np.array(positions, dtype=np.int64)[rows], token_ids)


def _uniform(high: int, low: int) -> float:
    return min((high + (low + 0.5) * 2.0**-32) * 2.0**-32, LARGEST_BELOW_ONE)
