"""Models built as Llama is, in few operations: what each layer does with its input is one product.

transformers' own layers take some forty small operations each, which cost a small model as much as its weights do. Here
query, key and value come from one matrix, so do gate and up projection, and nothing is copied between them.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from outrider.lm.attention import LayerCall, Paged, PagedPass
from outrider.lm.features import Hidden
from outrider.lm.heap import give_back
from outrider.lm.kernels import kernels
from outrider.lm.kv_storage import LayerShape
from outrider.lm.packed import KernelLinear, pack_linear, pack_linears
from outrider.lm.rotary import RotaryTable

if TYPE_CHECKING:
    from outrider.lm.kernels.compiled import Stack

# They differ in biases, in windows and in norms over the heads of queries and keys.
_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


_SILU = {nn.SiLU, SiLUActivation}


class RmsNorm:
    """RMS norm over the last dimension.

    Attributes:
        epsilon: added to the mean square.
    """

    def __init__(self, norm: Any) -> None:
        size = len(norm.weight)
        self._size, self._shape, self.epsilon = size, (2 * size,), norm.variance_epsilon
        self._scale = torch.cat((norm.weight, torch.zeros_like(norm.weight))).detach()

    def weight(self) -> torch.Tensor:
        """[size] float32."""
        return self._scale[: self._size].float()

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same shape."""
        # x and -x together have mean 0 and x's mean square as their variance: their layer norm is x's RMS norm, in one
        # kernel where torch's own takes eight.
        both = torch.cat((inputs, -inputs), -1)
        return torch.native_layer_norm(both, self._shape, self._scale, None, self.epsilon)[0][..., : self._size]


