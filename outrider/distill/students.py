"""Which student learns: a fresh one, or what is there goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save

from outrider.distill.corpus import most_frequent
from outrider.distill.eagle import EagleStudent, eagle_config
from outrider.distill.medusa import MedusaStudent
from outrider.distill.shard import ScoredText
from outrider.distill.student import Learner, Student
from outrider.lm.distilled import DistilledDraft
from outrider.lm.eagle_config import EagleConfig
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import ModelRefused
from outrider.lm.source import ModelSource


@dataclass(frozen=True)
class Making:
    """What kind of student is made.

    Attributes:
        layers: its own, after `exit_layers` of the target's.
        heads: Medusa heads instead; 0: none.
        eagle: an EAGLE head instead, of kind 1 or 3; 0: none.
        positions: of a block at which that learns.
        lookahead: places of a block that it is asked about.
    """

    layers: int
    exit_layers: int
    heads: int
    eagle: int
    own_head: bool
    positions: int
    lookahead: int


@dataclass(frozen=True)
class Begun:
    """What goes on learning: either a draft of layers or an EAGLE head, read before anything is written.

    Attributes:
        weights_hash: of its tensors.
    """

    draft: DistilledDraft | EagleWeights = field(repr=False)
    weights_hash: str

    @staticmethod
    def load(directory: Path, vocab_fingerprint: str, *, eagle: int) -> "Begun":
        """Raises ModelRefused when it is none of the kind that is asked for, or one for another vocabulary."""
        if eagle:
            head = EagleWeights.load(directory)
            if head.config.kind != eagle:
                raise ModelRefused(f"{directory} is an EAGLE head of kind {head.config.kind}")
            tensors = {name: tensor.contiguous() for name, tensor in head.tensors.items()}
            return Begun(head, sha256(save(tensors)).hexdigest())
        draft = DistilledDraft.load(directory)
        if draft.vocab_fingerprint != vocab_fingerprint:
            raise ModelRefused(f"{directory} was made for {draft.target}, whose vocabulary is another")
        return Begun(draft, draft.weights_hash())

    @property
    def kept(self) -> torch.Tensor | None:
        """[n] int32: the tokens of its own head."""
        if isinstance(self.draft, DistilledDraft):
            return self.draft.tensors["kept"]
        return None if self.draft.kept is None else self.draft.kept.int()


def eagle_of(making: Making, target: ModelSource, begun: Begun | None) -> EagleConfig | None:
    """Of the EAGLE head that is made; None when it is another student."""
    if not making.eagle:
        return None
    if begun is not None and isinstance(begun.draft, EagleWeights):
        return begun.draft.config
    return eagle_config(making.eagle, target)


def kept_of(begun: Begun | None, texts: Sequence[ScoredText], vocab_size: int, count: int) -> torch.Tensor:
    """[n] int32: the tokens that a student looks at: its own, or the most frequent of the texts."""
    own = None if begun is None else begun.kept
    return torch.from_numpy(most_frequent(texts, vocab_size, count)) if own is None else own


def student_of(
    making: Making, target: ModelSource, kept: torch.Tensor, begun: Begun | None, device: torch.device
) -> Learner:
    """The one that learns. Raises ModelRefused when `begun` is for a target of other layers."""
    if making.heads:
        return MedusaStudent(target, making.heads, kept, device)
    if config := eagle_of(making, target, begun):
        student = EagleStudent(target, config, kept, making.positions, making.lookahead, device)
        if begun is not None and isinstance(begun.draft, EagleWeights):
            student.go_on(begun.draft)
        return student
    if begun is not None and isinstance(begun.draft, DistilledDraft):
        return Student.of(begun.draft, target, device)
    depth = making.exit_layers + making.layers
    return Student(target, depth, kept, device, making.own_head, making.exit_layers)
