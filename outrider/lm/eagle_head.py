"""The head of an EAGLE drafter: from tokens and the states before them to the states after them, and to logits.

Li et al. 2024, "EAGLE", section 4.1: the layer, without a norm before it, gets fc(embedding, state) and predicts the
state that the target's head takes. Li et al. 2025, "EAGLE-3", section 3.1: fc makes one state of several of the
target's; attention gets the normed embedding beside the normed state, and the residual stream is the state.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from outrider.lm.attention import Paged
from outrider.lm.eagle_weights import EagleWeights, layer_name
from outrider.lm.fused import FusedLayer, RmsNorm
from outrider.lm.kv_storage import LayerShape
from outrider.lm.packed import pack_linear
from outrider.lm.reduced_head import ReducedHead


class EagleHead:
    """The head of a target.

    Attributes:
        shape: what its layer keeps.

    Args:
        embeddings: [target rows, hidden size] of the target, for a head without its own.
        head: the target's, for a head without its own; whose device and numeric type it has.
        pack: whether linear weights are packed for the CPU.
    """

    def __init__(self, weights: EagleWeights, embeddings: torch.Tensor, head: nn.Linear, *, pack: bool = False) -> None:
        config, self._like = weights.config, head.weight.new_empty(0)
        llama, kept = config.llama, weights.kept
        tensors = {name: tensor.to(self._like) for name, tensor in weights.tensors.items()}
        self._third, self._normed = config.kind == 3, config.norm_before_residual
        self.shape = _shape(llama, self._like.dtype)
        self._embeddings = tensors.get("embed_tokens.weight", embeddings)
        self._rotary = LlamaRotaryEmbedding(llama).to(self._like.device)
        self._project = _linear(tensors, "fc", pack=pack)
        self._layer = FusedLayer(_layer(weights, tensors), self.shape, pack=pack)
        if self._third:
            names = (f"{layer_name(3)}.hidden_norm.weight", "norm.weight")
            self._before_states, self._before_head = (_norm(tensors[it], llama.rms_norm_eps) for it in names)
        if "lm_head.weight" in tensors:
            self._head: Any = _linear(tensors, "lm_head", pack=pack)
        else:
            self._head = pack_linear(head) if pack else head
        if kept is not None:
            self._head = ReducedHead(self._head, kept.to(self._like.device), llama.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._like.device

    @property
    def rows(self) -> int:
        """Columns of its logits."""
        made: int = self._head.vocab_size if isinstance(self._head, ReducedHead) else self._head.out_features
        return made

    def taken(self, features: torch.Tensor) -> torch.Tensor:
        """[n, layers * target's hidden size] of the target's features to states [n, hidden size]."""
        features = features.to(self._like)
        return self._project(features) if self._third else features

    def outputs(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, paged: Paged
    ) -> torch.Tensor:
        """The states after tokens [n], given those before them [n, hidden size], at positions [n]:
        [n, hidden size]."""
        words = embedding(tokens, self._embeddings)
        cos, sin = (it[0, :, None] for it in self._rotary(words, positions[None]))
        turns = self._layer.rotations(cos, sin)
        if not self._third:
            states = self._project(torch.cat((words, states), -1))
            return self._layer.run_on(states, states, *turns, paged)
        normed = self._before_states(states)
        inputs = torch.cat((self._layer.before_attention(words), normed), -1)
        return self._layer.run_on(normed if self._normed else states, inputs, *turns, paged)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[n, hidden size] to [n, rows]."""
        logits: torch.Tensor = self._head(self._before_head(outputs) if self._third else outputs)
        return logits


def _layer(weights: EagleWeights, tensors: dict[str, torch.Tensor]) -> LlamaDecoderLayer:
    """transformers' own, with attention that takes what this kind gives it."""
    config, prefix = weights.config, f"{layer_name(weights.config.kind)}."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    own.pop("hidden_norm.weight", None)
    own.setdefault("input_layernorm.weight", torch.ones_like(own["post_attention_layernorm.weight"]))
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config.llama, 0)
        if config.kind == 3:
            for name in ("q_proj", "k_proj", "v_proj"):
                linear = getattr(layer.self_attn, name)
                seen = 2 * config.llama.hidden_size
                setattr(layer.self_attn, name, nn.Linear(seen, linear.out_features, linear.bias is not None))
    layer.load_state_dict(own, assign=True)
    return layer.requires_grad_(False)


def _shape(llama: LlamaConfig, dtype: torch.dtype) -> LayerShape:
    assert llama.num_key_value_heads is not None
    assert llama.head_dim is not None
    return LayerShape(llama.num_key_value_heads, llama.head_dim, llama.head_dim, dtype, None)


def _linear(tensors: dict[str, torch.Tensor], name: str, *, pack: bool) -> Any:
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}), assign=True)
    made.requires_grad_(False)
    return pack_linear(made) if pack else made


def _norm(weight: torch.Tensor, epsilon: float) -> RmsNorm:
    made = LlamaRMSNorm(len(weight), epsilon)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return RmsNorm(made)
