"""The text is the target's: every law that is kept is what the model's own forward says at that position."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.distill.corpus import Corpus, CorpusOptions, most_frequent
from outrider.distill.openings import Frame, Opening, Openings
from outrider.distill.shard import ScoredText, likeliest, load_shard, save_shard
from outrider.distill.writer import Writer, WriterOptions
from outrider.lm.engine import ModelRefused
from outrider.lm.tokenizer import load_tokenizer
from tests.harness.distilling import WRITER, load_target, silent
from tests.harness.models import save_tiny


def written(target: str, options: WriterOptions, openings: list[Opening]) -> list[ScoredText]:
    return Writer(load_target(target), options).write(openings, np.random.default_rng(1), silent)


@pytest.mark.parametrize("architecture", ["llama", "qwen2_biases", "qwen3"])
def test_laws_are_those_of_the_models_own_forward(tmp_path: Path, architecture: str) -> None:
    directory = save_tiny(tmp_path, architecture)
    openings = [Opening((token, token + 1)) for token in range(20)]
    texts = written(directory, WRITER, openings)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert sorted(tuple(text.tokens[1:3].tolist()) for text in texts) == [(token, token + 1) for token in range(20)]
    for text in texts:
        with torch.no_grad():
            logits = model(torch.from_numpy(text.tokens.astype(np.int64))[None]).logits[0]
        assert text.scored.tolist() == [False, False, *[True] * (len(text.tokens) - 3), False]
        ids, expected = likeliest(logits[text.scored], WRITER.k)
        assert np.mean(ids[:, 0] == text.ids[:, 0]) > 0.95  # near-ties
        assert np.abs(expected - text.logits.astype(np.float32)).max() < 0.02


def test_greedy_answers_are_the_likeliest_tokens_and_end_where_they_should(tmp_path: Path) -> None:
    options = WriterOptions(slots=4, answer_tokens=9, temperatures=(0.0,), k=4)
    for text in written(save_tiny(tmp_path, "llama"), options, [Opening((token,)) for token in range(12)]):
        assert text.tokens[2:].tolist() == text.ids[:, 0].tolist()
        assert len(text.tokens) == 2 + 9 or text.tokens[-1] == 2
        assert 2 not in text.tokens[2:-1]


def test_a_context_without_room_is_refused(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama", max_position_embeddings=20)
    assert max(len(it.tokens) for it in written(directory, WRITER, [Opening((1,))])) <= 20
    with pytest.raises(ModelRefused, match="a context of 20 tokens has no room"):
        Writer(load_target(directory), WriterOptions(turn_tokens=19))


def test_an_attention_that_the_cache_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="a window shorter than the texts"):
        written(save_tiny(tmp_path, "mistral_window"), WRITER, [Opening((1,))])


def test_a_turn_is_framed_by_the_chat_template() -> None:
    tokenizer = load_tokenizer("synthetic:vocab_size=26")
    tokenizer.chat_template = "a{{ messages[0]['content'] }}{% if add_generation_prompt %}bc{% endif %}"
    assert Frame.of(tokenizer) == Frame((0,), (1, 2))
    tokenizer.chat_template = None
    assert Frame.of(tokenizer) == Frame.of(None) == Frame((0,), ())
    drawn = Openings(tokenizer, 26, ["abc"]).draw(200, np.random.default_rng(0))
    assert 70 < drawn.count(Opening((0, 1, 2), whole=True)) < 130


def test_a_turn_is_closed_by_the_template_and_a_whole_one_stays(tmp_path: Path) -> None:
    target = load_target(save_tiny(tmp_path, "llama"))
    object.__setattr__(target, "frame", Frame((1, 3), (60, 59)))
    openings = [Opening((4, 5), whole=True)] * 4 + [Opening((6,))] * 4
    texts = Writer(target, WRITER).write(openings, np.random.default_rng(0), silent)
    for text in texts:
        tokens = text.tokens.tolist()
        close = next(i for i in range(3, len(tokens)) if tokens[i : i + 2] == [60, 59])
        assert close <= 2 + WRITER.turn_tokens
        assert tokens[2] == 6 or close == 4
        assert not text.scored[close], "what the template says has no law"
        assert bool(text.scored[close + 1 : -1].all())


def test_the_k_likeliest_are_those_of_topk() -> None:
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    ids, relative = likeliest(logits, 20)
    best = logits.topk(20)
    assert ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(relative, best.values - best.values[:, :1], atol=1e-6)
    assert likeliest(logits[:, :5], 20)[0].shape == (7, 5)


def test_a_shard_holds_what_was_put_in(tmp_path: Path) -> None:
    texts = written(save_tiny(tmp_path / "model", "llama"), WRITER, [Opening((token,)) for token in range(9)])
    save_shard(tmp_path / "shard", texts)
    for ours, theirs in zip(texts, load_shard(tmp_path / "shard"), strict=True):
        assert all(np.array_equal(mine, theirs.__dict__[name]) for name, mine in vars(ours).items())
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_a_corpus_is_written_once_and_again_the_same(tmp_path: Path) -> None:
    target = load_target(save_tiny(tmp_path / "model", "llama"))
    options = CorpusOptions(texts=96, held_out=8, writer=WRITER)
    counts: list[tuple[int, int]] = []
    first = Corpus(tmp_path / "a", options)
    first.write(target, 2, lambda done, total: counts.append((done, total)))
    assert counts[-1] == (104, 104)
    assert (len(first.texts()), len(first.held_out())) == (96, 8)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*.npy")}
    first.write(target, 1, silent)
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*.npy")}
    other = Corpus(tmp_path / "b", options)
    other.write(target, 1, silent)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first.texts(), other.texts(), strict=True))
    more = Corpus(tmp_path / "a", CorpusOptions(texts=97, held_out=8, writer=WRITER))
    more.write(target, 1, silent)
    assert len(more.texts()) == 144
    with pytest.raises(ModelRefused, match="other settings"):
        Corpus(tmp_path / "a", CorpusOptions(texts=96, held_out=8, seed=1, writer=WRITER)).write(target, 1, silent)


def test_the_most_frequent_tokens_are_those_that_the_target_would_say() -> None:
    ids = np.array([[5, 1], [5, 2], [3, 1], [5, 3]], np.int32)
    text = ScoredText(np.zeros(5, np.int32), np.array([True] * 4 + [False]), ids, np.zeros((4, 2), np.float16))
    assert most_frequent([text], 10, 3).tolist() == [1, 3, 5]
