"""The plan of a pass: pieces, groups, what they read."""

import numpy as np
import pytest
import torch

from outrider.lm.ragged import MAX_PIECE_ROWS, Piece, RaggedBatch

NULL = 10_000
CPU = torch.device("cpu")


def batch(*shapes: tuple[int, int]) -> RaggedBatch:
    """Sequences of (cached, new) tokens; sequence i owns the slots from 1000 * i on."""
    pieces, row = [], 0
    for index, (start, rows) in enumerate(shapes):
        pieces.append(Piece(row, rows, start, np.arange(1000 * index, 1000 * index + start + rows)))
        row += rows
    return RaggedBatch(pieces, NULL, CPU)


def test_rows_know_their_slots_and_positions() -> None:
    plan = batch((3, 2), (0, 3))
    assert plan.slots.tolist() == [3, 4, 1000, 1001, 1002]
    assert plan.positions.tolist() == [3, 4, 0, 1, 2]


def test_a_single_new_position_needs_no_mask_and_no_padding() -> None:
    (view,) = batch((5, 1)).views(None, 2, torch.float32)
    assert view.rows is None
    assert view.mask is None
    assert view.keys.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_group_is_padded_with_the_null_slot_and_repeated_rows() -> None:
    (view,) = batch((3, 1), (0, 2)).views(None, 1, torch.float32)
    assert view.rows is not None
    assert view.rows.tolist() == [0, 0, 1, 2]
    assert view.keys.view(2, -1).tolist() == [[0, 1, 2, 3], [1000, 1001, NULL, NULL]]
    assert view.mask is not None
    seen = (view.mask == 0).view(2, 2, 4).tolist()
    assert seen == [[[True] * 4] * 2, [[True, False, False, False], [True, True, False, False]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_have_the_type_of_the_query(dtype: torch.dtype) -> None:
    (view,) = batch((3, 2)).views(None, 3, dtype)
    assert view.mask is not None
    assert (view.mask.dtype, view.mask.shape) == (dtype, (1, 1, 6, 5))


def test_a_window_reads_only_its_keys() -> None:
    (view,) = batch((50, 2)).views(4, 1, torch.float32)
    assert view.keys.tolist() == [47, 48, 49, 50, 51]
    assert view.mask is not None
    assert (view.mask == 0).view(2, 5).tolist() == [[True] * 4 + [False], [False] + [True] * 4]


def test_long_pieces_stand_alone_and_are_split() -> None:
    views = batch((0, 2 * MAX_PIECE_ROWS + 1), (7, 1), (9, 1)).views(None, 1, torch.float32)
    covered = sorted(row for view in views for row in (view.rows.tolist() if view.rows is not None else []))
    assert covered == list(range(2 * MAX_PIECE_ROWS + 3))
    assert sorted(view.sequences for view in views) == [1, 1, 1, 2]
    assert min(len(view.keys) for view in views if view.sequences == 1) == MAX_PIECE_ROWS


def test_contexts_of_different_size_are_not_padded_to_the_longest() -> None:
    views = batch((5000, 1), (4000, 1), (300, 1), (10, 1), (5, 1)).views(None, 1, torch.float32)
    assert sum(len(view.keys) for view in views) < 1.3 * (5001 + 4001 + 301 + 11 + 6)


def test_views_are_made_once_a_pass() -> None:
    plan = batch((5, 1))
    assert plan.views(None, 1, torch.float32) is plan.views(None, 1, torch.float32)
    assert plan.views(None, 1, torch.float32) is not plan.views(4, 1, torch.float32)
    assert plan.views(None, 1, torch.float32) is not plan.views(None, 1, torch.bfloat16)
