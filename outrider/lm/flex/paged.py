"""A pass whose layers read pages where they lie."""

from collections.abc import Sequence

import torch

from outrider.lm.attention import LayerCall, Paged, PagedPass
from outrider.lm.flex.entries import Entries, places_of_pages
from outrider.lm.flex.tables import Group, Kernel, Scoring, places_back, rows_of, tables_of
from outrider.lm.kv_storage import KvStorage, LayerShape
from outrider.lm.ragged import Piece, RaggedBatch

# Rows of an entry: few, as decoding and scoring have them, and many, as prompts do.
MANY = 128
# Rows with the heads that share a key head fill a tile of this many.
_TILE = 32
# A piece of more entries of few rows is one of many.
_MOST_PARTS = 4


class Flex:
    """How a model's layers are attended to over pages.

    Attributes:
        kernel: what computes it.
        few: rows of an entry of few.
        windows: of the layers.

    Args:
        shapes: of the layers, with their heads.
    """

    def __init__(self, kernel: Kernel, shapes: Sequence[LayerShape]) -> None:
        self.kernel = kernel
        self.few = min(8, max(1, _TILE // max(it.heads // it.kv_heads for it in shapes)))
        self.windows = sorted({it.window for it in shapes}, key=lambda it: it or 0)

    def __call__(self, storage: KvStorage, batch: RaggedBatch) -> Paged:
        """A pass over a batch; where it holds a tree, one that gathers pages."""
        if not batch.straight:
            return PagedPass(storage, batch)
        device = storage.layers[0].device
        cut = [
            Entries(pieces, height, storage.page_size) for height, pieces in _apart(batch.pieces, self.few) if pieces
        ]
        places = torch.from_numpy(places_of_pages(batch.pieces, storage.null_page + 1)).to(device)
        groups = []
        for entries in cut:
            tables = {window: tables_of(entries, window, places) for window in self.windows}
            groups.append(Group(entries.height, torch.from_numpy(rows_of(entries)).to(device), tables))
        back = torch.from_numpy(places_back(cut, sum(it.rows for it in batch.pieces))).to(device)
        return FlexPass(storage, self.kernel, batch.slots, groups, back)


class FlexPass:
    """A pass over entries; a Paged. Layers are told apart by the order in which they call.

    Args:
        slots: [n] int64, where each row's key and value go.
        groups: the entries.
        back: [n] int64, where each row stands in their outputs, one group after the other.
        fixed: whether all passes over these entries have these shapes.
    """

    def __init__(
        self,
        storage: KvStorage,
        kernel: Kernel,
        slots: torch.Tensor,
        groups: Sequence[Group],
        back: torch.Tensor,
        *,
        fixed: bool = False,
    ) -> None:
        self._storage, self._kernel, self._slots = storage, kernel, slots
        self._groups, self._back, self._fixed = groups, back, fixed
        self._layer = 0

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Writes the new keys and values, then attends over the cached ones."""
        layer, self._layer = self._layer, self._layer + 1
        self._storage.write(layer, self._slots, call.key_value)
        heads, key_dim = call.query.shape[1:]
        keys, values = self._storage.layers[layer].chunk(2)
        keys, values = keys[None, ..., :key_dim], values[None, ..., : call.value_dim]
        scale = key_dim**-0.5 if call.scaling is None else float(call.scaling)
        scoring = Scoring(scale, call.softcap, call.sinks is not None, self._fixed)
        outputs = []
        for group in self._groups:
            query = call.query.index_select(0, group.rows).view(-1, group.height, heads, key_dim).transpose(1, 2)
            output, summed = self._kernel(query, keys, values, group.tables[call.window], scoring)
            if call.sinks is not None:
                assert summed is not None
                output = _drained(output, summed, call.sinks)
            outputs.append(output.transpose(1, 2).reshape(-1, heads, call.value_dim))
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return together.index_select(0, self._back)


def _drained(output: torch.Tensor, summed: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """What is left when each head's sink [heads] is one more key, without a value."""
    left = torch.sigmoid(summed - sinks.float()[:, None])
    return output * left[..., None].to(output.dtype)


def _apart(pieces: Sequence[Piece], few: int) -> list[tuple[int, list[Piece]]]:
    """Pieces by the height of their entries."""
    most = _MOST_PARTS * few
    return [(few, [it for it in pieces if it.rows <= most]), (MANY, [it for it in pieces if it.rows > most])]
