"""Lockstep decoding: many texts, one token each a pass, over a dense cache.

The services' paged path gathers keys for every layer; here they lie in order, which halves what a token costs.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from outrider.lm.attention import LayerCall
from outrider.lm.causal_lm import run_model
from outrider.lm.engine import ModelRefused


class Lockstep:
    """A model with paged attention (`outrider.lm.attention`) and a cache of `slots` texts of `length` tokens each."""

    def __init__(self, model: PreTrainedModel, slots: int, length: int) -> None:
        self._model = model
        self._cache = _DenseCache(slots, length)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Feeds one token to every slot, at that slot's position; returns their logits [slots, vocab].

        What a slot held from its position on is forgotten.
        Raises ModelRefused when the model's attention has something that the cache does not know.
        """
        device = self._model.device
        at = torch.tensor(positions, device=device)
        self._cache.begin(at)
        rows = torch.arange(len(tokens), device=device)
        return run_model(self._model, torch.tensor(tokens, device=device), at, rows, self._cache)


class _DenseCache:
    """Keys and values of all slots; answers the layers of one pass after the other."""

    def __init__(self, slots: int, length: int) -> None:
        self._slots, self._length = slots, length
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # [slots, kv_heads, length, dim]

    def begin(self, positions: torch.Tensor) -> None:
        """A new pass, every slot at its position, [slots] int64."""
        self._layer, self._positions = 0, positions
        unseen = torch.arange(self._length, device=positions.device) > positions[:, None]
        self._mask = torch.zeros(unseen.shape, device=positions.device).masked_fill_(unseen, -torch.inf)[:, None, None]

    def attend(self, call: LayerCall) -> torch.Tensor:
        """[slots, heads, value_dim]"""
        if call.softcap is not None or call.sinks is not None or (call.window or self._length) < self._length:
            raise ModelRefused(
                "attention with a softcap, sinks or a window shorter than the texts cannot be distilled from"
            )
        slots, heads, dim = call.query.shape
        key, value = call.key_value.chunk(2, 1)
        keys, values = self._written(key[..., :dim], value[..., : call.value_dim])
        query = call.query.reshape(slots * keys.shape[1], -1, dim)
        scale = dim**-0.5 if call.scaling is None else call.scaling
        # torch copies what it multiplies in batches unless it is contiguous: all of the cache is read, and masked.
        scores = torch.bmm(query, keys.flatten(0, 1).transpose(1, 2)).view(slots, keys.shape[1], -1, self._length)
        weights = (scores.float() * scale + self._mask).softmax(-1).to(values.dtype)
        output = torch.bmm(weights.flatten(0, 1), values.flatten(0, 1))  # [slots * kv_heads, group, value_dim]
        return output.reshape(slots, heads, -1)

    def _written(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the pass's [slots, kv_heads, dim]; returns all that the layer holds."""
        if self._layer == len(self._layers):
            self._layers.append((self._empty(key), self._empty(value)))
        keys, values = self._layers[self._layer]
        self._layer += 1
        rows = torch.arange(self._slots, device=key.device)
        keys[rows, :, self._positions] = key
        values[rows, :, self._positions] = value
        return keys, values

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        slots, heads, dim = like.shape
        return like.new_zeros(slots, heads, self._length, dim)
