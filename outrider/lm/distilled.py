"""A distilled draft: a directory with a few layers and a reduced head. Everything else is its target's own: embeddings,
and of a trained exit the first layers.

`draft.json` says what it needs; `draft.safetensors` holds, float or bfloat16:

    layers.N.*    the decoder layers of its own, named as in the target
    norm.weight   the norm before the head
    head.weight   [kept, hidden size]; absent where the target's own rows serve
    kept          [kept] int32, ascending: the tokens that the draft can propose
"""

import json
import os
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.decoder import Decoder
from outrider.lm.engine import ModelRefused
from outrider.lm.reduced_head import ReducedHead
from outrider.lm.source import DRAFT_FILE, ModelSource, SourceKind, parse_source

WEIGHTS_FILE = "draft.safetensors"
_FORMAT = 1


@dataclass(frozen=True)
class DistilledDraft:
    """What the directory holds.

    Attributes:
        target: MODEL that it was made for; of a file or a directory only the name.
        layers: how many, the target's included.
        vocab_fingerprint: of its target's vocabulary.
        tensors: as above.
        shared: how many of the layers, the first ones, are the target's own.
    """

    target: str
    layers: int
    vocab_fingerprint: str
    tensors: dict[str, torch.Tensor] = field(repr=False)
    shared: int = 0

    def save(self, directory: Path) -> None:
        """Writes the directory's two files, weights first; a draft that was there is replaced file by file."""
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f"{WEIGHTS_FILE}.part"
        part.write_bytes(save({name: tensor.contiguous() for name, tensor in self.tensors.items()}))
        os.replace(part, directory / WEIGHTS_FILE)
        settings = {"format": _FORMAT} | {name: value for name, value in asdict(self).items() if name != "tensors"}
        (directory / DRAFT_FILE).write_text(json.dumps(settings, indent=2) + "\n")

    @staticmethod
    def load(directory: Path) -> "DistilledDraft":
        """Raises ModelRefused with one sentence when the directory holds no draft of this format."""
        try:
            settings = json.loads((directory / DRAFT_FILE).read_text())
            if settings.pop("format") != _FORMAT:
                raise ModelRefused(f"{directory} holds a draft of another format than {_FORMAT}")
            draft = DistilledDraft(tensors=load_file(directory / WEIGHTS_FILE), **settings)
            draft.check()
            return draft
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise ModelRefused(f"{directory} holds no whole draft: {error}") from error

    def weights_hash(self) -> str:
        """Of its tensors: tells drafts of one target apart."""
        return sha256(save({name: tensor.contiguous() for name, tensor in self.tensors.items()})).hexdigest()

    def check(self) -> None:
        """Raises TypeError when a field is not what the class says, KeyError or ValueError where it is about `kept`."""
        for name, kind in (("target", str), ("layers", int), ("vocab_fingerprint", str), ("shared", int)):
            if type(getattr(self, name)) is not kind:
                raise TypeError(f"{name} is {getattr(self, name)!r:.40}")
        if not 0 <= self.shared < self.layers:
            raise ValueError(f"{self.shared} of {self.layers} layers are shared")
        kept = self.tensors["kept"]
        if kept.dtype != torch.int32 or kept.ndim != 1:
            raise ValueError(f"kept is {kept.dtype} of {kept.ndim} dimensions")

    def base(self, target: str) -> ModelSource:
        """The model that it shares with: `target`, or the one it was made for when that is "".

        Raises ModelRefused when neither is there.
        """
        try:
            source = parse_source(target or self.target)
        except ModelRefused as error:
            if target:
                raise
            raise ModelRefused(f"the draft needs its target, {self.target}: name it with --target-model") from error
        if source.kind in (SourceKind.SYNTHETIC, SourceKind.DISTILLED):
            raise ModelRefused(f"the target of a distilled draft cannot be {source.name}")
        return source

    def install(self, model: PreTrainedModel, vocab_fingerprint: str) -> None:
        """Turns a target that was cut to `layers` layers into the draft.

        Raises ModelRefused when it is another model than the draft was made for.
        """
        if vocab_fingerprint != self.vocab_fingerprint:
            raise ModelRefused(f"the draft was made for {self.target}, whose vocabulary is another")
        decoder = Decoder.of(model)
        tensors = dict(self.tensors)
        kept = tensors.pop("kept").long().to(model.device)
        rows = tensors.pop("head.weight", None)
        body = nn.ModuleDict({"layers": decoder.layers_from(self.shared), "norm": decoder.norm})
        try:
            body.load_state_dict(tensors)
            head = reduced(decoder.head, kept, rows)
        except (RuntimeError, IndexError) as error:
            raise ModelRefused(f"the draft was made for {self.target}, whose layers are other ones") from error
        model.set_output_embeddings(ReducedHead(head, kept, decoder.head.out_features))  # type: ignore[no-untyped-call]


def reduced(head: nn.Linear, kept: torch.Tensor, rows: torch.Tensor | None = None) -> nn.Linear:
    """The rows `kept` [n] of a head, with weights [n, hidden size] of their own when `rows` is given."""
    made = nn.Linear(head.in_features, len(kept), False, head.weight.device, head.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(head.weight[kept] if rows is None else rows)
    return made.requires_grad_(False)
