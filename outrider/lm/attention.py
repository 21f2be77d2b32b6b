"""The attention function that transformers calls in every layer: it reads and writes paged KV.

Registered under the name ATTENTION; model code is not touched. The pass that a call belongs to is found in a context
variable: a keyword argument of the model's forward would do for most architectures, but some drop it on the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.lm.engine import ModelRefused
from outrider.lm.kv_storage import KvStorage, LayerShape
from outrider.lm.ragged import RaggedBatch, View

ATTENTION = "outrider_paged"

# What layers pass along and attention does not depend on.
_IGNORED = {"position_ids", "cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states"}
_IGNORED |= {"output_router_logits"}

# Few rows are quicker as two batched products than in the fused kernel of a CPU: less than half of the time at 16
# sequences with one row each. Half precision rounds the scores, as the models' own eager code does.
MAX_PRODUCT_ROWS = 256
_PRODUCTS = {torch.float32, torch.bfloat16}


class LayerCall:
    """What one layer asks for.

    Attributes:
        query: [n, heads, key_dim].
        key: [n, kv_heads, key_dim].
        value: [n, kv_heads, value_dim].
        scaling: factor of the scores; None means 1 / sqrt(key_dim).
        window: how many positions a row looks back, its own included; None means all.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [heads] logits of a key without a value.
    """

    __slots__ = ("key", "query", "scaling", "sinks", "softcap", "value", "window")

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.scaling, self.window, self.softcap, self.sinks = scaling, window, softcap, sinks


class Paged(Protocol):
    """One forward pass as its layers see it."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """The next layer's output, [n, heads, value_dim]."""


_current: ContextVar[Paged] = ContextVar("outrider_paged_pass")


@contextmanager
def serving(paged: Paged) -> Iterator[None]:
    """Answers the attention calls made inside with `paged`."""
    token = _current.set(paged)
    try:
        yield
    finally:
        _current.reset(token)


class Recording:
    """A pass without a cache that notes what every layer keeps.

    Attributes:
        layers: one entry per attention call, in order.
    """

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Notes the layer; the output is zero."""
        _, kv_heads, key_dim = call.key.shape
        value_dim = call.value.shape[-1]
        if not call.query.dtype == call.key.dtype == call.value.dtype:
            raise ModelRefused("its attention mixes numeric types")
        self.layers.append(LayerShape(kv_heads, key_dim, value_dim, call.key.dtype, call.window))
        return call.query.new_zeros(*call.query.shape[:2], value_dim)


class PagedPass:
    """A pass over a ragged batch. Layers are told apart by the order in which they call."""

    def __init__(self, storage: KvStorage, batch: RaggedBatch) -> None:
        self._storage, self._batch = storage, batch
        self._layer = 0

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Writes the new keys and values, then attends over the cached ones, sequence by sequence or in groups."""
        layer, self._layer = self._layer, self._layer + 1
        self._storage.write(layer, self._batch.slots, call.key, call.value)
        query = call.query
        count, heads, _ = query.shape
        views = self._batch.views(call.window, heads, call.key.shape[1], query.dtype)
        if views[0].rows is None:
            return self._attend_view(layer, call, query, views[0])
        output = query.new_empty(count, heads, call.value.shape[-1])
        for view in views:
            assert view.rows is not None
            output.index_copy_(0, view.rows, self._attend_view(layer, call, query.index_select(0, view.rows), view))
        return output

    def _attend_view(self, layer: int, call: LayerCall, query: torch.Tensor, view: View) -> torch.Tensor:
        """[sequences * n, heads, key_dim] to [sequences * n, heads, value_dim].

        Query heads that share a key head are folded into the rows: no key is repeated, with any mask and kernel.
        """
        (rows, heads, _), kv_heads, sequences = query.shape, call.key.shape[1], view.sequences
        each, group = rows // sequences, heads // kv_heads
        keys, values = (it.view(kv_heads * sequences, -1, it.shape[-1]) for it in self._storage.read(layer, view.pages))
        folded = query.view(sequences, each, kv_heads, group, -1).permute(2, 0, 3, 1, 4)
        folded = folded.reshape(kv_heads * sequences, group * each, -1)
        output = _attend(folded, keys, values, view.mask, call)
        unfolded = output.view(kv_heads, sequences, group, each, -1).permute(1, 3, 0, 2, 4)
        return unfolded.reshape(rows, heads, -1)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, call: LayerCall
) -> torch.Tensor:
    """[b, rows, key_dim] over [b, keys, key_dim] and [b, keys, value_dim] to [b, rows, value_dim]."""
    if call.softcap is not None or call.sinks is not None:
        return _attend_by_hand(query, keys, values, mask, call)
    if query.shape[1] <= MAX_PRODUCT_ROWS and query.device.type == "cpu" and query.dtype in _PRODUCTS:
        scale = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
        scores = (
            torch.bmm(query, keys.transpose(1, 2)).mul_(scale)
            if mask is None
            else torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale)
        )
        return torch.bmm(scores.softmax(-1), values)
    # One sequence, or one mask a sequence's head: the same batch for the kernel.
    output: torch.Tensor = scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=None if mask is None else mask[None], scale=call.scaling
    )
    return output[0]


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, call: LayerCall
) -> torch.Tensor:
    """Attention with softcap or sinks, as the models' own eager code: the softmax alone is float32."""
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = query @ keys.transpose(1, 2) * scaling  # [kv_heads * sequences, group * rows, keys]
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores + mask
    if call.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values
    kv_heads, (count, rows, _) = call.key.shape[1], scores.shape
    group = call.sinks.numel() // kv_heads
    sinks = call.sinks.view(kv_heads, 1, group, 1).expand(-1, count // kv_heads, -1, rows // group)
    sinks = sinks.reshape(count, rows, 1)
    weights = torch.cat([scores, sinks.to(scores.dtype)], -1).softmax(-1, dtype=torch.float32)
    return weights[..., :-1].to(query.dtype) @ values


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Anything that it does not know is refused, never ignored."""
    if attention_mask is not None:
        raise ModelRefused("it makes an attention mask of its own")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ModelRefused("it has attention that is not causal")
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _IGNORED)
    if unknown:
        raise ModelRefused(f"its attention depends on {', '.join(unknown)}, which is not supported")
    if query.shape[0] != 1:
        raise ModelRefused("its attention adds sequences to the batch")
    query, key, value = (it[0].transpose(0, 1) for it in (query, key, value))
    call = LayerCall(query, key, value, scaling=scaling, window=sliding_window or None, softcap=softcap, sinks=s_aux)
    return _current.get().attend(call)[None], None


AttentionInterface.register(ATTENTION, _attention)
