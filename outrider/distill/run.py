"""From a MODEL to its draft: write text, learn from it, measure. Each part goes on where it stopped."""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from outrider.distill.acceptance import Acceptance, measure
from outrider.distill.batches import Batcher
from outrider.distill.corpus import Corpus, CorpusOptions
from outrider.distill.eagle import EagleStudent
from outrider.distill.medusa import MedusaStudent
from outrider.distill.states import States
from outrider.distill.student import Student
from outrider.distill.students import Begun, Making, eagle_of, kept_of, student_of
from outrider.distill.target import Target
from outrider.distill.training import Curve, TrainingOptions, train
from outrider.lm.engine import ModelRefused

REPORT_FILE = "report.json"


@dataclass(frozen=True)
class DistillOptions:
    """What is made.

    Attributes:
        layers: of the draft's own.
        heads: Medusa heads instead of a draft of layers; 0 makes that one.
        eagle: an EAGLE head instead, of kind 1 or 3; 0 makes none.
        exit_layers: layers of the target that it runs before them and that do not learn; 0 but for a trained exit.
        kept: tokens that it can propose, the most frequent ones.
        own_head: whether its head learns and is stored; if not, it is made of the target's rows.
        begin_with: directory of a draft of the same target that goes on learning: its layers, kept tokens and head
            count then, not those above. None begins with the target's first layers.
        dtype: numeric type that the target writes in: as for the services.
        threads: CPU threads.
        lookahead: of the acceptance report.
        report_tokens: of each held-out answer that the report looks at.
    """

    layers: int = 2
    exit_layers: int = 0
    heads: int = 0
    eagle: int = 0
    kept: int = 8192
    own_head: bool = True
    begin_with: Path | None = None
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 1
    lookahead: int = 4
    report_tokens: int = 128
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)

    @property
    def making(self) -> Making:
        """What kind of student it is about."""
        kind = (self.layers, self.exit_layers, self.heads, self.eagle, self.own_head)
        return Making(*kind, self.training.positions, self.lookahead)


class Progress(Protocol):
    """Shows how far a part is."""

    def __call__(self, part: str, done: float, total: float, note: str = "") -> None:
        """`done` of `total` in `part`."""


@dataclass(frozen=True)
class Report:
    """Acceptance on held-out texts, before and after training, and how the loss fell between."""

    before: Acceptance
    after: Acceptance
    curve: Curve = ()


def distill(target_name: str, directory: Path, work: Path, options: DistillOptions, progress: Progress) -> Report:
    """Makes the draft in `directory`; `work` keeps texts and checkpoints, and is not needed any more afterwards.

    Raises ModelRefused with one sentence.
    """
    device = torch.device(options.device)
    target = Target.load(
        target_name, options.dtype, device, lambda part, _what: progress("reading the target", part, 1.0)
    )
    source, vocabulary = target.source, target.vocabulary
    making = options.making
    begun = None
    if options.begin_with is not None:
        begun = Begun.load(options.begin_with, vocabulary.fingerprint, eagle=options.eagle)
    layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
    depth = options.exit_layers + options.layers
    if depth > layers or options.kept > vocabulary.size:
        raise ModelRefused(f"{target_name} has {layers} layers and a vocabulary of {vocabulary.size} tokens")
    corpus = Corpus(work / "corpus", options.corpus)
    corpus.write(target, options.threads, lambda done, total: progress("writing text", done, total))
    del target  # training needs the room
    torch.set_num_threads(options.threads)
    states = None
    if eagle := eagle_of(making, source, begun):
        fed = eagle.layers_of(layers)
        states = States(work / "states", source, fed, device, partial(progress, "reading text"))
    texts, held_out = corpus.texts(states), corpus.held_out(states)
    del states
    torch.manual_seed(options.training.seed)
    kept = kept_of(begun, texts, vocabulary.size, options.kept)
    student = student_of(making, source, kept, begun, device)
    training = replace(options.training, begun_with=begun.weights_hash if begun else "")
    batcher = Batcher(kept, vocabulary.size, device)

    def measured() -> Acceptance:
        # Beyond the last head there is nothing to be accepted.
        lookahead = min(options.lookahead, options.heads or options.lookahead)
        return measure(student, batcher, held_out, options.report_tokens, lookahead)

    before = measured()
    curve = train(
        student,
        batcher,
        texts,
        training,
        work / "checkpoint.pt",
        lambda done, total, loss: progress("training", done, total, f"loss {loss:.3f}"),
    )
    report = Report(before, measured(), curve)
    if isinstance(student, MedusaStudent | EagleStudent):
        student.weights().save(directory, source.portable_name)
    elif isinstance(student, Student):
        student.draft(source, vocabulary.fingerprint).save(directory)
    (directory / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report
