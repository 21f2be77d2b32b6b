from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.distill.acceptance import Acceptance, rounds_of
from outrider.distill.batches import Batcher, plan
from outrider.distill.corpus import Corpus
from outrider.distill.run import Report, distill
from outrider.distill.shard import ScoredText
from outrider.distill.student import SoftTargets, Student
from outrider.distill.training import train
from outrider.lm.distilled import DistilledDraft
from outrider.lm.engine import Engine, ModelRefused, Segment
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.source import parse_source
from tests.harness.distilling import OPTIONS, load_target, silent, untrained_draft
from tests.harness.models import VOCAB, save_tiny
from tests.harness.workers import int32

CPU = torch.device("cpu")
KEPT = torch.arange(0, 60, 2, dtype=torch.int32)


def texts_of(directory: str, work: Path) -> list[ScoredText]:
    corpus = Corpus(work, OPTIONS.corpus)
    corpus.write(load_target(directory), 1, silent)
    return corpus.texts()


def test_the_loss_and_its_gradient_are_those_of_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 20, generator=generator, requires_grad=True)
    columns = torch.stack([torch.randperm(20, generator=generator)[:4] for _ in range(6)])
    weights = torch.rand(6, 4, generator=generator)
    weights[0], columns[0] = 0.0, 0  # a law of which the head has nothing
    loss = SoftTargets.apply(logits, columns, weights)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = -(logits.log_softmax(1).gather(1, columns) * weights).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_a_plan_takes_every_text_once_and_keeps_the_size() -> None:
    rng = np.random.default_rng(0)
    empty = np.zeros((0, 1))
    lengths = rng.integers(2, 90, 700)
    texts = [ScoredText(np.zeros(n, np.int32), np.zeros(n, np.bool_), empty, empty) for n in lengths]
    batches = plan(texts, 256, rng)
    assert sorted(index for batch in batches for index in batch) == list(range(700))
    assert all(len(batch) * max(lengths[batch]) <= 256 for batch in batches)


def test_a_batch_maps_ids_to_rows_of_the_head_and_drops_what_it_has_not() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], np.float32) / 0.5).astype(np.float16)
    text = ScoredText(
        int32([9, 8, 7]), np.array([True, True, False]), int32([[4, 3, 2], [5, 0, 1]]).reshape(2, 3), logits
    )
    batch = Batcher(torch.tensor([0, 2, 4]), 10, CPU).batch([text, text])
    assert batch.tokens.tolist() == [[9, 8, 7]] * 2
    assert batch.columns[:2].tolist() == [[2, 0, 1], [0, 0, 0]]
    torch.testing.assert_close(batch.probs[:2], torch.tensor([[0.5, 0.0, 0.25], [0.0, 0.25, 0.0]]), atol=1e-3, rtol=0)


class Stopped(Exception):
    pass


def test_a_run_that_was_ended_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "llama")
    texts = texts_of(directory, tmp_path / "corpus")
    batcher = Batcher(KEPT, VOCAB, CPU)

    def trained(checkpoint: Path, stop_at: int | None = None) -> dict[str, torch.Tensor]:
        student = Student(parse_source(directory), 2, KEPT, CPU)

        def progress(done: int, total: int, loss: float) -> None:
            if done == stop_at:
                raise Stopped

        train(student, batcher, texts, OPTIONS.training, checkpoint, progress)
        return student.learned.state_dict()

    whole = trained(tmp_path / "whole.pt")
    with pytest.raises(Stopped):
        trained(tmp_path / "cut.pt", stop_at=8)
    resumed = trained(tmp_path / "cut.pt")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    start = Student(parse_source(directory), 2, KEPT, CPU).learned.state_dict()
    assert not all(torch.equal(whole[name], start[name]) for name in whole)
    with pytest.raises(ModelRefused, match="checkpoint of another run"):
        train(
            Student(parse_source(directory), 2, KEPT, CPU),
            batcher,
            texts,
            replace(OPTIONS.training, seed=5),
            tmp_path / "cut.pt",
            silent,
        )


