"""EAGLE heads from a target: what they are measured and trained by is what serving does, and they learn."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.distill.batches import Batch, Batcher
from outrider.distill.corpus import Corpus
from outrider.distill.eagle import EagleStudent, eagle_config
from outrider.distill.eagle_layer import EagleModule
from outrider.distill.run import distill
from outrider.distill.shard import ScoredText
from outrider.distill.states import States
from outrider.distill.training import train
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import ModelRefused, Segment
from outrider.lm.features import FeatureWindow, Tap
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.load_heads import load_eagle
from outrider.lm.source import parse_source
from tests.harness.distilling import OPTIONS, QUICK, silent
from tests.harness.models import VOCAB, save_tiny
from tests.harness.workers import int32

CPU = torch.device("cpu")
KINDS = (1, 3)
KEPT = torch.arange(0, 60, 2, dtype=torch.int32)
PLACES = 4


def text_of(length: int, seed: int, first: int = 3) -> ScoredText:
    """Random, with laws from token `first` on."""
    rng = np.random.default_rng(seed)
    scored = np.arange(length) >= first
    scored[-1] = False
    laws = int(scored.sum())
    ids = np.stack([rng.permutation(VOCAB)[:5] for _ in range(laws)]).astype(np.int32)
    logits = -np.sort(rng.random((laws, 5))).astype(np.float16)
    return ScoredText(int32(rng.integers(0, VOCAB, length)), scored, ids, logits)


def student_of(directory: str, kind: int, *, positions: int = 3, kept: torch.Tensor = KEPT) -> EagleStudent:
    source = parse_source(directory)
    torch.manual_seed(0)
    student = EagleStudent(source, eagle_config(kind, source), kept, positions, PLACES, CPU)
    for name, parameter in student.learned.named_parameters():  # nothing that is equal by chance
        generator = torch.Generator().manual_seed(len(name))
        parameter.data += torch.randn(parameter.shape, generator=generator) / 10
    return student


def with_states(directory: str, kind: int, texts: list[ScoredText], work: Path) -> list[ScoredText]:
    source = parse_source(directory)
    return States(work, source, eagle_config(kind, source).layers_of(3), CPU, silent).of("some", texts)


def test_states_are_those_that_a_serving_target_shows(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "target", "llama")
    texts, layers = [text_of(length, length) for length in (9, 6, 12)], (0, 1, 3)
    made = States(tmp_path / "states", parse_source(directory), layers, CPU, silent).of("some", texts)
    engine = load_engine(directory, EngineOptions(kv_pages=50, dtype="float32"))
    for text in made:
        tap = Tap(layers, 0)
        engine.forward([Segment(engine.open(text.tokens[:1]), text.tokens, 1, tap=tap)])
        assert text.states is not None
        found = torch.from_numpy(np.array(text.states)).view(torch.bfloat16)
        torch.testing.assert_close(found, tap.states(), rtol=1e-2, atol=1e-2)
    # They are made once.
    (tmp_path / "target").rename(tmp_path / "gone")
    again = States(tmp_path / "states", parse_source(str(tmp_path / "gone")), layers, CPU, silent).of("some", texts)
    assert all(np.array_equal(a.states, b.states) for a, b in zip(made, again, strict=True))  # type: ignore[arg-type]


def drafted_alone(module: EagleModule, kind: int, states: torch.Tensor, embeddings: torch.Tensor, own: int) -> Batch:
    """What one block's last place makes, [size]: `own` entries after those that have a state [n, width], one at a time,
    each fed by what was made before it, over plain causal attention."""
    known = len(states)
    rotations = module._rotary(embeddings, torch.arange(len(embeddings))[None])
    entries = module.fc(states) if kind == 3 else states
    made = torch.empty(0)
    for count in range(known, known + own + 1):
        given = entries if kind == 3 else module.fc(torch.cat([embeddings[:count], entries], 1))
        made = module.layer(given[None], embeddings[None, :count], tuple(it[:, :count] for it in rotations), [])[0, -1]  # type: ignore[arg-type]
        entries = torch.cat([entries, made[None]])
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_each_place_is_drafted_as_a_block_is(tmp_path: Path, kind: int) -> None:
    directory = save_tiny(tmp_path / "target", "llama")
    (text,) = with_states(directory, kind, [text_of(12, 1)], tmp_path / "states")
    student = student_of(directory, kind)
    batch = Batcher(KEPT, VOCAB, CPU).batch([text])
    assert batch.states is not None
    with torch.inference_mode():
        said = student.said(batch)
        embeddings, laws = student._embeddings(batch.tokens[0, 1:]), np.flatnonzero(text.scored)
        for place in range(PLACES):
            for law, token in enumerate(laws):
                known = token - place  # states of tokens before the last one that the target has said
                if known < 1:
                    continue
                made = drafted_alone(student.learned, kind, batch.states[0, :known], embeddings, place)
                torch.testing.assert_close(said[place][law], student._logits(made[None])[0], rtol=1e-3, atol=1e-3)  # type: ignore[index]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_says_what_its_texts_say(tmp_path: Path, kind: int) -> None:
    directory = save_tiny(tmp_path / "target", "llama")
    texts = with_states(directory, kind, [text_of(12, 1), text_of(7, 2), text_of(9, 3)], tmp_path / "states")
    student, batcher = student_of(directory, kind), Batcher(KEPT, VOCAB, CPU)
    with torch.inference_mode():
        together = student.said(batcher.batch(texts))
        alone = [student.said(batcher.batch([text])) for text in texts]
    for place in range(PLACES):
        expected = torch.cat([said[place] for said in alone])
        torch.testing.assert_close(together[place], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_learn_and_the_targets_do_not(tmp_path: Path, kind: int) -> None:
    directory = save_tiny(tmp_path / "target", "llama_tied")
    texts = with_states(directory, kind, [text_of(20, seed) for seed in range(8)], tmp_path / "states")
    student, batcher = student_of(directory, kind), Batcher(KEPT, VOCAB, CPU)
    before = {name: weight.clone() for name, weight in student.learned.state_dict().items()}
    options = replace(OPTIONS.training, epochs=20, positions=3)
    curve = train(student, batcher, texts, options, tmp_path / "checkpoint.pt", silent)
    after = student.learned.state_dict()
    assert before.keys() == student.weights().tensors.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert not student._embeddings.weight.requires_grad
    assert curve[-1][1] < curve[0][1]


def test_noise_is_a_function_of_the_batch(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "target", "llama")
    texts = with_states(directory, 1, [text_of(12, 1), text_of(12, 2)], tmp_path / "states")
    student, batcher = student_of(directory, 1), Batcher(KEPT, VOCAB, CPU)
    batches = [batcher.batch(some) for some in (texts, texts, texts[::-1])]
    losses = [student.loss(batch, batch.probs).item() for batch in batches]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_target_to_a_head_that_is_saved(tmp_path: Path, kind: int) -> None:
    directory = save_tiny(tmp_path / "target", "llama_tied")
    training = replace(OPTIONS.training, positions=2)
    options = replace(OPTIONS, eagle=kind, kept=40, training=training)
    report = distill(directory, tmp_path / "head", tmp_path / "work", options, silent)
    assert report.after.overlap > report.before.overlap, "it learned nothing"
    assert report.curve[-1][1] < report.curve[0][1]
    made = EagleWeights.load(tmp_path / "head")
    assert made.config.kind == kind
    assert ("lm_head.weight" in made.tensors) == (kind == 3)
    if made.kept is not None:
        assert len(made.kept) == 40
    # All parts are done: the same report, from what lies there.
    assert distill(directory, tmp_path / "head", tmp_path / "work", options, silent) == report


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_served_as_it_was_measured(tmp_path: Path, kind: int) -> None:
    directory = save_tiny(tmp_path / "target", "llama_tied")
    options = replace(OPTIONS, eagle=kind, kept=VOCAB, training=replace(OPTIONS.training, positions=2))
    report = distill(directory, tmp_path / "head", tmp_path / "work", options, silent)
    served = EngineOptions(kv_pages=400, dtype="float32")
    target, head = load_engine(directory, served), load_eagle(tmp_path / "head", directory, served)
    assert head.info.feeding is not None
    passes = 0
    for text in Corpus(tmp_path / "work" / "corpus", OPTIONS.corpus).held_out():
        said, at = text.tokens, 2
        tap = Tap(head.info.feeding.layers, 0)
        target.forward([Segment(target.open(said[:1]), said, 1, tap=tap)])
        while at + OPTIONS.lookahead < len(said):
            window = FeatureWindow(at)
            window.take(0, tap.states()[: at - 1])
            sequence, fed, right = head.open(said[:1]), said[:at], 0
            while right < OPTIONS.lookahead:
                (rows,) = head.forward([Segment(sequence, fed, 1, fed=window)])
                fed = int32([int(rows[0].argmax())])
                if fed[0] != said[at + right]:
                    break
                right += 1
            sequence.free()
            at, passes = at + right + 1, passes + 1
    # Served weights and features are rounded to bfloat16: near-ties may fall the other way.
    assert passes == pytest.approx(report.after.passes, rel=0.1)
    assert report.after.accepted[1] > 0, "no block came to its second place"


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_goes_on_learning(tmp_path: Path, kind: int) -> None:
    directory = save_tiny(tmp_path / "target", "llama")
    options = replace(QUICK, eagle=kind, kept=40)
    first = distill(directory, tmp_path / "first", tmp_path / "work", options, silent)
    (tmp_path / "work" / "checkpoint.pt").unlink()
    options = replace(options, begin_with=tmp_path / "first")
    second = distill(directory, tmp_path / "second", tmp_path / "work", options, silent)
    # Weights were rounded to bfloat16 between the two.
    assert second.before.overlap == pytest.approx(first.after.overlap, abs=0.01)
    assert second.after.overlap > second.before.overlap
    other = save_tiny(tmp_path / "other", "llama", hidden_size=64, head_dim=16)
    with pytest.raises(ModelRefused, match="made for another target"):
        distill(other, tmp_path / "third", tmp_path / "elsewhere", options, silent)
    with pytest.raises(ModelRefused, match=f"an EAGLE head of kind {kind}"):
        distill(directory, tmp_path / "third", tmp_path / "work", replace(options, eagle=4 - kind), silent)
