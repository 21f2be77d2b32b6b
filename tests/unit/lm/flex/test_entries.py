"""The tables say of every row which places it sees, once each, and of nothing else."""

import numpy as np
import pytest

from outrider.lm.flex.entries import NOTHING, Entries, places_of_pages
from outrider.lm.flex.tables import places_back, rows_of
from outrider.lm.ragged import Piece

PAGE, PAGES = 4, 300


def random_pieces(seed: int) -> list[Piece]:
    """Sequences on scattered pages, of which some begin with the same ones."""
    random = np.random.default_rng(seed)
    free, common = random.permutation(PAGES), 3
    pieces, row, used = [], 0, common
    for _ in range(random.integers(1, 9)):
        start, rows = int(random.integers(0, 60)), int(random.integers(1, 30))
        count = -(-(start + rows) // PAGE)
        shared = min(common, start // PAGE) if random.random() < 0.5 else 0
        pages = np.concatenate([free[:shared], free[used : used + count - shared]])
        pieces.append(Piece(row, rows, start, pages.astype(np.int64)))
        row, used = row + rows, used + count - shared
    return pieces


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("height", [1, 4, 128])
def test_every_row_sees_its_places_once_and_no_others(height: int, window: int | None) -> None:
    for seed in range(20):
        pieces = random_pieces(seed)
        entries, places = Entries(pieces, height, PAGE), places_of_pages(pieces, PAGES)
        reading = entries.reading(window)
        found: dict[int, list[tuple[int, int]]] = {}
        for entry in range(len(entries)):
            listed = reading.pages[entry, : reading.counts[entry]]
            slots = (listed[:, None] * PAGE + np.arange(PAGE)).ravel()
            place = (places[listed][:, None] * PAGE + np.arange(PAGE)).ravel()
            for at in range(height):
                if entries.last[entry, at] == NOTHING:
                    assert not entries.filled[entry, at]
                    continue
                seen = (place >= reading.first[entry, at]) & (place <= entries.last[entry, at])
                row = int(entries.rows[entry, at])
                assert row not in found
                found[row] = sorted(zip(place[seen].tolist(), slots[seen].tolist(), strict=True))
        for piece in pieces:
            for index in range(piece.rows):
                last = piece.start + index
                expected = range(0 if window is None else max(0, last + 1 - window), last + 1)
                slot = [(at, int(piece.pages[at // PAGE]) * PAGE + at % PAGE) for at in expected]
                assert found[piece.first_row + index] == slot


def test_a_window_lists_only_its_pages() -> None:
    entries = Entries([Piece(0, 2, 50, np.arange(13))], 8, PAGE)
    assert entries.reading(None).counts.tolist() == [13]
    assert entries.reading(5).pages.tolist() == [[11, 12]]  # places 46 to 51


@pytest.mark.parametrize("rows", [(2, 20, 9, 17, 1), (2, 20), (1,), (30,)])
def test_rows_find_their_way_back(rows: tuple[int, ...]) -> None:
    pieces = [Piece(sum(rows[:index]), count, 3, np.arange(9)) for index, count in enumerate(rows)]
    apart = [(4, [it for it in pieces if it.rows <= 9]), (16, [it for it in pieces if it.rows > 9])]
    groups = [Entries(its, height, PAGE) for height, its in apart if its]
    outputs = np.concatenate([rows_of(it) for it in groups])  # each slot says which row it computed
    assert outputs[places_back(groups, sum(rows))].tolist() == list(range(sum(rows)))
