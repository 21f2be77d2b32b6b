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


class LayerCall:
    """What one layer asks for.

    Attributes:
        query: [1, heads, n, key_dim].
        key: [1, kv_heads, n, key_dim].
        value: [1, kv_heads, n, value_dim].
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
        """The next layer's output, [1, n, heads, value_dim]."""


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
        _, kv_heads, _, key_dim = call.key.shape
        value_dim = call.value.shape[-1]
        if not call.query.dtype == call.key.dtype == call.value.dtype:
            raise ModelRefused("its attention mixes numeric types")
        self.layers.append(LayerShape(kv_heads, key_dim, value_dim, call.key.dtype, call.window))
        _, heads, count, _ = call.query.shape
        return call.query.new_zeros(1, count, heads, value_dim)


class PagedPass:
    """A pass over a ragged batch. Layers are told apart by the order in which they call."""

    def __init__(self, storage: KvStorage, batch: RaggedBatch) -> None:
        self._storage, self._batch = storage, batch
        self._layer = 0

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Writes the new keys and values, then attends over the cached ones, sequence by sequence or in groups."""
        layer, self._layer = self._layer, self._layer + 1
        self._storage.write(layer, self._batch.slots, call.key[0], call.value[0])
        query, kv_heads = call.query[0], call.key.shape[1]  # [heads, n, key_dim]
        heads, count, _ = query.shape
        views = self._batch.views(call.window, heads // kv_heads, query.dtype)
        if views[0].rows is None:
            return self._attend_view(layer, call, query, views[0])[None]
        output = query.new_empty(count, heads, call.value.shape[-1])
        for view in views:
            assert view.rows is not None
            output.index_copy_(0, view.rows, self._attend_view(layer, call, query.index_select(1, view.rows), view))
        return output[None]

    def _attend_view(self, layer: int, call: LayerCall, query: torch.Tensor, view: View) -> torch.Tensor:
        """[heads, sequences * n, key_dim] to [sequences * n, heads, value_dim].

        Query heads that share a key head are folded into the rows: no key is repeated, with any mask and kernel.
        """
        heads, rows, key_dim = query.shape
        keys, values = self._storage.read(layer, view.keys, view.sequences)
        kv_heads, each = keys.shape[1], rows // view.sequences
        shape = (kv_heads, heads // kv_heads, view.sequences, each, key_dim)
        folded = query.reshape(shape).permute(2, 0, 1, 3, 4).reshape(view.sequences, kv_heads, -1, key_dim)
        if call.softcap is None and call.sinks is None:
            output: torch.Tensor = scaled_dot_product_attention(
                folded, keys, values, attn_mask=view.mask, scale=call.scaling
            )
        else:
            output = _attend_by_hand(folded, keys, values, view.mask, call)
        unfolded = output.reshape(view.sequences, heads, each, -1).transpose(1, 2)
        return unfolded.reshape(rows, heads, -1)


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, call: LayerCall
) -> torch.Tensor:
    """Attention with softcap or sinks, as the models' own eager code: the softmax alone is float32."""
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = query @ keys.transpose(-1, -2) * scaling  # [sequences, kv_heads, rows, keys]
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores + mask
    if call.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values
    each = query.shape[2] * query.shape[1] // call.sinks.numel()
    sinks = call.sinks.view(1, query.shape[1], -1, 1).expand(query.shape[0], -1, -1, each).flatten(2).unsqueeze(-1)
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
    call = LayerCall(query, key, value, scaling=scaling, window=sliding_window or None, softcap=softcap, sinks=s_aux)
    return _current.get().attend(call), None


AttentionInterface.register(ATTENTION, _attention)
