"""Weights: from a Hugging Face id, a directory or a GGUF file to a transformers model."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from outrider.lm.engine import ModelRefused
from outrider.lm.refuse import refuse_config
from outrider.lm.source import ModelSource, SourceKind

Progress = Callable[[float, str], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, NotImplementedError)


def load_config(source: ModelSource, layers: int = 0) -> PreTrainedConfig:
    """The configuration, cut to the first `layers` layers when that is not 0.

    Raises ModelRefused when it cannot be read, names no servable architecture, or has fewer layers.
    """
    with _refusing(f"cannot read the configuration of {source.name}"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(**_location(source))
    refuse_config(config)
    if layers:
        _cut_layers(config.get_text_config(decoder=True), layers)
    return config


def load_weights(
    source: ModelSource, config: PreTrainedConfig, dtype: str, device: torch.device, progress: Progress
) -> PreTrainedModel:
    """The model in evaluation mode on the device; `progress` is called with the fraction of the weights loaded.

    dtype is "float32", "bfloat16", "float16" or "auto": the checkpoint's, bfloat16 for GGUF.
    Raises ModelRefused when weights are missing, do not fit, or cannot be read.
    """
    if dtype not in (*_DTYPES, "auto"):
        raise ModelRefused(f"dtype {dtype!r} is none of auto, {', '.join(_DTYPES)}")
    options: dict[str, Any] = {"device_map": device} if device.type != "cpu" else {}
    if source.kind is SourceKind.GGUF:
        options["quantization_config"] = GgufConfig(dequantize=True)
        dtype = "bfloat16" if dtype == "auto" else dtype
    with _refusing(f"cannot load {source.name}"), _quiet(progress):
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
        raise ModelRefused(f"{source.name} lacks {len(unfit)} weights of its architecture, the first is {unfit[0]}")
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
        if isinstance(value, list) and len(value) == total:  # one entry a layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turns the many errors of a loader into one sentence."""
    try:
        yield
    except ModelRefused:
        raise
    except _LOAD_ERRORS as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelRefused(f"{what}: {lines[0]}") from error


@contextmanager
def _quiet(progress: Progress) -> Iterator[None]:
    """Gives transformers' progress to `progress` and keeps its bars and advice off stderr."""

    def track(_factory: object, args: tuple[Any, ...], options: dict[str, Any]) -> "_Tracked":
        return _Tracked(args[0] if args else options.get("iterable", ()), progress)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    previous = transformers_logging.set_tqdm_hook(track)
    # The GGUF reader makes its bar without asking the hook.
    gguf_reader: Any = modeling_gguf_pytorch_utils
    gguf_bar = gguf_reader.tqdm
    gguf_reader.tqdm = lambda items, **_: _Tracked(items, progress)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_reader.tqdm = gguf_bar
        transformers_logging.set_tqdm_hook(previous)
        transformers_logging.set_verbosity(verbosity)


class _Tracked:
    """Stands for a tqdm bar over an iterable."""

    def __init__(self, items: Iterable[Any], progress: Progress) -> None:
        self._items, self._progress = items, progress

    def __iter__(self) -> Iterator[Any]:
        items = list(self._items)
        for index, item in enumerate(items):
            yield item
            self._progress((index + 1) / len(items), "loading weights")

    def __enter__(self) -> "_Tracked":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_options: None
