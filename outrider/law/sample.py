"""The race over whole laws with COUPLE noise, on whatever device they are: the target's own draws."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.law import couple
from outrider.law.parallel import for_rows
from outrider.law.race import scores
from outrider.law.sparse import Float32Array, Int32Array

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

# Tokens this likely race before others; at most 64 a row.
_STRONG = 2.0**-6
# The best score of a row is exponential with rate 1: hardly ever above this, and then the row is looked at again.
_REACH = 8.0
# Products err by less than this.
_SLACK = 1.0 - 2.0**-40


def winners(target_probs: torch.Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Int32Array:
    """The winner of each row's race, [rows] int32: the lowest id among equals, as in `race` over all tokens.

    Args:
        target_probs: [rows, vocab_size] float32.
        seeds: [rows] of the noise.
        positions: [rows] where each row stands.

    Raises ValueError when a row has no probability above zero, or its largest is not finite.
    """
    race = _Race(target_probs, np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))
    race.enter_low()
    # A token that is not low has a score of at least LOW / probability.
    race.enter_likely(range(len(target_probs)), np.full(len(target_probs), couple.LOW / _REACH))
    left = np.flatnonzero(~(race.best <= _REACH))
    if len(left):
        race.enter_likely(left.tolist(), couple.LOW / race.best[left])
    return race.result()


class _Race:
    """The best score so far of each row, and whose it is."""

    def __init__(self, probs: torch.Tensor, seeds: npt.NDArray[np.uint64], positions: Int64Array) -> None:
        self._probs, self._seeds, self._positions = probs, seeds, positions
        self._low = couple.low_tokens(seeds, positions, probs.shape[1])
        self.best: Float64Array = np.full(len(probs), np.inf)
        self._ids: Int64Array = np.full(len(probs), -1)

    def enter_low(self) -> None:
        """Lets the low tokens race."""
        rows, places = np.nonzero(self._low < self._probs.shape[1])
        ids = self._low[rows, places]
        device = self._probs.device
        probs = self._probs[torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)]
        self._enter(rows, ids, probs.cpu().numpy(), np.ones(len(rows), dtype=np.bool_))

    def enter_likely(self, rows: Sequence[int], least: Float64Array) -> None:
        """Lets the tokens of some rows race that have at least so much probability, and can still win."""
        # A float32 that is not above its float64.
        limits = np.nextafter(least.astype(np.float32), np.float32(0))
        owners, ids, probs = _at_least(self._probs, rows, limits)
        if not np.isfinite(probs).all():
            raise ValueError("a race needs finite probabilities and one above zero")
        strong = probs >= _STRONG
        self._enter_some(owners, ids, probs, strong)
        self._enter_some(owners, ids, probs, ~strong & (probs * self.best[owners] >= couple.LOW * _SLACK))

    def _enter_some(self, rows: Int64Array, ids: Int64Array, probs: Float32Array, chosen: couple.BoolArray) -> None:
        rows, ids, probs = rows[chosen], ids[chosen], probs[chosen]
        self._enter(rows, ids, probs, couple.are_low(rows, ids, self._low, self._probs.shape[1]))

    def result(self) -> Int32Array:
        """The winners."""
        if not np.isfinite(self.best).all():
            raise ValueError("a race needs finite probabilities and one above zero")
        return self._ids.astype(np.int32)

    def _enter(self, rows: Int64Array, ids: Int64Array, probs: Float32Array, low: couple.BoolArray) -> None:
        noise = couple.exponentials(self._seeds[rows], self._positions[rows], ids, low)
        race = scores(probs, noise)
        # Sorted by row, then score, then id: the first of each row is its best.
        order = np.lexsort((ids, race, rows))
        owners, first = np.unique(rows[order], return_index=True)
        found, token = race[order][first], ids[order][first]
        ahead = (found < self.best[owners]) | ((found == self.best[owners]) & (token < self._ids[owners]))
        self.best[owners[ahead]], self._ids[owners[ahead]] = found[ahead], token[ahead]


def _at_least(
    probs: torch.Tensor, rows: Sequence[int], limits: Float32Array
) -> tuple[Int64Array, Int64Array, Float32Array]:
    """(row, id, probability) of the tokens of some rows that have at least the row's limit and more than nothing."""
    if probs.device.type != "cpu":
        return _at_least_on_device(probs, rows, limits)
    laws = probs.numpy()

    def likely(index: int) -> Int64Array:
        law = laws[rows[index]]
        found = np.flatnonzero(law >= limits[index])
        positive: Int64Array = found[law[found] > 0]
        return positive

    ids = for_rows(likely, len(rows), laws.shape[1])
    owners = np.repeat(np.array(rows, dtype=np.int64), [len(one) for one in ids])
    tokens = np.concatenate(ids)
    values: Float32Array = laws[owners, tokens]
    return owners, tokens, values


def _at_least_on_device(
    probs: torch.Tensor, rows: Sequence[int], limits: Float32Array
) -> tuple[Int64Array, Int64Array, Float32Array]:
    chosen = probs if len(rows) == len(probs) else probs[list(rows)]
    limit = torch.from_numpy(limits).to(probs.device)[:, None]
    index, ids = ((chosen >= limit) & (chosen > 0)).nonzero(as_tuple=True)
    values = chosen[index, ids].cpu().numpy()
    return np.array(rows, dtype=np.int64)[index.cpu().numpy()], ids.cpu().numpy(), values
