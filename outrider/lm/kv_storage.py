"""The tensors behind the pages of outrider/lm/kv.py."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Keys and values of every layer, slot-major: slot = page * page_size + offset.

    Attributes:
        keys: per layer [slots, kv_heads, key_dim].
        values: per layer [slots, kv_heads, value_dim].
        null_slot: a slot that is always zero. Padding reads it: a slot of a page may hold the NaN of another session,
            and 0 * NaN would leak through a mask.
    """

    def __init__(self, layers: Sequence[LayerShape], pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.null_slot = pages * page_size
        slots = self.null_slot + 1
        # Not zeroed as a whole: untouched memory costs nothing on a CPU, and no other slot is read before written.
        self.keys = [torch.empty(slots, it.kv_heads, it.key_dim, dtype=it.dtype, device=device) for it in layers]
        self.values = [torch.empty(slots, it.kv_heads, it.value_dim, dtype=it.dtype, device=device) for it in layers]
        for tensor in (*self.keys, *self.values):
            tensor[self.null_slot].zero_()

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value, each [heads, n, dim], into slots [n]."""
        self.keys[layer].index_copy_(0, slots, key.transpose(0, 1))
        self.values[layer].index_copy_(0, slots, value.transpose(0, 1))

    def read(self, layer: int, slots: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots [sequences * n], each as a view [sequences, heads, n, dim]."""
        keys = self.keys[layer].index_select(0, slots)
        values = self.values[layer].index_select(0, slots)
        return (
            keys.view(sequences, -1, *keys.shape[1:]).transpose(1, 2),
            values.view(sequences, -1, *values.shape[1:]).transpose(1, 2),
        )

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page in every layer."""
        size = self.page_size
        for tensor in (*self.keys, *self.values):
            tensor[target * size : (target + 1) * size] = tensor[source * size : (source + 1) * size]
