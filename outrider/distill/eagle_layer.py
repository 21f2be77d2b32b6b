"""An EAGLE head as a module: what it says of all positions of texts at once, at each place of a block.

At the first place entry i is (the target's state at token i, the embedding of token i + 1) and says what follows that
token; it looks at the entries up to itself. Further on in a block the target's states end: at place k entry i takes
what the head itself made at place k - 1 of entry i - 1, and looks at the target's entries up to i - k + 1 and at one of
its own for each place from the second to this one. So all blocks of all texts are drafted in as many passes as a block
has places (Li et al. 2025, section 3.2 and figure 6, "training-time test").
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from outrider.lm.eagle_config import EagleConfig

_Rotations = tuple[torch.Tensor, torch.Tensor]
_KeysValues = tuple[torch.Tensor, torch.Tensor]


class EagleModule(nn.Module):
    """Weights by the names of `outrider.lm.eagle_weights`, float32.

    Args:
        rows: of the head of its own, which kind 3 has.
    """

    def __init__(self, config: EagleConfig, rows: int = 0) -> None:
        super().__init__()
        llama, self._third = config.llama, config.kind == 3
        size: int = llama.hidden_size
        inputs = config.fed * config.target_size if self._third else 2 * size
        self.fc = nn.Linear(inputs, size, bias=False)
        if self._third:
            self.midlayer = EagleLayer(llama, third=True)
            self.norm = LlamaRMSNorm(size, llama.rms_norm_eps)
            self.lm_head = nn.Linear(size, rows, bias=False)
        else:
            self.layers = nn.ModuleList([EagleLayer(llama, third=False)])
        self._rotary = LlamaRotaryEmbedding(llama)

    @property
    def layer(self) -> "EagleLayer":
        """Its one layer."""
        layer = self.midlayer if self._third else self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def forward(self, states: torch.Tensor, embeddings: torch.Tensor, places: int) -> list[torch.Tensor]:
        """states [texts, n, fed * target size] and embeddings [texts, n, size] of the entries; returns of each place
        what it makes of the state at the next token, [texts, n, size]. At place k entries before k mean nothing."""
        at = torch.arange(embeddings.shape[1], device=embeddings.device)
        rotations: _Rotations = self._rotary(embeddings, at[None])
        past: list[_KeysValues] = []
        made: list[torch.Tensor] = []
        for _ in range(places):
            known = moved(made[-1], 1) if made else states
            if self._third:
                entries = known if made else self.fc(known)
            else:
                entries = self.fc(torch.cat([embeddings, known], -1))
            made.append(self.layer(entries, embeddings, rotations, past))
        return made

    def before_head(self, made: torch.Tensor) -> torch.Tensor:
        """What the head takes."""
        normed: torch.Tensor = self.norm(made) if self._third else made
        return normed


class EagleLayer(nn.Module):
    """A decoder layer of Llama; the first kind has no norm before its attention, the third one for each input."""

    def __init__(self, llama: LlamaConfig, *, third: bool) -> None:
        super().__init__()
        size: int = llama.hidden_size
        self._third = third
        self.self_attn = EagleAttention(llama, 2 * size if third else size)
        self.mlp = LlamaMLP(llama)  # type: ignore[no-untyped-call]
        self.post_attention_layernorm = LlamaRMSNorm(size, llama.rms_norm_eps)
        if third:
            self.input_layernorm = LlamaRMSNorm(size, llama.rms_norm_eps)
            self.hidden_norm = LlamaRMSNorm(size, llama.rms_norm_eps)

    def forward(
        self, entries: torch.Tensor, embeddings: torch.Tensor, rotations: _Rotations, past: list[_KeysValues]
    ) -> torch.Tensor:
        """[texts, n, size]; `past` holds keys and values of the places before, and then of this one."""
        seen = entries
        if self._third:
            seen = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(entries)], -1)
        entries = entries + self.self_attn(seen, rotations, past)
        made: torch.Tensor = entries + self.mlp(self.post_attention_layernorm(entries))
        return made


class EagleAttention(nn.Module):
    """Attention from `inputs` elements an entry."""

    def __init__(self, llama: LlamaConfig, inputs: int) -> None:
        super().__init__()
        size, heads = llama.hidden_size, llama.num_attention_heads
        self._dim: int = llama.head_dim or size // heads
        pairs = llama.num_key_value_heads or heads
        self._group, bias = heads // pairs, llama.attention_bias
        self.q_proj = nn.Linear(inputs, heads * self._dim, bias=bias)
        self.k_proj = nn.Linear(inputs, pairs * self._dim, bias=bias)
        self.v_proj = nn.Linear(inputs, pairs * self._dim, bias=bias)
        self.o_proj = nn.Linear(heads * self._dim, size, bias=bias)

    def forward(self, seen: torch.Tensor, rotations: _Rotations, past: list[_KeysValues]) -> torch.Tensor:
        """[texts, n, size]"""
        query, key, value = (
            part(seen).unflatten(-1, (-1, self._dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotations)
        past.append((key.repeat_interleave(self._group, 1), value.repeat_interleave(self._group, 1)))
        if len(past) == 1:
            output = scaled_dot_product_attention(query, *past[0], is_causal=True)
        else:
            output = attend_own(query, past)
        made: torch.Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return made


def attend_own(query: torch.Tensor, past: Sequence[_KeysValues]) -> torch.Tensor:
    """query [texts, heads, n, dim] of place k = len(past) over the keys and values of all places: of the target's the
    entries up to i - k + 1, of each later place one."""
    places, count = len(past), query.shape[2]
    query = query * query.shape[-1] ** -0.5
    keys, values = past[0]
    seen = torch.ones(count, count, dtype=torch.bool, device=query.device).tril(1 - places)
    scores = [(query @ keys.transpose(2, 3)).masked_fill(~seen, -torch.inf)]
    own = [(moved(key, places - place), moved(value, places - place)) for place, (key, value) in enumerate(past[1:], 2)]
    scores += [(query * key).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat(scores, -1).softmax(-1)
    output = weights[..., :count] @ values
    for index, (_, value) in enumerate(own):
        output = output + weights[..., count + index, None] * value
    return output


def moved(entries: torch.Tensor, by: int) -> torch.Tensor:
    """[..., n, size] so many entries later, zeros before them."""
    return pad(entries, (0, 0, by, 0))[..., : entries.shape[-2], :] if by else entries
