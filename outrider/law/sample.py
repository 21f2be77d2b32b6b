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
# (row, id, probability) of single tokens, [n] each.
_Entries = tuple[Int64Array, Int64Array, Float32Array]

# Tokens this likely race before others; at most 64 a row.
_STRONG = 2.0**-6
# Products err by less than this.
_SLACK = 1.0 - 2.0**-40


class Race:
    """The races of many rows, as in `race` over all tokens: the lowest id among equals wins. Laws come in parts, which
    need not be kept, and noise is made for all rows at once; nothing depends on how the rows are cut into parts.

    Args:
        seeds: [rows] of the noise.
        positions: [rows] where each row stands.
        vocab_size: tokens of a law.
    """

    def __init__(self, seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> None:
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._positions = np.array(positions, dtype=np.int64)
        self._vocab_size = vocab_size
        self._low = couple.low_tokens(self._seeds, self._positions, vocab_size)
        inside = self._low < vocab_size
        # Ids from vocab_size on are none: they stand for the last token and never win.
        self._low_ids = np.minimum(self._low, vocab_size - 1)
        noise = couple.exponentials(self._seeds[:, None], self._positions[:, None], self._low_ids, np.True_)
        self._low_noise = np.where(inside, noise, np.inf)
        self._best: Float64Array = np.full(len(self._seeds), np.inf)
        self._ids: Int64Array = np.full(len(self._seeds), -1)
        self._likely: list[_Entries] = []

    def look(self, rows: Int64Array, probs: torch.Tensor) -> None:
        """Lets the low tokens of some rows race, and notes which others can still win.

        Args:
            rows: [n] which rows these are.
            probs: [n, vocab_size] float32, their laws.

        Raises ValueError when a row has no probability above zero, or its largest is not finite.
        """
        low = self._low_ids[rows]
        held = probs.gather(1, torch.from_numpy(low).to(probs.device)).cpu().numpy()
        with np.errstate(invalid="ignore"):
            race = scores(held, self._low_noise[rows])
        first = race.argmin(axis=1)[:, None]
        best = np.take_along_axis(race, first, axis=1)[:, 0]
        # Here infinite and NaN probabilities have won.
        if not (best > 0).all():
            raise _no_law()
        self._best[rows], self._ids[rows] = best, np.take_along_axis(low, first, axis=1)[:, 0]
        # A token that is not low has a score of at least LOW / probability. A float32 that is not above its float64:
        limits = np.nextafter(np.minimum(couple.LOW * _SLACK / best, 2.0).astype(np.float32), np.float32(0))
        owners, ids, likely = _at_least(probs, limits)
        alone = np.isinf(best) & (np.bincount(owners, minlength=len(rows)) == 0)
        if alone.any() or not np.isfinite(likely).all():
            raise _no_law()
        self._likely.append((rows[owners], ids, likely))

    def result(self) -> Int32Array:
        """The winner of each row, [rows] int32; -1 where no law was looked at."""
        if not self._likely:
            return self._ids.astype(np.int32)
        rows, ids, probs = (np.concatenate(parts) for parts in zip(*self._likely, strict=True))
        high = ~couple.are_low(rows, ids, self._low, self._vocab_size)
        strong = probs >= _STRONG
        self._enter(rows, ids, probs, high & strong)
        self._enter(rows, ids, probs, high & ~strong & (probs * self._best[rows] >= couple.LOW * _SLACK))
        return self._ids.astype(np.int32)

    def _enter(self, rows: Int64Array, ids: Int64Array, probs: Float32Array, chosen: couple.BoolArray) -> None:
        """Lets tokens race that are not low."""
        rows, ids = rows[chosen], ids[chosen]
        noise = couple.exponentials(self._seeds[rows], self._positions[rows], ids, np.False_)
        race = scores(probs[chosen], noise)
        # Sorted by row, then score, then id: the first of each row is its best.
        order = np.lexsort((ids, race, rows))
        owners, first = np.unique(rows[order], return_index=True)
        found, token = race[order][first], ids[order][first]
        ahead = (found < self._best[owners]) | ((found == self._best[owners]) & (token < self._ids[owners]))
        self._best[owners[ahead]], self._ids[owners[ahead]] = found[ahead], token[ahead]


def _no_law() -> ValueError:
    return ValueError("a race needs finite probabilities and one above zero")


def _at_least(probs: torch.Tensor, limits: Float32Array) -> _Entries:
    """The tokens that have at least their row's limit and more than nothing."""
    if probs.device.type != "cpu":
        return _at_least_on_device(probs, limits)
    laws = probs.numpy()

    def likely(row: int) -> Int64Array:
        found = np.flatnonzero(laws[row] >= limits[row])
        positive: Int64Array = found[laws[row, found] > 0]
        return positive

    ids = for_rows(likely, *laws.shape)
    owners = np.repeat(np.arange(len(laws)), [len(one) for one in ids])
    tokens = np.concatenate(ids)
    return owners, tokens, laws[owners, tokens]


def _at_least_on_device(probs: torch.Tensor, limits: Float32Array) -> _Entries:
    limit = torch.from_numpy(limits).to(probs.device)[:, None]
    index, ids = ((probs >= limit) & (probs > 0)).nonzero(as_tuple=True)
    values = probs[index, ids].cpu().numpy()
    return index.cpu().numpy(), ids.cpu().numpy(), values
