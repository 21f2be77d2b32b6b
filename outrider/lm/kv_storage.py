"""The tensors behind the pages of outrider/lm/kv.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer keeps per token, as seen in a recording pass.

    Attributes:
        kv_heads: key and value heads.
        key_dim: width of a key.
        value_dim: width of a value.
        dtype: of keys and values.
        window: how many positions the layer looks back, its own included; None for all.
        heads: query heads; 0 where nobody looked.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None
    heads: int = 0

    @property
    def width(self) -> int:
        """Numbers that a key and a value take, each: the wider one's."""
        return max(self.key_dim, self.value_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return 2 * self.kv_heads * self.width * self.dtype.itemsize


class KvStorage:
    """Keys and values of every layer, head by head: slot = page * page_size + offset.

    A page of a head is one piece of memory, so that whole pages are gathered into batches that matrix kernels take as
    they are. The heads of the values follow those of the keys: both are written and gathered at once.

    Attributes:
        layers: per layer [2 * kv_heads, slots, width].
        null_page: a page that is always zero. Padding reads it: a page may hold the NaN of another session, and
            0 * NaN would leak through a mask. For the same reason pages are cleared before a sequence gets them.
        scratch_page: a page that nobody reads, for what padding writes; None without.

    Args:
        pages: those for sequences, numbered from 0.
        scratch: whether there is one for padding.
    """

    def __init__(
        self, layers: Sequence[LayerShape], pages: int, page_size: int, device: torch.device, *, scratch: bool = False
    ) -> None:
        self.page_size = page_size
        self.scratch_page = pages if scratch else None
        self.null_page = pages + scratch
        self.layers: list[torch.Tensor] = []
        # Not zeroed as a whole: untouched memory costs nothing on a CPU, and every page is cleared before it is read.
        # Neighbouring layers of one shape share a tensor: clearing a page then is one operation for all of them.
        self._blocks: list[torch.Tensor] = []  # each [layers * 2 * kv_heads, pages, page_size * width]
        for (heads, width, dtype), group in groupby(layers, lambda it: (2 * it.kv_heads, it.width, it.dtype)):
            count = len(list(group))
            block = torch.empty(count * heads, self.null_page + 1, page_size * width, dtype=dtype, device=device)
            self._blocks.append(block)
            self.layers.extend(block.view(count, heads, -1, width).unbind())
        self.clear([self.null_page])

    def write(self, layer: int, slots: torch.Tensor, key_value: torch.Tensor) -> None:
        """Stores keys and values [n, 2 * kv_heads, width] into slots [n]."""
        self.layers[layer].index_copy_(1, slots, key_value.transpose(0, 1))

    def read(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Keys and values of pages, [2 * kv_heads, pages * page_size, width].

        `rows` [2 * kv_heads * pages]: head * (null_page + 1) + page, in the order of the result.
        """
        heads, _, width = self.layers[layer].shape
        pages = self.layers[layer].view(-1, self.page_size * width)
        return pages.index_select(0, rows).view(heads, -1, width)

    def clear(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros in every layer."""
        index = torch.tensor(pages, device=self._blocks[0].device)
        for block in self._blocks:
            block.index_fill_(1, index, 0)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots in every layer, all read before the first is written."""
        device = self._blocks[0].device
        read, written = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for block in self._blocks:
            slots = block.view(len(block), -1, block.shape[2] // self.page_size)
            slots.index_copy_(1, written, slots.index_select(1, read))

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page in every layer."""
        for block in self._blocks:
            block[:, target] = block[:, source]
