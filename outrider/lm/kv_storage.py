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
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None

    @property
    def token_bytes(self) -> int:
        """Bytes per token."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KvStorage:
    """Keys and values of every layer, head by head: slot = page * page_size + offset.

    A page of a head is one piece of memory, so that whole pages are gathered into batches that matrix kernels take as
    they are.

    Attributes:
        keys: per layer [kv_heads, slots, key_dim].
        values: per layer [kv_heads, slots, value_dim].
        null_page: a page that is always zero. Padding reads it: a page may hold the NaN of another session, and
            0 * NaN would leak through a mask. For the same reason pages are cleared before a sequence gets them.
    """

    def __init__(self, layers: Sequence[LayerShape], pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.null_page = pages
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        # Not zeroed as a whole: untouched memory costs nothing on a CPU, and every page is cleared before it is read.
        # Neighbouring layers of one shape share a tensor: clearing a page then is one operation for all of them.
        self._blocks: list[torch.Tensor] = []  # each [layers * kv_heads, pages, page_size * dim]
        for shape, group in groupby(layers, lambda it: (it.kv_heads, it.key_dim, it.value_dim, it.dtype)):
            heads, key_dim, value_dim, dtype = shape
            count = len(list(group))
            for views, dim in ((self.keys, key_dim), (self.values, value_dim)):
                block = torch.empty(count * heads, pages + 1, page_size * dim, dtype=dtype, device=device)
                views.extend(block.view(count, heads, -1, dim).unbind())
                self._blocks.append(block)
        self.clear([self.null_page])

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value, each [n, heads, dim], into slots [n]."""
        self.keys[layer].index_copy_(1, slots, key.transpose(0, 1))
        self.values[layer].index_copy_(1, slots, value.transpose(0, 1))

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pages, [heads, n, dim] each.

        `rows` [heads * pages]: head * (null_page + 1) + page, in the order of the result.
        """
        return _gathered(self.keys[layer], rows, self.page_size), _gathered(self.values[layer], rows, self.page_size)

    def clear(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros in every layer."""
        index = torch.tensor(pages, device=self._blocks[0].device)
        for block in self._blocks:
            block.index_fill_(1, index, 0)

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page in every layer."""
        for block in self._blocks:
            block[:, target] = block[:, source]


def _gathered(slots: torch.Tensor, rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """[heads, slots, dim] and page rows [heads * pages] to [heads, pages * page_size, dim]."""
    heads, _, dim = slots.shape
    return slots.view(-1, page_size * dim).index_select(0, rows).view(heads, -1, dim)