@pytest.mark.parametrize(
    ("right", "lookahead", "rounds"),
    [("1111111111", 4, [4, 4]), ("0000000", 4, [0, 0, 0]), ("1101110111", 3, [2, 3]), ("11", 4, [])],
)
def test_rounds_of_a_text(right: str, lookahead: int, rounds: list[int]) -> None:
    assert rounds_of(np.array([[it == "1" for it in right]]), lookahead) == rounds


def test_rounds_of_heads_look_at_the_place_in_the_block() -> None:
    """A token is right at the first place and wrong at the second: blocks of one."""
    right = np.array([[True] * 9, [False] * 9])
    assert rounds_of(right, 3) == [1, 1, 1]
    assert rounds_of(~right, 3) == [0] * 6


def test_rates_are_of_the_blocks_that_got_so_far() -> None:
    acceptance = Acceptance(passes=10, tokens=25, drafted=(10, 8), accepted=(8, 7), overlap=0.5)
    assert acceptance.by_position == (0.8, 0.875)
    assert acceptance.tokens_per_pass == 2.5


def drafted(engine: Engine, prefix: list[int], lookahead: int) -> list[int]:
    """Greedy tokens."""
    tokens = list(prefix)
    for _ in range(lookahead):
        sequence = engine.open(int32(tokens[:1]))
        (logits,) = engine.forward([Segment(sequence, int32(tokens), 1)])
        sequence.free()
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prefix) :]


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("architecture", ["llama_tied", "qwen2_biases"])
def test_from_a_target_to_a_draft_that_is_served_as_measured(tmp_path: Path, architecture: str, own_head: bool) -> None:
    directory = save_tiny(tmp_path / "model", architecture)
    report = distill(directory, tmp_path / "draft", tmp_path / "work", replace(OPTIONS, own_head=own_head), silent)
    assert ("head.weight" in DistilledDraft.load(tmp_path / "draft").tensors) == own_head
    assert report.after.overlap > report.before.overlap, "it learned nothing"
    engine = load_engine(str(tmp_path / "draft"), EngineOptions(kv_pages=400, dtype="float32", target=directory))
    passes = tokens = 0
    for text in Corpus(tmp_path / "work" / "corpus", OPTIONS.corpus).held_out():
        said, at = text.tokens.tolist(), 2
        while at + OPTIONS.lookahead < len(said):
            guess = drafted(engine, said[:at], OPTIONS.lookahead)
            kept = next((i for i, token in enumerate(guess) if token != said[at + i]), OPTIONS.lookahead)
            at, passes, tokens = at + kept + 1, passes + 1, tokens + kept + 1
    # Served weights are rounded to bfloat16: near-ties may fall the other way.
    assert abs(passes - report.after.passes) <= 0.1 * passes
    assert tokens / passes == pytest.approx(report.after.tokens_per_pass, rel=0.1)


def test_an_exit_learns_above_the_targets_own_layers(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "llama")
    report = distill(directory, tmp_path / "exit", tmp_path / "work", replace(OPTIONS, exit_layers=2), silent)
    made = DistilledDraft.load(tmp_path / "exit")
    assert (made.layers, made.shared) == (3, 2)
    assert {name.split(".")[1] for name in made.tensors if name.startswith("layers.")} == {"2"}
    assert report.after.overlap > report.before.overlap, "it learned nothing"
    # What it stands on is what the target has: it goes on from there without a difference.
    student = Student.of(made, parse_source(directory), CPU)
    before = Student(parse_source(directory), 3, made.tensors["kept"], CPU, shared=2)
    assert not any(weight.requires_grad for name, weight in student.named_parameters() if "layers.0" in name)
    served = load_engine(str(tmp_path / "exit"), EngineOptions(kv_pages=100, dtype="float32", target=directory))
    words = int32([3, 60, 7, 7, 30])
    (logits,) = served.forward([Segment(served.open(words), words, 5)])
    kept = made.tensors["kept"].long()
    with torch.inference_mode():
        wanted = torch.ones(1, 5, dtype=torch.bool)
        learned, fresh = (it(torch.from_numpy(words).long()[None], wanted) for it in (student, before))
    torch.testing.assert_close(logits[:, kept], learned, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(learned, fresh, atol=2e-2)


def test_an_exit_is_not_deeper_than_the_target(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "llama")
    with pytest.raises(ModelRefused, match="has 3 layers"):
        distill(directory, tmp_path / "exit", tmp_path / "work", replace(OPTIONS, exit_layers=3), silent)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path / "model", "llama")
    first = distill(directory, tmp_path / "draft", tmp_path / "work", OPTIONS, silent)
    parts: list[str] = []
    again = distill(
        directory, tmp_path / "draft", tmp_path / "work", OPTIONS, lambda part, *_, **__: parts.append(part)
    )
    assert again == first
    assert "training" not in parts


