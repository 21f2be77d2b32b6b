"""Weights: from a Hugging Face id, a directory or a GGUF file to a transformers model."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from outrider.lm.engine import ModelRefused
from outrider.lm.refuse import refuse_config
from outrider.lm.source import ModelSource, SourceKind

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(source: ModelSource, layers: int = 0) -> PreTrainedConfig:
    """The configuration, cut to the first `layers` layers when that is not 0.

    Raises ModelRefused when it names no servable architecture or has fewer layers, and whatever transformers raises.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(**_location(source))
    refuse_config(config)
    if layers:
        _cut_layers(config.get_text_config(decoder=True), layers)
    return config


def load_weights(source: ModelSource, config: PreTrainedConfig, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model in evaluation mode on the device.

    dtype is "float32", "bfloat16", "float16" or "auto": the checkpoint's, bfloat16 for GGUF.
    Raises ModelRefused when weights are missing or do not fit, and whatever transformers raises.
    """
    if dtype not in (*_DTYPES, "auto"):
        raise ModelRefused(f"dtype {dtype!r} is none of auto, {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"device_map": device} if device.type != "cpu" else {}
    if source.kind is SourceKind.GGUF:
        options["quantization_config"] = GgufConfig(dequantize=True)
        dtype = "bfloat16" if dtype == "auto" else dtype
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **_location(source),
        config=config,
        dtype=_DTYPES.get(dtype, "auto"),
        attn_implementation="eager",
        output_loading_info=True,
        **options,
    )
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    unfit = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if unfit:
        raise ModelRefused(f"the checkpoint lacks {len(unfit)} weights of its architecture, among them {unfit[0]}")
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    return model


def _location(source: ModelSource) -> dict[str, str]:
    if source.kind is SourceKind.GGUF:
        path = Path(source.location)
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": source.location}


def _cut_layers(text: PreTrainedConfig, layers: int) -> None:
    total = text.num_hidden_layers
    if not 1 <= layers <= total:
        raise ModelRefused(f"the model has {total} layers, {layers} were asked for")
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:  # one entry a layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
