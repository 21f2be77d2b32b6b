"""From a MODEL to its draft: write text, learn from it, measure. Each part goes on where it stopped."""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from outrider.distill.acceptance import Acceptance, measure
from outrider.distill.batches import Batcher
from outrider.distill.corpus import Corpus, CorpusOptions, most_frequent
from outrider.distill.eagle import EagleStudent, eagle_config
from outrider.distill.medusa import MedusaStudent
from outrider.distill.states import States
from outrider.distill.student import Learner, Student
from outrider.distill.target import Target
from outrider.distill.training import Curve, TrainingOptions, train
from outrider.lm.distilled import DistilledDraft
from outrider.lm.engine import ModelRefused
from outrider.lm.source import ModelSource

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
    begun = _begun(options.begin_with, vocabulary.fingerprint)
    layers = target.model.config.get_text_config(decoder=True).num_hidden_layers
    depth = options.exit_layers + options.layers
    if depth > layers or options.kept > vocabulary.size:
        raise ModelRefused(f"{target_name} has {layers} layers and a vocabulary of {vocabulary.size} tokens")
    corpus = Corpus(work / "corpus", options.corpus)
    corpus.write(target, options.threads, lambda done, total: progress("writing text", done, total))
    del target  # training needs the room
    states = _states(options, source, work, layers, progress)
    texts, held_out = corpus.texts(states), corpus.held_out(states)
    del states
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.training.seed)
    student: Learner
    training = options.training
    if begun is not None:
        kept, student = begun.tensors["kept"], Student.of(begun, source, device)
        training = replace(training, begun_with=begun.weights_hash())
    else:
        kept = torch.from_numpy(most_frequent(texts, vocabulary.size, options.kept))
        student = _fresh(options, source, kept, device)
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


def _fresh(options: DistillOptions, source: ModelSource, kept: torch.Tensor, device: torch.device) -> Learner:
    if options.heads:
        return MedusaStudent(source, options.heads, kept, device)
    if options.eagle:
        config = eagle_config(options.eagle, source)
        return EagleStudent(source, config, kept, options.training.positions, options.lookahead, device)
    depth = options.exit_layers + options.layers
    return Student(source, depth, kept, device, options.own_head, options.exit_layers)


def _states(options: DistillOptions, source: ModelSource, work: Path, layers: int, progress: Progress) -> States | None:
    """Where the target's states lie that the student is fed by; None when it is fed by none."""
    if not options.eagle:
        return None
    fed = eagle_config(options.eagle, source).layers_of(layers)
    part = "reading text"
    return States(work / "states", source, fed, torch.device(options.device), partial(progress, part))


def _begun(directory: Path | None, vocab_fingerprint: str) -> DistilledDraft | None:
    """The draft that goes on learning. Raises ModelRefused when it is none, or one for another vocabulary."""
    if directory is None:
        return None
    draft = DistilledDraft.load(directory)
    if draft.vocab_fingerprint != vocab_fingerprint:
        raise ModelRefused(f"{directory} was made for {draft.target}, whose vocabulary is another")
    return draft
