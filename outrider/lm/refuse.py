"""Which models are refused, and the sentence that says why.

What a worker needs is state that truncates to any length exactly. Keys and values per position do; a recurrent state
does not (FAILURES C4), nor does anything that a layer keeps elsewhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.lm.engine import ModelRefused
from outrider.lm.kv_storage import LayerShape

_TRUNCATABLE = {"full_attention", "sliding_attention"}
# Their frequencies change with the longest sequence of the batch: cached keys would no longer fit, and a neighbour's
# length would change a sequence's logits.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turns whatever the code of some architecture or loader raises into one sentence: a ModelRefused."""
    try:
        yield
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        speaks_for_itself = isinstance(error, ModelRefused | OSError | ValueError | ImportError) and line
        what = line if speaks_for_itself else f"{type(error).__name__} {line}".strip()
        raise ModelRefused(f"{name} cannot be served: {what}") from error


def refuse_config(config: PreTrainedConfig) -> None:
    """Raises ModelRefused for what can be told from a configuration, before any weight is read."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelRefused(f"{kind} is an encoder-decoder model, not a causal language model")
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise ModelRefused(f"{kind} is not a causal language model that transformers knows")
    others = sorted(set(_layer_types(config)) - _TRUNCATABLE)
    if getattr(model_class, "_is_stateful", False) or others:
        what = f"{', '.join(others)} layers" if others else "a recurrent state"
        raise ModelRefused(f"{kind} has {what}, whose state cannot be truncated to an earlier position")


def refuse_layers(config: PreTrainedConfig, layers: Sequence[LayerShape]) -> None:
    """Raises ModelRefused when the layers seen in a recording pass do not carry the whole model."""
    kind, expected = config.model_type, config.get_text_config(decoder=True).num_hidden_layers
    if not layers:
        raise ModelRefused(f"{kind} does not use transformers' attention interface")
    if len(layers) < expected:
        raise ModelRefused(f"{kind} has {expected} layers, of which only {len(layers)} keep keys and values")
    types = _layer_types(config)
    if len(types) != len(layers):
        return
    for index, (kind_of_layer, layer) in enumerate(zip(types, layers, strict=True)):
        if kind_of_layer == "sliding_attention" and layer.window is None:
            raise ModelRefused(f"{kind} does not tell its attention function the sliding window of layer {index}")


def stable_context(config: PreTrainedConfig) -> int | None:
    """The longest context in which a token's state does not depend on the tokens after it; None when unlimited."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [it for it in rope.values() if isinstance(it, dict)] or [rope]
    limits = [
        it.get("original_max_position_embeddings") or text.max_position_embeddings
        for it in nested
        if it.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]
    return min(limits, default=None)


def _layer_types(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or [])