@pytest.mark.parametrize("own_head", [True, False])
def test_a_draft_goes_on_learning(tmp_path: Path, own_head: bool) -> None:
    directory = save_tiny(tmp_path / "model", "llama")
    options = replace(OPTIONS, own_head=own_head)
    first = distill(directory, tmp_path / "first", tmp_path / "work", options, silent)
    with pytest.raises(ModelRefused, match="checkpoint of another run"):
        go_on(directory, tmp_path, tmp_path / "work")
    (tmp_path / "work" / "checkpoint.pt").unlink()
    second = go_on(directory, tmp_path, tmp_path / "work")
    # Weights were rounded to bfloat16 between the two.
    assert second.before.overlap == pytest.approx(first.after.overlap, abs=0.01)
    assert second.after.overlap > second.before.overlap
    drafts = [DistilledDraft.load(tmp_path / name) for name in ("first", "second")]
    assert drafts[0].tensors.keys() == drafts[1].tensors.keys()
    assert torch.equal(drafts[0].tensors["kept"], drafts[1].tensors["kept"])
    assert drafts[0].layers == drafts[1].layers == 1


def go_on(directory: str, at: Path, work: Path) -> Report:
    """From the draft `first` to `second`; what the options say about its size is for drafts from the beginning."""
    options = replace(OPTIONS, layers=3, kept=40, begin_with=at / "first")
    return distill(directory, at / "second", work, options, silent)


def test_only_a_draft_of_the_target_goes_on(tmp_path: Path) -> None:
    first = save_tiny(tmp_path / "model", "llama")
    untrained_draft(first, torch.arange(32), tmp_path / "draft")
    options = replace(OPTIONS, begin_with=tmp_path / "draft")
    with pytest.raises(ModelRefused, match="layers are other ones"):
        distill(save_tiny(tmp_path / "other", "qwen2_biases"), tmp_path / "out", tmp_path / "work", options, silent)
    options = replace(OPTIONS, begin_with=tmp_path)
    with pytest.raises(ModelRefused, match="no whole draft"):
        distill(first, tmp_path / "out", tmp_path / "work", options, silent)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("gpt2", "gpt2 is not built as Llama is"),
        ("gemma2_softcap", "gemma2 is not built as Llama is"),
        ("gpt_oss_sinks", "sinks"),
    ],
)
def test_other_architectures_are_refused_with_a_sentence(tmp_path: Path, architecture: str, why: str) -> None:
    with pytest.raises(ModelRefused, match=why) as refusal:
        distill(save_tiny(tmp_path / "m", architecture), tmp_path / "draft", tmp_path / "work", OPTIONS, silent)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("options", [replace(OPTIONS, layers=9), replace(OPTIONS, kept=VOCAB + 1)])
def test_more_than_the_target_has_is_refused(tmp_path: Path, options: object) -> None:
    with pytest.raises(ModelRefused, match=r"has 3 layers and a vocabulary of 61 tokens"):
        distill(save_tiny(tmp_path / "m", "llama"), tmp_path / "draft", tmp_path / "work", options, silent)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["synthetic:vocab_size=8", "gguf:/no/such.gguf"])
def test_what_has_no_layers_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelRefused, match=r"no layers|does not exist"):
        distill(name, tmp_path / "draft", tmp_path / "work", OPTIONS, silent)
