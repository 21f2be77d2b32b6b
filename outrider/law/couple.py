"""COUPLE noise: a number for every token of the vocabulary at every position, cheap enough to race over all of them.

A token's number v in (0, 1) has two parts: 16 coarse bits, sixteen tokens to a Philox 4x64 block, and 64 fine bits from
the generator of the other purposes. E = -log(1 - v) >= v, so coarse bits alone bound a token's score from below, and
fine bits are needed only for the few tokens that may win. Nothing here depends on the base length.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.philox import LARGEST_BELOW_ONE, Int64Array, key_of, philox, signed, uniform_of, wide, wide_blocks
from outrider.law.sparse import Float32Array

Float64Array = npt.NDArray[np.float64]
UInt64Array = npt.NDArray[np.uint64]
UInt16Array = npt.NDArray[np.uint16]

# Purpose.COUPLE, the last word of every counter here.
_PURPOSE = 4
STEPS = 1 << 16
_LANES = 16  # tokens of a 4x64 block
# float32 products err by less than this; bounds are widened by it.
_SLACK = 1.0 + 2.0**-20


def coarse(seed: int, position: int, count: int) -> UInt16Array:
    """The coarse bits of tokens 0 .. count - 1: token x has lane x mod 16, from the low end, of block x // 16."""
    blocks = -(-count // _LANES)
    words = wide_blocks(seed, position << 64 | _PURPOSE << 128, blocks)
    return words.astype("<u8", copy=False).view("<u2")[:count]


def coarse_of(seeds: UInt64Array, positions: Int64Array, token_ids: npt.NDArray[np.integer]) -> UInt16Array:
    """The coarse bits of single tokens; all arrays are [n]. Dear when every token has a seed or position of its own."""
    # In C a whole vocabulary costs less than a hundred tokens would in numpy.
    steps = np.empty(len(token_ids), dtype=np.uint16)
    changes = (seeds[1:] != seeds[:-1]) | (positions[1:] != positions[:-1])
    for run in np.split(np.arange(len(token_ids)), np.flatnonzero(changes) + 1):
        if len(run):
            first = run[0]
            ids = token_ids[run]
            steps[run] = coarse(int(seeds[first]), int(positions[first]), int(ids.max()) + 1)[ids]
    return steps


def coarse_on(device: torch.device, seeds: Sequence[int], positions: Sequence[int], count: int) -> torch.Tensor:
    """`coarse` of each (seed, position), made on the device: [rows, count] float32, whole numbers."""
    blocks = torch.arange(-(-count // _LANES), device=device)[None]
    rows, keys = (
        torch.tensor(column, dtype=torch.int64, device=device)[:, None]
        for column in (list(positions), [signed(seed) for seed in seeds])
    )
    zero = torch.zeros_like(keys)
    words = torch.stack(wide((blocks, rows, zero + _PURPOSE, zero), (keys, zero)), dim=2)
    lanes = [words >> shift & (STEPS - 1) for shift in range(0, 64, 16)]
    return torch.stack(lanes, dim=3).flatten(1)[:, :count].float()


def exponentials(
    seeds: UInt64Array, positions: Int64Array, token_ids: npt.NDArray[np.integer], steps: npt.NDArray[np.integer]
) -> Float64Array:
    """Race noise of tokens whose coarse bits are known; all arrays are [n]."""
    zero = np.zeros_like(positions)
    high, low, _, _ = philox((token_ids.astype(np.int64), positions, zero, zero + _PURPOSE), key_of(seeds))
    return -np.log1p(-np.minimum((steps + uniform_of(high, low)) / STEPS, LARGEST_BELOW_ONE))


def contenders(probs: Float32Array, steps: UInt16Array) -> npt.NDArray[np.intp]:
    """Ids, ascending, that may win the race over one law [vocab]; the winner is among them.

    Raises ValueError when no probability is positive, or one is not finite.
    """
    numbers = steps.astype(np.float32)
    leader = int(np.argmax(probs / (numbers + 1.0)))
    limit = np.float32(_limit(float(probs[leader]), float(numbers[leader])))
    found = np.flatnonzero(probs * limit >= numbers)
    # Coarse bits of 0 bound nothing.
    return found[probs[found] > 0]


def contenders_on(probs: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`contenders` of every row of [rows, vocab], where the law is: (row, id) of each, in order of both."""
    leaders = (probs / (steps + 1.0)).argmax(dim=1, keepdim=True)
    best, number = (values.gather(1, leaders).flatten().tolist() for values in (probs, steps))
    limits = [_limit(one, coarse_bits) for one, coarse_bits in zip(best, number, strict=True)]
    limit = torch.tensor(limits, dtype=torch.float32, device=probs.device)[:, None]
    rows, ids = ((probs * limit >= steps) & (probs > 0)).nonzero(as_tuple=True)
    return rows, ids


def _limit(prob: float, steps: float) -> float:
    """Times a token's probability: the most coarse bits with which it can still beat the leader."""
    if not 0 < prob < np.inf:
        raise ValueError("a race needs finite probabilities and one above zero")
    worst = -np.log1p(-min((steps + 1.0) / STEPS, LARGEST_BELOW_ONE)) / prob
    return float(worst) * STEPS * _SLACK
