"""What the target makes of its own text, on disk: states at each token, for students that are fed by them.

They are made once, in one pass over the texts, so that a turn through them costs the student's time alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from outrider.distill.shard import ScoredText
from outrider.law.sparse import Int32Array
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.decoder import Decoder
from outrider.lm.quiet import quiet
from outrider.lm.source import ModelSource

_PASS_TOKENS = 2048


class States:
    """Files in a directory, one for each shard of texts: [tokens, states side by side] int16, the bits of bfloat16.

    Args:
        layers: which states, as `outrider.lm.features` counts.
        progress: called with the texts done in a shard, and all of it.
    """

    def __init__(
        self,
        directory: Path,
        target: ModelSource,
        layers: Sequence[int],
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        self._directory = directory / "-".join(map(str, layers))
        self._target, self._layers, self._device, self._progress = target, tuple(layers), device, progress
        self._model: _Shown | None = None

    def of(self, name: str, texts: Sequence[ScoredText]) -> list[ScoredText]:
        """The texts of the shard `name` with their states, which are made where the directory has none."""
        path = self._directory / f"{name}.npy"
        if not path.exists():
            self._make(path, texts)
        states = np.load(path, mmap_mode="r")
        ends = np.cumsum([len(text.tokens) for text in texts])
        return [replace(it, states=states[end - len(it.tokens) : end]) for it, end in zip(texts, ends, strict=True)]

    def forget(self) -> None:
        """Lets go of the target: training needs the room."""
        self._model = None

    def _make(self, path: Path, texts: Sequence[ScoredText]) -> None:
        self._model = self._model or _Shown(self._target, self._layers, self._device)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        ends = np.cumsum([len(text.tokens) for text in texts])
        shape = int(ends[-1]), self._model.width
        states = np.lib.format.open_memmap(part, mode="w+", dtype=np.int16, shape=shape)
        done = 0
        for some in _alike(texts):
            made = self._model([texts[index].tokens for index in some])
            for index, rows in zip(some, made, strict=True):
                count = len(texts[index].tokens)
                states[ends[index] - count : ends[index]] = rows[:count].view(torch.int16).cpu().numpy()
            done += len(some)
            self._progress(done, len(texts))
        states.flush()
        part.rename(path)


class _Shown:
    """The target, for its states alone."""

    def __init__(self, target: ModelSource, layers: tuple[int, ...], device: torch.device) -> None:
        with quiet(lambda _fraction, _what: None):
            model = load_weights(target, load_config(target), "float32", device)
        model.set_attn_implementation("sdpa")
        decoder = Decoder.of(model)
        self.width = len(layers) * decoder.head.in_features
        self._body, self._layers, self._device = model.base_model, layers, device
        self._seen: dict[int, torch.Tensor] = {}
        for layer in layers:
            _part(decoder, layer).register_forward_hook(partial(self._see, layer))

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Int32Array]) -> torch.Tensor:
        """[texts, longest, width] bfloat16; what is behind a text's end means nothing."""
        tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(np.array(it, np.int64)) for it in texts], True)
        self._body(input_ids=tokens.to(self._device), use_cache=False)
        return torch.cat([self._seen.pop(layer) for layer in self._layers], -1)

    def _see(self, layer: int, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        self._seen[layer] = output.bfloat16()


def _part(decoder: Decoder, layer: int) -> nn.Module:
    """Whose output it is."""
    if layer == 0:
        return decoder.embeddings
    return decoder.norm if layer == len(decoder.layers) else decoder.layers[layer - 1]


def _alike(texts: Sequence[ScoredText]) -> Iterator[list[int]]:
    """Indices of texts of similar length, a few at a time."""
    some: list[int] = []
    for index in sorted(range(len(texts)), key=lambda it: len(texts[it].tokens)):
        if some and len(texts[index].tokens) * (len(some) + 1) > _PASS_TOKENS:
            yield some
            some = []
        some.append(index)
    yield some
