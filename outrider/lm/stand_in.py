"""A model's passes without the model: products of its shapes over weights of no meaning, in a process of its own.

    python -m outrider.lm.stand_in MODEL LAYERS DTYPE TARGET

Only the configuration is read, so that it is ready in seconds. Then each line `threads positions passes` of standard
input is answered, when the passes are done, by a line with the microseconds that they took. The first line, `ready`,
says that it listens.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.lm.checkpoint import load_config
from outrider.lm.distilled import DistilledDraft
from outrider.lm.engine import ModelRefused
from outrider.lm.packed import pack_linear
from outrider.lm.refuse import refusing
from outrider.lm.source import SourceKind, parse_source

# Weights beyond this are stood in for by passing over the first ones again: far more than any cache holds.
_MOST_BYTES = 1 << 29


class StandIn:
    """The linear layers of a decoder with these settings, and a head of `head_rows` rows, 0 for the vocabulary's.

    Raises ModelRefused when they do not say what its layers look like.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, head_rows: int = 0) -> None:
        text = config.get_text_config(decoder=True)
        try:
            hidden, inner, heads = text.hidden_size, text.intermediate_size, text.num_attention_heads
            layers, vocabulary = text.num_hidden_layers, head_rows or text.vocab_size
        except AttributeError as error:
            raise ModelRefused(f"{config.model_type} names its sizes in another way") from error
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        dim = getattr(text, "head_dim", None) or hidden // heads
        shapes = [(hidden, (heads + 2 * kv_heads) * dim), (heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]
        layer_bytes = dtype.itemsize * sum(wide * tall for wide, tall in shapes)
        kept = max(1, min(layers, _MOST_BYTES // layer_bytes))
        made = [[_linear(*shape, dtype) for shape in shapes] for _ in range(kept)]
        linears = [linear for index in range(layers) for linear in made[index % kept]]
        self._linears = [*linears, _linear(hidden, vocabulary, dtype)]
        self._dtype = dtype

    @torch.inference_mode()
    def run(self, positions: int, passes: int) -> None:
        """That many passes."""
        for _ in range(passes):
            for linear in self._linears:
                linear(torch.ones(positions, int(linear.in_features), dtype=self._dtype))


def _linear(wide: int, tall: int, dtype: torch.dtype) -> nn.Module:
    layer = nn.Linear(wide, tall, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.full((tall, wide), 0.01, dtype=dtype), requires_grad=False)
    return pack_linear(layer)


def stand_in(model: str, layers: int, dtype: str, target: str) -> StandIn:
    """For a MODEL, its first `layers` layers when that is not 0, in a dtype ("" is bfloat16).

    `target`: the MODEL that a distilled draft was made for. Raises ModelRefused.
    """
    head_rows = 0
    with refusing(model):
        source = parse_source(model)
        if source.kind is SourceKind.DISTILLED:
            draft = DistilledDraft.load(Path(source.location))
            source, layers, head_rows = draft.base(target), draft.layers, len(draft.tensors["kept"])
        return StandIn(load_config(source, layers), getattr(torch, dtype or "bfloat16"), head_rows)


def main() -> None:
    """The process."""
    model, layers, dtype, target = sys.argv[1:]
    if torch.cuda.is_available():
        sys.exit("models run on CUDA here")
    try:
        made = stand_in(model, int(layers), dtype, target)
    except ModelRefused as error:
        sys.exit(str(error))
    made.run(1, 1)
    print("ready", flush=True)
    for line in sys.stdin:
        threads, positions, passes = map(int, line.split())
        torch.set_num_threads(threads)
        began = time.perf_counter()
        made.run(positions, passes)
        print(round(1e6 * (time.perf_counter() - began)), flush=True)


if __name__ == "__main__":
    main()
