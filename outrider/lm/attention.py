"""The attention function that transformers calls in every layer: it reads and writes paged KV.

Registered under the name ATTENTION; model code is not touched. The pass that a call belongs to is found in a context
variable: a keyword argument of the model's forward would do for most architectures, but some drop it on the way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from outrider.lm.engine import ModelRefused
from outrider.lm.kernels import kernels
from outrider.lm.kv_storage import KvStorage, LayerShape
from outrider.lm.packed import has_packed
from outrider.lm.ragged import MAX_GROUPED_ROWS, RaggedBatch, View

if TYPE_CHECKING:
    from outrider.lm.kernels.compiled import Attention

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
        key_value: [n, 2 * kv_heads, width]: the heads of the keys, then those of the values, the narrower ones padded.
        value_dim: width of a value.
        scaling: factor of the scores; None means 1 / sqrt(key_dim).
        window: how many positions a row looks back, its own included; None means all.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [heads] logits of a key without a value.
    """

    __slots__ = ("key_value", "query", "scaling", "sinks", "softcap", "value_dim", "window")

    def __init__(
        self,
        query: torch.Tensor,
        key_value: torch.Tensor,
        value_dim: int,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.query, self.key_value, self.value_dim = query, key_value, value_dim
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
        if call.query.dtype != call.key_value.dtype:
            raise ModelRefused("its attention mixes numeric types")
        count, heads, key_dim = call.query.shape
        kv_heads = call.key_value.shape[1] // 2
        self.layers.append(LayerShape(kv_heads, key_dim, call.value_dim, call.query.dtype, call.window, heads))
        return call.query.new_zeros(count, heads, call.value_dim)


class PagedPass:
    """A pass over a ragged batch. Layers are told apart by the order in which they call.

    Attributes:
        storage, batch: what it is over.
    """

    def __init__(self, storage: KvStorage, batch: RaggedBatch) -> None:
        self.storage, self.batch = storage, batch
        self._layer = 0
        self._attentions: dict[tuple[int, int, float], Attention] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Writes the new keys and values, then attends over the cached ones, sequence by sequence or in groups."""
        layer, self._layer = self._layer, self._layer + 1
        self.storage.write(layer, self.batch.slots, call.key_value)
        query = call.query
        attention = self._kernel_attention(layer, call)
        if attention:
            found = kernels()
            assert found is not None
            return found.attend(attention, self.storage.layers[layer], call.window, query)
        count, heads, _ = query.shape
        views = self.batch.views(call.window, heads, call.key_value.shape[1] // 2, query.dtype)
        if views[0].rows is None:
            return self._attend_view(layer, call, query, views[0])
        output = query.new_empty(count, heads, call.value_dim)
        for view in views:
            assert view.rows is not None
            output.index_copy_(0, view.rows, self._attend_view(layer, call, query.index_select(0, view.rows), view))
        return output

    def _kernel_attention(self, layer: int, call: LayerCall) -> "Attention | None":
        """What a kernel needs that reads pages where they lie; None where torch's operations are to do it."""
        _, heads, dim = call.query.shape
        if call.softcap is not None or call.sinks is not None or dim != call.value_dim or not self.suits(layer, dim):
            return None
        return self.attention(layer, heads, dim**-0.5 if call.scaling is None else call.scaling)

    def suits(self, layer: int, dim: int) -> bool:
        """Whether a kernel is there for a layer with heads of `dim` and quicker than torch for these sequences."""
        keys = self.storage.layers[layer]
        if keys.device.type != "cpu" or keys.dtype not in _PRODUCTS or dim % 8 or keys.shape[2] != dim or not kernels():
            return False
        if not self.batch.straight:
            return False  # rows of a tree do not see all that lies before them
        # Torch is quick at many rows, where it has products of the type at all.
        slow = keys.dtype == torch.bfloat16 and not has_packed(keys.dtype)
        return slow or all(piece.rows <= MAX_GROUPED_ROWS for piece in self.batch.pieces)

    def attention(self, layer: int, heads: int, scale: float) -> "Attention":
        """For kernels over layers shaped as this one; made once a pass."""
        from outrider.lm.kernels.compiled import Attention

        keys = self.storage.layers[layer]
        key = len(keys), heads, scale
        if key not in self._attentions:
            self._attentions[key] = Attention(self.batch, keys, self.storage.page_size, heads, scale)
        return self._attentions[key]

    def _attend_view(self, layer: int, call: LayerCall, query: torch.Tensor, view: View) -> torch.Tensor:
        """[sequences * n, heads, key_dim] to [sequences * n, heads, value_dim].

        Query heads that share a key head are folded into the rows: no key is repeated, with any mask and kernel.
        """
        (count, heads, key_dim), kv_heads, sequences = query.shape, call.key_value.shape[1] // 2, view.sequences
        each, group = count // sequences, heads // kv_heads
        width = call.key_value.shape[2]
        keys, values = self.storage.read(layer, view.pages).view(2, kv_heads * sequences, -1, width).unbind()
        if key_dim != call.value_dim:  # the narrower ones are padded
            keys, values = keys[..., :key_dim], values[..., : call.value_dim]
        folded = query.view(sequences, each, kv_heads, group, key_dim).permute(2, 0, 3, 1, 4)
        folded = folded.reshape(kv_heads * sequences, group * each, key_dim)
        output = _attend(folded, keys, values, view, call)
        unfolded = output.view(kv_heads, sequences, group, each, call.value_dim).permute(1, 3, 0, 2, 4)
        return unfolded.reshape(count, heads, call.value_dim)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: View, call: LayerCall) -> torch.Tensor:
    """[b, rows, key_dim] over [b, keys, key_dim] and [b, keys, value_dim] to [b, rows, value_dim].

    b counts the sequences of the first head, then those of the second, and so on.
    """
    by_hand = call.softcap is not None or call.sinks is not None
    if by_hand or (query.shape[1] <= MAX_PRODUCT_ROWS and query.device.type == "cpu" and query.dtype in _PRODUCTS):
        return _attend_by_hand(query, keys, values, view, call)
    # [kv_heads, sequences, rows, dim]
    query, keys, values = (it.view(-1, view.sequences, *it.shape[1:]) for it in (query, keys, values))
    output: torch.Tensor = scaled_dot_product_attention(query, keys, values, attn_mask=view.mask, scale=call.scaling)
    return output.flatten(0, 1)


