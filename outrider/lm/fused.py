"""Models built as Llama is, in few operations: what each layer does with its input is one product.

transformers' own layers take some forty small operations each, which cost a small model as much as its weights do. Here
query, key and value come from one matrix, so do gate and up projection, and nothing is copied between them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from outrider.lm.attention import LayerCall, Paged
from outrider.lm.kv_storage import LayerShape
from outrider.lm.packed import pack_linears

# They differ in biases, in windows and in norms over the heads of queries and keys.
_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


class _Norm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self._shape, self._epsilon = norm.weight, norm.weight.shape, norm.variance_epsilon

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return rms_norm(inputs, self._shape, self.weight, self._epsilon)


class _Layer(nn.Module):
    def __init__(self, layer: Any, shape: LayerShape) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.query_key_value = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = attention.o_proj
        self.gate_up, self.down = _joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        self.activation = mlp.act_fn
        normed = hasattr(attention, "q_norm")
        self.query_norm = _Norm(attention.q_norm) if normed else None
        self.key_norm = _Norm(attention.k_norm) if normed else None
        self._kv_heads, self._dim = shape.kv_heads, shape.key_dim
        self._heads = attention.q_proj.out_features // shape.key_dim
        self._scaling, self._window = attention.scaling, shape.window

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Paged) -> torch.Tensor:
        """hidden [n, hidden size]; cos and sin [n, 1, key_dim], the first half of sin negative."""
        hidden = hidden + self._attended(self.before_attention(hidden), cos, sin, paged)
        gate, up = self.gate_up(self.before_mlp(hidden)).chunk(2, -1)
        return hidden + self.down(self.activation(gate) * up)

    def _attended(self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Paged) -> torch.Tensor:
        count, heads = len(inputs), self._heads
        parts = self.query_key_value(inputs).view(count, heads + 2 * self._kv_heads, self._dim)
        turning, value = parts[:, : heads + self._kv_heads], parts[:, heads + self._kv_heads :]
        if self.query_norm and self.key_norm:
            turning = torch.cat((self.query_norm(turning[:, :heads]), self.key_norm(turning[:, heads:])), 1)
        half = self._dim // 2
        swapped = torch.cat((turning[..., half:], turning[..., :half]), -1)
        turned = torch.addcmul(turning * cos, swapped, sin)
        call = LayerCall(turned[:, :heads], turned[:, heads:], value, scaling=self._scaling, window=self._window)
        attended: torch.Tensor = self.output(paged.attend(call).reshape(count, -1))
        return attended


class FusedDecoder(nn.Module):
    """A model's pass; a Run. `FusedDecoder.of` makes it."""

    def __init__(self, model: PreTrainedModel, shapes: Sequence[LayerShape], *, pack: bool) -> None:
        super().__init__()
        body: Any = model.base_model
        self.embeddings, self.rotary, self.norm = body.embed_tokens, body.rotary_emb, _Norm(body.norm)
        self.head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList()
        for index, shape in enumerate(shapes):
            layer = _Layer(body.layers[index], shape)
            body.layers[index] = nn.Identity()  # never two copies of more than one layer
            if pack:
                pack_linears(layer)
            self.layers.append(layer)
        if pack:
            pack_linears(self)

    @staticmethod
    def of(model: PreTrainedModel, shapes: Sequence[LayerShape], *, pack: bool) -> "FusedDecoder | None":
        """Takes a model apart whose layers are known here; leaves others as they are and returns None.

        `shapes`: what each layer keeps. `pack`: whether linear weights are packed for the CPU.
        """
        layers = getattr(model.base_model, "layers", None)
        if layers is None or not all(type(layer) in _LAYERS for layer in layers):
            return None
        return FusedDecoder(model, shapes, pack=pack)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, paged: Paged
    ) -> torch.Tensor:
        """As `run_model`."""
        hidden = self.embeddings(tokens)
        cos, sin = (it[0][:, None] for it in self.rotary(hidden, positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, paged)
        logits: torch.Tensor = self.head(self.norm(hidden[wanted]))
        return logits


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One layer whose output is theirs, side by side."""
    weight = torch.cat([it.weight for it in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], linears[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([it.bias for it in linears]), requires_grad=False)
    return joined
