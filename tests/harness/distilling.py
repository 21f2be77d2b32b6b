"""A distillation that takes a second."""

from dataclasses import replace
from pathlib import Path

import torch

from outrider.distill.corpus import CorpusOptions
from outrider.distill.run import DistillOptions
from outrider.distill.target import Target
from outrider.distill.training import TrainingOptions
from outrider.distill.writer import WriterOptions
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.decoder import Decoder
from outrider.lm.distilled import DistilledDraft
from outrider.lm.load import vocabulary_of_source
from outrider.lm.source import parse_source

WRITER = WriterOptions(slots=8, turn_tokens=4, answer_tokens=16, k=8)
OPTIONS = DistillOptions(
    layers=1,
    kept=32,
    dtype="float32",
    report_tokens=16,
    corpus=CorpusOptions(texts=96, held_out=16, writer=WRITER),
    training=TrainingOptions(epochs=2, batch_tokens=256, learning_rate=5e-3, checkpoint_steps=3),
)
QUICK = replace(OPTIONS, training=replace(OPTIONS.training, epochs=1))


def silent(*_: object, **__: object) -> None:
    """Shows no progress."""


def load_target(directory: str) -> Target:
    """As the distillation loads it."""
    return Target.load(directory, "float32", torch.device("cpu"), silent)


def untrained_draft(model: str, kept: torch.Tensor, directory: Path, shared: int = 0) -> DistilledDraft:
    """The first layer of the model in a directory, or the one after `shared` layers, which stay the model's; with a
    head of the tokens `kept`. Saved."""
    source = parse_source(model)
    config = load_config(source)
    decoder = Decoder.of(load_weights(source, config, "float32", torch.device("cpu")))
    fingerprint = vocabulary_of_source(source, "", config).fingerprint
    layers = {f"layers.{shared}.{name}": tensor for name, tensor in decoder.layers[shared].state_dict().items()}
    norm = {f"norm.{name}": tensor for name, tensor in decoder.norm.state_dict().items()}
    tensors = layers | norm | {"kept": kept.to(torch.int32)}
    draft = DistilledDraft(source.portable_name, shared + 1, fingerprint, tensors, shared)
    draft.save(directory)
    return draft
