"""The synthetic model: deterministic, dependent on the last tokens alone, padded."""

import numpy as np
import pytest
import torch

from outrider.lm.engine import ModelRefused, Segment
from outrider.lm.synthetic import PADDING_LOGIT, SyntheticEngine, _RowCache
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.token_sequence import TokenSequence
from outrider.lm.warm_up import warm_up

TOKENS = np.array([1, 2, 3, 1, 2, 3, 7, 2, 3], np.int32)


def logits(spec: SyntheticSpec, tokens: np.ndarray = TOKENS) -> torch.Tensor:  # type: ignore[type-arg]
    engine = SyntheticEngine(spec)
    (rows,) = engine.forward([Segment(engine.open(tokens), tokens, len(tokens))])
    return rows


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_rows_depend_on_the_last_tokens_alone_however_they_come(order: int) -> None:
    spec = SyntheticSpec(vocab_size=8, padded_vocab_size=11, order=order)
    whole = logits(spec)
    assert whole.shape == (9, 8)
    engine = SyntheticEngine(spec)
    sequence, rows = engine.open(TOKENS), []
    for start, stop in ((0, 1), (1, 4), (4, 5), (5, 9)):
        rows += engine.forward([Segment(sequence, TOKENS[start:stop], stop - start)])
    assert torch.equal(torch.cat(rows), whole)
    equal = [torch.equal(whole[2], whole[index]) for index in (5, 8)]
    assert equal == [True, order < 3]
    assert torch.equal(whole[0], whole[3]) == (order < 2)


def test_truncation_goes_back() -> None:
    engine = SyntheticEngine(SyntheticSpec(vocab_size=8, order=2))
    sequence = engine.open(TOKENS)
    engine.forward([Segment(sequence, TOKENS, 0)])
    sequence.truncate(3)
    (row,) = engine.forward([Segment(sequence, TOKENS[3:4], 1)])
    assert torch.equal(row[0], logits(SyntheticSpec(vocab_size=8, order=2))[3])
    with pytest.raises(ValueError, match="cannot truncate"):
        sequence.truncate(5)
    sequence.free()
    sequence.free()
    assert sequence.length == 0


def test_seed_and_noise_make_other_models() -> None:
    base = logits(SyntheticSpec(seed=3))
    assert torch.equal(base, logits(SyntheticSpec(seed=3)))
    assert not torch.allclose(base, logits(SyntheticSpec(seed=4)), atol=0.1)
    near = logits(SyntheticSpec(seed=3, noise=0.1))
    assert 0.02 < float((near - base).std()) < 0.2
    assert not torch.equal(near, logits(SyntheticSpec(seed=3, noise=0.1, noise_seed=2)))


@pytest.mark.parametrize("agree", [0.0, 0.3, 0.9])
def test_a_draft_agrees_as_often_as_it_is_told(agree: float) -> None:
    tokens = np.random.default_rng(1).integers(0, 50, 20_000).astype(np.int32)
    own, scripted = (logits(SyntheticSpec(vocab_size=50, agree=share), tokens) for share in (1.0, agree))
    right = (own == scripted).all(dim=1)
    assert float(right.float().mean()) == pytest.approx(agree, abs=0.012)
    wrong = ~right
    assert torch.equal(own[wrong].roll(1, dims=1), scripted[wrong])
    # No position knows of the one before it.
    both = (right[1:] & right[:-1]).float().mean()
    assert float(both) == pytest.approx(agree**2, abs=0.015)


def test_agreement_does_not_depend_on_how_the_tokens_come() -> None:
    spec = SyntheticSpec(agree=0.5)
    engine = SyntheticEngine(spec)
    sequence, rows = engine.open(TOKENS), []
    for start, stop in ((0, 1), (1, 4), (4, 9)):
        rows += engine.forward([Segment(sequence, TOKENS[start:stop], stop - start)])
    assert torch.equal(torch.cat(rows), logits(spec))


def test_a_pass_takes_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("outrider.lm.synthetic.time.sleep", slept.append)
    engine = SyntheticEngine(SyntheticSpec(pass_ms=3, item_us=100, position_us=10))
    engine.forward([Segment(engine.open(TOKENS), TOKENS, 1), Segment(engine.open(TOKENS), TOKENS[:3], 0)])
    assert slept == [0.0, pytest.approx(0.003 + 0.0002 + 0.00012)]


def test_logits_are_standard_normal_times_scale() -> None:
    rows = logits(SyntheticSpec(vocab_size=50_000, order=1, scale=2.0))
    assert float(rows.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(rows.std()) == pytest.approx(2.0, abs=0.02)


def test_the_law_is_the_same_on_every_machine() -> None:
    expected = [0.887307, -0.133156, 1.383276]
    assert logits(SyntheticSpec(vocab_size=3, seed=1), TOKENS[:1])[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_padding_is_cut_but_there() -> None:
    spec = SyntheticSpec(vocab_size=8, padded_vocab_size=11)
    assert SyntheticEngine(spec).info.padded_vocab_size == 11
    assert _RowCache(spec).lookup(np.zeros((1, 2), np.int32))[0, 8:].tolist() == [PADDING_LOGIT] * 3


def test_the_row_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lm.synthetic._CACHE_FLOATS", 8 * 4)
    cache = _RowCache(SyntheticSpec(vocab_size=8, order=1))
    unbounded = logits(SyntheticSpec(vocab_size=8, order=1), np.arange(8, dtype=np.int32))
    for _ in range(3):
        rows = cache.lookup(np.arange(8, dtype=np.int32)[:, None])
        assert np.array_equal(rows, unbounded.numpy())
    for token in range(8):
        cache.lookup(np.full((1, 1), token, np.int32))
        assert len(cache._rows) <= 8


def test_another_engines_sequence_is_refused() -> None:
    engine = SyntheticEngine(SyntheticSpec())

    class Other:
        length = 0

        def truncate(self, length: int) -> None: ...

        def free(self) -> None: ...

    with pytest.raises(TypeError, match="Other"):
        engine.forward([Segment(Other(), TOKENS, 1)])


def test_warm_up_leaves_nothing() -> None:
    opened: list[TokenSequence] = []

    class Watched(SyntheticEngine):
        def open(self, tokens: np.ndarray) -> TokenSequence:  # type: ignore[type-arg,override]
            opened.append(super().open(tokens))
            return opened[-1]

    warm_up(Watched(SyntheticSpec()))
    assert [sequence.length for sequence in opened] == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("colour=3", "unknown setting 'colour'"), ("seed=x", "no number"), ("vocab_size=1", "at least")],
)
def test_bad_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        SyntheticSpec.parse(text)
