"""A pass of few rows over buffers that stay where they are, so that it can be recorded once and played again.

Rows and entries that a pass does not need are padding: it sees nothing, is seen by nobody, and writes its keys into a
page of its own, which no sequence ever gets.
"""

from collections.abc import Sequence

import torch

from outrider.law.sparse import Int32Array
from outrider.lm.causal_lm import Run
from outrider.lm.flex.entries import NOTHING, Entries, places_of_pages
from outrider.lm.flex.mirror import Mirror
from outrider.lm.flex.paged import Flex, FlexPass
from outrider.lm.flex.tables import Group, Tables, places_back
from outrider.lm.kv_storage import KvStorage
from outrider.lm.ragged import Int64Array, Piece, positions_of, slots_of


class FixedPass:
    """Passes of up to `rows` rows, each possibly of a sequence of its own.

    Attributes:
        rows: how many.

    Args:
        run: the model's pass.
        storage: with a page for padding.
        most_pages: pages of the longest sequence.
    """

    def __init__(self, rows: int, run: Run, storage: KvStorage, flex: Flex, most_pages: int) -> None:
        assert storage.scratch_page is not None
        self.rows, self._run, self._storage, self._flex = rows, run, storage, flex
        self._scratch, self._height = storage.scratch_page * storage.page_size, min(flex.few, rows)
        device, seen = storage.layers[0].device, (rows, self._height)
        each = ("tokens", "positions", "slots", "wanted", "back")
        self._numbers = Mirror({**dict.fromkeys(each, (rows,)), "rows": seen}, torch.int64, device)
        shapes: dict[str, tuple[int, ...]] = {"last": seen, "places": (storage.null_page + 1,)}
        for window in flex.windows:
            shapes |= {f"counts {window}": (rows,), f"pages {window}": (rows, most_pages), f"first {window}": seen}
        self._tables = Mirror(shapes, torch.int32, device)
        self._pad(0, 0)
        self._send()

    def fill(self, pieces: Sequence[Piece], tokens: Int32Array, wanted: Int64Array) -> None:
        """Puts a pass into the buffers: pieces without trees of `rows` rows or fewer, their tokens [n], and the rows
        [m] whose logits are wanted."""
        self._numbers.wait()
        self._tables.wait()
        entries, size = Entries(pieces, self._height, self._storage.page_size), self._storage.page_size
        count, used = len(tokens), len(entries)
        self._pad(count, used)
        numbers, tables = self._numbers.host, self._tables.host
        numbers["tokens"][:count], numbers["wanted"][: len(wanted)] = tokens, wanted
        numbers["positions"][:count], numbers["slots"][:count] = positions_of(pieces), slots_of(pieces, size)
        numbers["back"][:count], numbers["rows"][:used] = places_back([entries], count), entries.rows
        tables["last"][:used], tables["places"][:] = entries.last, places_of_pages(pieces, len(tables["places"]))
        for window in self._flex.windows:
            reading = entries.reading(window)
            tables[f"counts {window}"][:used], tables[f"first {window}"][:used] = reading.counts, reading.first
            tables[f"pages {window}"][:used, : reading.pages.shape[1]] = reading.pages
        self._send()

    def compute(self) -> torch.Tensor:
        """The pass in the buffers: logits [rows, head rows], of which the first m are wanted. Nothing here waits for
        the device or comes from the host."""
        numbers, tables = self._numbers.device, self._tables.device
        by_window = {
            window: Tables(
                tables[f"counts {window}"],
                tables[f"pages {window}"],
                tables[f"first {window}"],
                tables["last"],
                tables["places"],
            )
            for window in self._flex.windows
        }
        groups = [Group(self._height, numbers["rows"].view(-1), by_window)]
        paged = FlexPass(self._storage, self._flex.kernel, numbers["slots"], groups, numbers["back"], fixed=True)
        return self._run(numbers["tokens"], numbers["positions"], numbers["wanted"], paged)

    def _pad(self, count: int, used: int) -> None:
        """Makes padding of the rows and entries from there on. There are at least as many of both."""
        numbers, tables = self._numbers.host, self._tables.host
        numbers["tokens"][count:], numbers["positions"][count:], numbers["wanted"][:] = 0, 0, 0
        numbers["slots"][count:] = self._scratch
        numbers["rows"][used:] = 0
        numbers["back"][count:] = min(used, self.rows - 1) * self._height  # an entry that sees nothing says 0
        tables["last"][used:] = NOTHING
        for window in self._flex.windows:
            tables[f"counts {window}"][used:] = 0

    def _send(self) -> None:
        self._numbers.send()
        self._tables.send()
