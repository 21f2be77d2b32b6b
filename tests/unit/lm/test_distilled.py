import json
from pathlib import Path

import pytest
import torch

from outrider.law.audit import audit
from outrider.law.noise import RoundNoise
from outrider.lm.distilled import WEIGHTS_FILE, DistilledDraft
from outrider.lm.engine import ModelRefused, Segment
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.source import DRAFT_FILE, SourceKind, parse_source
from outrider.lm.tokenizer import load_tokenizer
from tests.harness.distilling import untrained_draft
from tests.harness.models import VOCAB, save_tiny
from tests.harness.workers import block_of, int32, open_command, start_draft

KEPT = torch.tensor([1, 2, 5, 8, 13, 21, 34, 55])
FULL = EngineOptions(kv_pages=100, layers=1)


def serving(target: str) -> EngineOptions:
    return EngineOptions(kv_pages=100, target=target)


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "qwen2_biases", "qwen3"])
def test_a_draft_serves_its_own_layers_and_the_kept_rows_of_the_targets_head(tmp_path: Path, architecture: str) -> None:
    target = save_tiny(tmp_path / "target", architecture)
    untrained_draft(target, KEPT, tmp_path / "draft")
    engine, whole = load_engine(str(tmp_path / "draft"), serving(target)), load_engine(target, FULL)
    words = int32([3, 60, 7, 7, 30])
    (logits,) = engine.forward([Segment(engine.open(words), words, 5)])
    (expected,) = whole.forward([Segment(whole.open(words), words, 5)])
    assert (engine.info.vocab_size, engine.info.padded_vocab_size) == (VOCAB, VOCAB)
    assert engine.info.vocab_fingerprint == whole.info.vocab_fingerprint
    torch.testing.assert_close(logits[:, KEPT], expected[:, KEPT], rtol=1e-4, atol=1e-4)
    others = [index for index in range(VOCAB) if index not in KEPT]
    assert bool((logits[:, others] < -1e29).all())


def test_an_exit_shares_the_first_layers(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    exit_of = untrained_draft(target, KEPT, tmp_path / "exit", shared=1)
    assert not any(name.startswith("layers.0.") for name in exit_of.tensors)
    engine = load_engine(str(tmp_path / "exit"), serving(target))
    whole = load_engine(target, EngineOptions(kv_pages=100, layers=2))
    words = int32([3, 60, 7, 7, 30])
    (logits,) = engine.forward([Segment(engine.open(words), words, 5)])
    (expected,) = whole.forward([Segment(whole.open(words), words, 5)])
    torch.testing.assert_close(logits[:, KEPT], expected[:, KEPT], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [-1, 1, 2, "1"])
def test_an_exit_without_layers_of_its_own_is_refused(tmp_path: Path, shared: object) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    untrained_draft(target, KEPT, tmp_path / "exit")
    settings = json.loads((tmp_path / "exit" / DRAFT_FILE).read_text())
    (tmp_path / "exit" / DRAFT_FILE).write_text(json.dumps(settings | {"shared": shared}))
    assert "no whole draft" in refused(tmp_path / "exit", target)


async def test_the_law_shipped_is_the_law_drawn_from_and_knows_kept_tokens_alone(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    untrained_draft(target, KEPT, tmp_path / "draft")
    async with start_draft(load_engine(str(tmp_path / "draft"), serving(target))) as draft:
        tokens, law = block_of(await draft.stream().ask(open_command("s", [1, 60, 3], 8, seed=9, top=VOCAB)))
    assert law.sizes.tolist() == [len(KEPT)] * 8
    assert set(law.token_ids.tolist()) == set(KEPT.tolist())
    assert audit(int32(tokens), law, RoundNoise(9, 3), VOCAB) is None


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = untrained_draft(save_tiny(tmp_path / "target", "llama"), KEPT, tmp_path / "draft")
    loaded = DistilledDraft.load(tmp_path / "draft")
    assert (loaded.target, loaded.layers, loaded.vocab_fingerprint) == ("target", 1, saved.vocab_fingerprint)
    assert loaded.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in saved.tensors.items())
    assert parse_source(str(tmp_path / "draft")).kind is SourceKind.DISTILLED


def test_rows_of_its_own_take_the_place_of_the_targets(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    draft = untrained_draft(target, KEPT, tmp_path / "draft")
    rows = torch.zeros(len(KEPT), 32)
    DistilledDraft("target", 1, draft.vocab_fingerprint, draft.tensors | {"head.weight": rows}).save(tmp_path / "draft")
    engine = load_engine(str(tmp_path / "draft"), serving(target))
    words = int32([3, 4])
    (logits,) = engine.forward([Segment(engine.open(words), words, 1)])
    assert logits[0, KEPT].tolist() == [0.0] * len(KEPT)


def refused(directory: Path, target: str = "") -> str:
    with pytest.raises(ModelRefused) as failure:
        load_engine(str(directory), serving(target))
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_a_draft_whose_target_is_not_there_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    draft = untrained_draft(save_tiny(tmp_path / "target", "llama"), KEPT, tmp_path / "draft")
    DistilledDraft(f"gguf:{path.name}", 1, draft.vocab_fingerprint, draft.tensors).save(tmp_path / "draft")
    assert "needs its target, gguf:x.gguf: name it with --target-model" in refused(tmp_path / "draft")
    with pytest.raises(ModelRefused, match="no tokenizer: its target has"):
        load_tokenizer(str(tmp_path / "draft"))


def test_another_target_is_refused(tmp_path: Path) -> None:
    untrained_draft(save_tiny(tmp_path / "target", "llama"), KEPT, tmp_path / "draft")
    other_words = save_tiny(tmp_path / "words", "llama", vocab_size=64)
    assert "whose vocabulary is another" in refused(tmp_path / "draft", other_words)
    other_layers = save_tiny(tmp_path / "layers", "llama", intermediate_size=40)
    assert "whose layers are other ones" in refused(tmp_path / "draft", other_layers)
    assert "cannot be synthetic" in refused(tmp_path / "draft", "synthetic:vocab_size=61")


def test_a_broken_draft_is_refused(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    directory = tmp_path / "draft"
    untrained_draft(target, KEPT, directory)
    settings = json.loads((directory / DRAFT_FILE).read_text())
    (directory / DRAFT_FILE).write_text(json.dumps(settings | {"format": 2}))
    assert "another format" in refused(directory, target)
    (directory / DRAFT_FILE).write_text(json.dumps(settings))
    weights = (directory / WEIGHTS_FILE).read_bytes()
    (directory / WEIGHTS_FILE).write_bytes(weights[: len(weights) // 2])
    assert "no whole draft" in refused(directory, target)
    (directory / WEIGHTS_FILE).unlink()
    assert "no whole draft" in refused(directory, target)
