"""torch's FlexAttention, compiled, against the walk over the same tables: on a CPU it reads the same lists."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from outrider.lm.flex.compiled import CompiledKernel
from outrider.lm.flex.entries import Entries, places_of_pages
from outrider.lm.flex.tables import Scoring, Tables, tables_of
from outrider.lm.flex.walked import walk
from outrider.lm.ragged import Piece

PAGE, PAGES, HEIGHT = 16, 40, 8
HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCORING = Scoring(0.3, 2.0, summed=False, fixed=False)


def pieces(shapes: Sequence[tuple[int, int]], seed: int) -> list[Piece]:
    """Of sequences (length before, rows) on scattered pages; all begin with the same page."""
    free = np.random.default_rng(seed).permutation(PAGES - 1).astype(np.int64)
    made, row, used = [], 0, 1
    for start, rows in shapes:
        more = -(-(start + rows) // PAGE) - 1
        own = np.concatenate([free[:1], free[used : used + more]])
        made.append(Piece(row, rows, start, own))
        row, used = row + rows, used + more
    return made


def case(shapes: Sequence[tuple[int, int]], window: int | None) -> tuple[torch.Tensor, torch.Tensor, Tables]:
    """(query, keys and values, tables)"""
    made = pieces(shapes, len(shapes))
    entries = Entries(made, HEIGHT, PAGE)
    tables = tables_of(entries, window, torch.from_numpy(places_of_pages(made, PAGES)))
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(tables.counts), HEADS, HEIGHT, WIDTH, generator=generator)
    return query, torch.randn(2 * KV_HEADS, PAGES * PAGE, WIDTH, generator=generator), tables


# A compilation takes a processor 15 s, and a busy machine ten times as long; the next run finds it in a cache.
@pytest.mark.timeout(900)
@torch.inference_mode()
def test_one_compilation_does_for_every_batch_and_window_and_reads_what_is_listed() -> None:
    kernel, before = CompiledKernel(), counters["stats"]["unique_graphs"]
    batches: list[tuple[list[tuple[int, int]], int | None]] = [
        ([(30, 1), (16, 5)], None),
        ([(33, 20), (17, 1), (100, 3), (40, 8)], None),
        ([(90, 5), (64, 1), (31, 9)], 20),
        ([(40, 1)], None),
    ]
    for shapes, window in batches:
        query, key_value, tables = case(shapes, window)
        listed = {page for row, count in zip(tables.pages, tables.counts, strict=True) for page in row[:count].tolist()}
        for page in set(range(PAGES)) - listed:
            key_value[:, page * PAGE : (page + 1) * PAGE] = torch.nan
        keys, values = (it[None] for it in key_value.chunk(2))
        output, _ = kernel(query, keys, values, tables, SCORING)
        expected, _ = walk(query, keys, values, tables, SCORING)
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        assert not output.transpose(1, 2)[tables.last < 0].any(), "padding sees nothing"
    assert counters["stats"]["unique_graphs"] == before + 1