def _attend_by_hand(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: View, call: LayerCall
) -> torch.Tensor:
    """As the models' own eager code: products in the model's type, softmax in float32 inside."""
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = torch.bmm(query, keys.transpose(1, 2))
    if call.softcap is not None:
        scores, scaling = torch.tanh(scores * scaling / call.softcap), call.softcap
    if view.mask is None:
        scores = scores * scaling
    else:
        by_sequence = scores.view(-1, view.sequences, *scores.shape[1:])  # [kv_heads, sequences, rows, keys]
        scores = torch.add(view.mask, by_sequence, alpha=scaling).flatten(0, 1)
    if call.sinks is None:
        return torch.bmm(scores.softmax(-1), values)
    kv_heads, (count, rows, _) = call.key_value.shape[1] // 2, scores.shape
    group = call.sinks.numel() // kv_heads
    sinks = call.sinks.view(kv_heads, 1, group, 1).expand(-1, view.sequences, -1, rows // group).reshape(count, rows, 1)
    weights = torch.cat([scores, sinks.to(scores.dtype)], -1).softmax(-1)
    return torch.bmm(weights[..., :-1], values)


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
    call = LayerCall(
        query[0].transpose(0, 1),
        _side_by_side(key[0], value[0]),
        value.shape[-1],
        scaling=scaling,
        window=sliding_window or None,
        softcap=softcap,
        sinks=s_aux,
    )
    return _current.get().attend(call)[None], None


def _side_by_side(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[kv_heads, n, dim] each, as LayerCall.key_value."""
    if key.dtype != value.dtype:
        raise ModelRefused("its attention mixes numeric types")
    width = max(key.shape[-1], value.shape[-1])
    return torch.cat([pad(it, (0, width - it.shape[-1])) for it in (key, value)]).transpose(0, 1)


AttentionInterface.register(ATTENTION, _attention)
