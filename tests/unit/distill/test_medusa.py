"""Medusa heads from a target: they learn, and what is served is what was measured."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.distill.batches import Batcher
from outrider.distill.corpus import Corpus
from outrider.distill.medusa import MedusaStudent
from outrider.distill.run import distill
from outrider.distill.shard import ScoredText
from outrider.lm.engine import Segment
from outrider.lm.features import FeatureWindow, Tap
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.load_heads import load_medusa
from outrider.lm.medusa import MedusaWeights
from outrider.lm.source import parse_source
from tests.harness.distilling import OPTIONS, silent
from tests.harness.models import VOCAB, save_tiny
from tests.harness.workers import int32

CPU = torch.device("cpu")
HEADS = 3


def test_a_head_is_taught_the_law_at_its_own_distance(tmp_path: Path) -> None:
    """At the beginning each says what the target would say of the next token; so a text whose laws are those, moved on,
    has all heads right."""
    directory = save_tiny(tmp_path / "target", "llama")
    kept = torch.arange(VOCAB, dtype=torch.int32)
    student = MedusaStudent(parse_source(directory), HEADS, kept, CPU)
    tokens = int32(np.random.default_rng(0).integers(0, VOCAB, 12))
    engine = load_engine(directory, EngineOptions(kv_pages=50, dtype="float32"))
    (logits,) = engine.forward([Segment(engine.open(tokens), tokens, 12)])
    scored = np.array([False] * 4 + [True] * 7 + [False])
    for head in range(HEADS):
        laws = logits[3 - head : 10 - head].argsort(1, descending=True)[:, :5]
        text = ScoredText(tokens, scored, laws.numpy().astype(np.int32), np.zeros((7, 5), np.float16))
        batch = Batcher(kept, VOCAB, CPU).batch([text])
        said = student.said(batch)[head]
        assert said.argmax(1).tolist() == laws[:, 0].tolist()
        others = [student.said(batch)[it].argmax(1).tolist() for it in range(HEADS) if it != head]
        assert all(other != laws[:, 0].tolist() for other in others)


def test_from_a_target_to_heads_that_are_served_as_measured(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "target", "llama_tied")
    options = replace(OPTIONS, heads=HEADS, kept=VOCAB)
    report = distill(directory, tmp_path / "heads", tmp_path / "work", options, silent)
    assert report.after.overlap > report.before.overlap, "they learned nothing"
    assert MedusaWeights.load(tmp_path / "heads").heads == HEADS
    served = EngineOptions(kv_pages=400, dtype="float32")
    target, heads = load_engine(directory, served), load_medusa(tmp_path / "heads", directory, served)
    passes = 0
    for text in Corpus(tmp_path / "work" / "corpus", OPTIONS.corpus).held_out():
        said, at = text.tokens, 2
        tap = Tap((target.info.layers,), 0)
        target.forward([Segment(target.open(said[:1]), said, 1, tap=tap)])
        while at + HEADS < len(said):
            window = FeatureWindow(1)
            window.take(0, tap.states()[: at - 1])
            # A row says what follows its token, whatever that is.
            fed = int32([*said[:at], *([0] * (HEADS - 1))])
            (rows,) = heads.forward([Segment(heads.open(said[:1]), fed, HEADS, fed=window)])
            guess = rows.argmax(1).tolist()
            kept = next((index for index, token in enumerate(guess) if token != said[at + index]), HEADS)
            at, passes = at + kept + 1, passes + 1
    # Served weights and features are rounded to bfloat16: near-ties may fall the other way.
    assert passes == pytest.approx(report.after.passes, rel=0.1)
