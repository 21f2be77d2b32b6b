"""The plan of a pass: pieces, groups, what they read."""

import numpy as np
import pytest
import torch

from outrider.lm.ragged import MAX_PIECE_ROWS, Piece, RaggedBatch, View

NULL = 10_000
SIZE = 4
CPU = torch.device("cpu")


def batch(*shapes: tuple[int, int]) -> RaggedBatch:
    """Sequences of (cached, new) tokens; sequence i owns the pages from 1000 * i on."""
    pieces, row = [], 0
    for index, (start, rows) in enumerate(shapes):
        pieces.append(Piece(row, rows, start, 1000 * index + np.arange(-(-(start + rows) // SIZE))))
        row += rows
    return RaggedBatch(pieces, NULL, SIZE, CPU)


def pages(view: View, kv_heads: int = 1) -> list[list[list[int]]]:
    """[2 * kv_heads, sequences, pages]: what the heads read, without the head's own offset."""
    rows = view.pages.view(2 * kv_heads, view.sequences, -1)
    offsets = torch.arange(2 * kv_heads)[:, None, None] * (NULL + 1)
    listed: list[list[list[int]]] = (rows - offsets).tolist()
    return listed


def test_rows_know_their_slots_and_positions() -> None:
    plan = batch((3, 2), (0, 3))
    assert plan.slots.tolist() == [3, 4, 4000, 4001, 4002]
    assert plan.positions.tolist() == [3, 4, 0, 1, 2]


def test_full_pages_need_no_mask_and_no_padding() -> None:
    (view,) = batch((7, 1)).views(None, 4, 2, torch.float32)
    assert view.rows is None
    assert view.mask is None
    assert pages(view, kv_heads=2) == [[[0, 1]]] * 4


def test_what_a_page_holds_beyond_the_sequence_is_masked() -> None:
    (view,) = batch((5, 1)).views(None, 2, 1, torch.float32)
    assert pages(view) == [[[0, 1]]] * 2
    assert view.mask is not None
    assert (view.mask == 0).tolist() == [[[True] * 6 + [False] * 2] * 2]


def test_a_group_is_padded_with_the_null_page_and_repeated_rows() -> None:
    (view,) = batch((5, 1), (0, 2)).views(None, 1, 1, torch.float32)
    assert view.rows is not None
    assert view.rows.tolist() == [0, 0, 1, 2]
    assert pages(view) == [[[0, 1], [1000, NULL]]] * 2
    assert view.mask is not None
    seen = (view.mask == 0).tolist()
    assert seen == [[[True] * 6 + [False] * 2] * 2, [[True] + [False] * 7, [True] * 2 + [False] * 6]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_have_the_type_of_the_query(dtype: torch.dtype) -> None:
    (view,) = batch((3, 2)).views(None, 3, 1, dtype)
    assert view.mask is not None
    assert (view.mask.dtype, view.mask.shape) == (dtype, (1, 6, 2 * SIZE))


def test_a_window_reads_only_its_pages() -> None:
    (view,) = batch((50, 2)).views(4, 1, 1, torch.float32)
    assert pages(view) == [[[11, 12]]] * 2
    assert view.mask is not None
    seen = [[position - 4 < key <= position for key in range(44, 52)] for position in (50, 51)]
    assert (view.mask == 0).tolist() == [seen]


def test_long_pieces_stand_alone_and_are_split() -> None:
    views = batch((0, 2 * MAX_PIECE_ROWS + 1), (7, 1), (9, 1)).views(None, 1, 1, torch.float32)
    covered = sorted(row for view in views for row in (view.rows.tolist() if view.rows is not None else []))
    assert covered == list(range(2 * MAX_PIECE_ROWS + 3))
    assert sorted(view.sequences for view in views) == [1, 1, 1, 2]
    assert min(len(view.pages) for view in views if view.sequences == 1) == 2 * MAX_PIECE_ROWS // SIZE


def test_contexts_of_different_size_are_not_padded_to_the_longest() -> None:
    views = batch((5000, 1), (4000, 1), (300, 1), (10, 1), (5, 1)).views(None, 1, 1, torch.float32)
    assert sum(len(view.pages) for view in views) < 1.3 * 2 * (5001 + 4001 + 301 + 11 + 6) / SIZE


def test_views_are_made_once_a_pass() -> None:
    plan = batch((5, 1))
    assert plan.views(None, 1, 1, torch.float32) is plan.views(None, 1, 1, torch.float32)
    assert plan.views(None, 1, 1, torch.float32) is not plan.views(4, 1, 1, torch.float32)
    assert plan.views(None, 1, 1, torch.float32) is not plan.views(None, 1, 1, torch.bfloat16)