class FusedLayer:
    """One layer. Plain objects and bound methods: what torch does around a module's call adds up over the layers.

    Args:
        layer: transformers' own.
        shape: what it keeps.
        pack: whether its weights are packed for the CPU.
    """

    def __init__(self, layer: Any, shape: LayerShape, *, pack: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before_attention, self.before_mlp = RmsNorm(layer.input_layernorm), RmsNorm(layer.post_attention_layernorm)
        self.linears = [
            pack_linear(it) if pack else it
            for it in (
                _joined(attention.q_proj, attention.k_proj, attention.v_proj),
                attention.o_proj,
                _joined(mlp.gate_proj, mlp.up_proj),
                mlp.down_proj,
            )
        ]
        self.query_key_value, self.output, self.gate_up, self.down = (it.forward for it in self.linears)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn.forward
        self.gated_by = type(mlp.act_fn)
        self.head_norms = (
            (RmsNorm(attention.q_norm), RmsNorm(attention.k_norm)) if hasattr(attention, "q_norm") else None
        )
        self.kv_heads, self.dim = shape.kv_heads, shape.key_dim
        self.heads = attention.q_proj.out_features // shape.key_dim
        self.scaling, self.window = attention.scaling, shape.window

    def run(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Paged) -> torch.Tensor:
        """hidden [n, hidden size]; cos and sin [n, heads + 2 * kv_heads, dim], from `rotations`."""
        return self.run_on(hidden, self.before_attention(hidden), cos, sin, paged)

    def run_on(
        self, hidden: torch.Tensor, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Paged
    ) -> torch.Tensor:
        """The same with inputs [n, any size] to the attention that are not made of `hidden`."""
        hidden = hidden + self._attended(inputs, cos, sin, paged)
        gate, up = self.gate_up(self.before_mlp(hidden)).chunk(2, -1)
        changed: torch.Tensor = self.down(self.activation(gate) * up)
        return hidden + changed

    def _attended(self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Paged) -> torch.Tensor:
        count, heads, kv_heads, dim = len(inputs), self.heads, self.kv_heads, self.dim
        parts = self.query_key_value(inputs).view(count, heads + 2 * kv_heads, dim)
        if self.head_norms:
            query, key, value = parts.split((heads, kv_heads, kv_heads), 1)
            parts = torch.cat((self.head_norms[0](query), self.head_norms[1](key), value), 1)
        turned = torch.addcmul(parts * cos, parts.roll(dim // 2, -1), sin)
        call = LayerCall(turned[:, :heads], turned[:, heads:], dim, scaling=self.scaling, window=self.window)
        attended: torch.Tensor = self.output(paged.attend(call).reshape(count, heads * dim))
        return attended

    def rotations(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From [n, 1, dim] each to the factors of `run`: values, which come with the queries and keys, stay."""
        turning, still = (-1, self.heads + self.kv_heads, -1), (-1, self.kv_heads, -1)
        half = self.dim // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return (
            torch.cat((cos.expand(turning), torch.ones_like(cos).expand(still)), 1),
            torch.cat((signed.expand(turning), torch.zeros_like(sin).expand(still)), 1),
        )


class FusedDecoder:
    """A model's pass; a Run. `FusedDecoder.of` makes it.

    Attributes:
        layers, norm, head, embeddings: its parts.
    """

    def __init__(self, model: PreTrainedModel, shapes: Sequence[LayerShape], *, pack: bool) -> None:
        body: Any = model.base_model
        self.embeddings, self._rotary, self.norm = body.embed_tokens.forward, body.rotary_emb, RmsNorm(body.norm)
        self._table = RotaryTable.of(body.rotary_emb, body.embed_tokens.weight[:1])
        self.head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if pack:
            self.head = pack_linear(self.head)
            pack_linears(self.head)
        self.layers: list[FusedLayer] = []
        for index, shape in enumerate(shapes):
            self.layers.append(FusedLayer(body.layers[index], shape, pack=pack))
            body.layers[index] = nn.Identity()  # never two copies of more than one layer
            if pack:
                give_back()
        self._stack = _stack(self.layers)

    @staticmethod
    def of(model: PreTrainedModel, shapes: Sequence[LayerShape], *, pack: bool) -> "FusedDecoder | None":
        """Takes a model apart whose layers are known here; leaves others as they are and returns None.

        `shapes`: what each layer keeps. `pack`: whether linear weights are packed for the CPU.
        """
        layers = getattr(model.base_model, "layers", None)
        if layers is None or not all(type(layer) in _LAYERS for layer in layers):
            return None
        return FusedDecoder(model, shapes, pack=pack)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        paged: Paged,
        shown: Hidden | None = None,
    ) -> torch.Tensor:
        """As `run_model`."""
        hidden = self.embeddings(tokens)
        cos, sin = self.factors(hidden, positions)
        if shown is not None:
            shown.see(0, hidden)
        hidden = self._through(hidden, cos, sin, paged, shown)
        logits: torch.Tensor
        if shown is None:
            logits = self.head(self.norm(hidden[wanted]))
            return logits
        normed = self.norm(hidden)
        shown.see(shown.last, normed)
        logits = self.head(normed[wanted])
        return logits

    def factors(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [n, dim] of rotary embeddings at positions [n] int64, as `hidden` in type and device."""
        if self._table:
            return self._table(positions)
        cos, sin = self._rotary(hidden, positions[None])
        return cos[0], sin[0]

    def _through(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Paged, shown: Hidden | None
    ) -> torch.Tensor:
        """What the last layer says."""
        if self._stack and isinstance(paged, PagedPass) and paged.suits(0, self.layers[0].dim):
            return self._at_once(self._stack, hidden, cos, sin, paged, shown)
        cos, sin = self.layers[0].rotations(cos[:, None], sin[:, None])
        for index, layer in enumerate(self.layers, 1):
            hidden = layer.run(hidden, cos, sin, paged)
            if shown is not None and index < shown.last:
                shown.see(index, hidden)
        return hidden

    def _at_once(
        self,
        stack: "Stack",
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        paged: PagedPass,
        shown: Hidden | None,
    ) -> torch.Tensor:
        """Through all layers by one kernel, which stops where a state between them is wanted."""
        from outrider.lm.kernels.compiled import Given

        found = kernels()
        assert found is not None
        stack.bind(paged.storage.layers)
        attention = paged.attention(0, self.layers[0].heads, self.layers[0].scaling)
        wanted = {layer for layer in shown.layers if 0 < layer < shown.last} if shown is not None else set()
        stops = sorted({*wanted, len(self.layers)})
        states = found.through(stack, attention, Given(hidden, cos, sin, paged.batch.slots), stops)
        if shown is not None:
            for layer, state in zip(stops[:-1], states[:-1], strict=True):
                shown.see(layer, state)
        return states[-1]


def _stack(layers: Sequence[FusedLayer]) -> "Stack | None":
    """For kernels, where they have all that the layers do and all linear weights are for them."""
    linears = [[linear for linear in layer.linears if isinstance(linear, KernelLinear)] for layer in layers]
    if any(len(its) < len(layer.linears) for its, layer in zip(linears, layers, strict=True)):
        return None
    norms = [[it.before_attention, it.before_mlp, *(it.head_norms or ())] for it in layers]
    same = {(it.heads, it.kv_heads, it.dim, it.scaling) for it in layers}, {it.epsilon for its in norms for it in its}
    eights = not any(linear.in_features % 8 for its in linears for linear in its)
    if any(len(it) > 1 for it in same) or not eights or not {it.gated_by for it in layers} <= _SILU:
        return None
    from outrider.lm.kernels.compiled import Norms, Stack

    records = [[linear.record for linear in its] for its in linears]
    weights = [Norms(*(it.weight() for it in its)) for its in norms]
    return Stack(records, weights, [it.window for it in layers], norms[0][0].epsilon)


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One layer whose output is theirs, side by side."""
    weight = torch.cat([it.weight for it in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], linears[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([it.bias for it in linears]), requires_grad=False)
    return joined
