import threading

import numpy as np
import pytest
import torch

from outrider.law import parallel
from outrider.law import rows as rows_module
from outrider.law import sample as sample_module
from outrider.law.noise import Purpose, RoundNoise
from outrider.law.race import race
from outrider.law.rows import Sample, Support, SupportRows, sample_rows, support_rows

LOOKAHEAD = 3


def softmax(rows, vocab, scale=3.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).mul(scale).softmax(dim=1)


def ties(rows, vocab):
    """Every token equal."""
    return torch.full((rows, vocab), 1.0 / vocab)


def heads(rows, vocab):
    """One likely token, and all others alike below what races from the start."""
    probs = torch.full((rows, vocab), 0.9 / (vocab - 1))
    probs[:, 7] = 0.1
    return probs


def one_hot(rows, vocab):
    return torch.eye(vocab)[[(7 * row + 3) % vocab for row in range(rows)]]


def top_k(rows, vocab):
    probs = softmax(rows, vocab)
    kept = torch.where(probs >= probs.topk(5).values[:, -1:], probs, 0.0)
    return kept / kept.sum(dim=1, keepdim=True)


def steep(rows, vocab):
    """Tails down to the smallest numbers there are."""
    return softmax(rows, vocab, scale=25.0)


LAWS = {
    "full support": (softmax, 500),
    "flat": (lambda rows, vocab: softmax(rows, vocab, 0.01), 3000),
    "ties": (ties, 100),
    "one-hot": (one_hot, 40),
    "top-k": (top_k, 900),
    "steep": (steep, 2000),
    "152k": (softmax, 151_936),
    "one head": (heads, 40_000),
    "nobody is likely": (ties, 30_000),
    "two tokens": (softmax, 2),
    "exactly one chunk": (softmax, 512),
}


def law(name, rows):
    make, vocab = LAWS[name]
    return make(rows, vocab)


def brute_sample(probs, noise):
    ids = np.arange(probs.shape[1], dtype=np.int32)
    return [
        race(row, noise.exponentials(Purpose.COUPLE, noise.base_length + index, ids)) for index, row in enumerate(probs)
    ]


def brute_support(probs, block):
    """(probs, masses, tokens) from the definition, without chunks."""
    on_support, masses, tokens, start = [], [], [], 0
    for index, row in enumerate(probs.astype(np.float64)):
        size = int(block.sizes[index]) if index < len(block.sizes) else 0
        ids = block.token_ids[start : start + size]
        start += size
        on_support.extend(row[ids])
        row[ids] = 0
        reached = np.cumsum(row)
        uniform = block.noise.tail(Purpose.RESAMPLE, block.noise.base_length + index)[1]
        masses.append(reached[-1])
        tokens.append(int(np.searchsorted(reached, uniform * reached[-1], side="right")) if reached[-1] > 0 else 0)
    return on_support, masses, tokens


def block_over(probs, noise, size=8):
    """A block whose support is the likeliest and some other tokens of each row but the last."""
    generator = np.random.default_rng(noise.seed)
    rows = []
    for row in probs[:-1]:
        size = min(size, len(row))
        likeliest = np.argsort(-row)[: size - size // 2]
        others = generator.choice(len(row), size // 2, replace=False)
        rows.append(np.unique(np.concatenate([likeliest, others])).astype(np.int32))
    return Support(noise, np.array([len(row) for row in rows], np.int32), np.concatenate(rows))


@pytest.mark.parametrize("name", LAWS)
def test_sample_is_the_race_over_the_whole_law(name):
    probs = law(name, LOOKAHEAD + 1)
    for seed in range(3 if name == "152k" else 40):
        noise = RoundNoise(seed << 40 | seed, 10 + seed)
        (tokens,) = sample_rows(probs, [Sample(noise, LOOKAHEAD + 1)])
        assert tokens.dtype == np.int32
        assert tokens.tolist() == brute_sample(probs.numpy(), noise)


@pytest.mark.parametrize("name", LAWS)
def test_support_is_the_law_on_the_support_and_a_draw_outside(name):
    probs = law(name, LOOKAHEAD + 1)
    before = probs.clone()
    for seed in range(3 if name == "152k" else 40):
        block = block_over(probs.numpy(), RoundNoise(seed, 10 + seed))
        (made,) = support_rows(probs, [block])
        on_support, masses, tokens = brute_support(probs.numpy(), block)
        assert made.probs.tolist() == on_support
        np.testing.assert_allclose(made.tail_masses, masses, rtol=1e-12, atol=0)
        assert made.tail_tokens.tolist() == tokens
    assert torch.equal(probs, before)


def test_a_support_that_holds_all_of_the_law_leaves_a_tail_of_exactly_nothing():
    probs = top_k(3, 900)
    ids = [np.flatnonzero(row).astype(np.int32) for row in probs.numpy()[:2]]
    block = Support(RoundNoise(1, 5), np.array([len(one) for one in ids], np.int32), np.concatenate(ids))
    (made,) = support_rows(probs, [block])
    assert made.tail_masses[:2].tolist() == [0.0, 0.0]
    assert made.tail_tokens[:2].tolist() == [0, 0]
    assert made.tail_masses[2] == pytest.approx(1.0)


def test_a_tiny_tail_is_summed_and_not_what_is_left_of_one():
    probs = torch.zeros(1, 2000)
    probs[0, 5] = 1.0
    probs[0, 1000:1010] = 1e-20
    block = Support(RoundNoise(1, 5), np.array([1], np.int32), np.array([5], np.int32))
    made = support_rows(torch.cat([probs, probs]), [block])[0]
    assert made.tail_masses[0] == pytest.approx(1e-19, rel=1e-6)
    assert 1000 <= made.tail_tokens[0] < 1010


def test_the_tails_draw_has_the_tails_law():
    probs = torch.tensor([[0.05, 0.0, 0.5, 0.25, 0.2]]).repeat(1, 1)
    drawn = np.zeros(5)
    for seed in range(4000):
        (made,) = support_rows(probs, [Support(RoundNoise(seed, 3), np.empty(0, np.int32), np.empty(0, np.int32))])
        drawn[made.tail_tokens[0]] += 1
    np.testing.assert_allclose(drawn / 4000, probs[0].numpy(), atol=0.025)
    assert drawn[1] == 0


def test_sample_has_the_law():
    probs = torch.tensor([[0.05, 0.0, 0.5, 0.25, 0.2]])
    drawn = np.zeros(5)
    for seed in range(4000):
        drawn[sample_rows(probs, [Sample(RoundNoise(seed, 3), 1)])[0][0]] += 1
    np.testing.assert_allclose(drawn / 4000, probs[0].numpy(), atol=0.025)
    assert drawn[1] == 0


def test_a_row_does_not_depend_on_its_company():
    probs = softmax(9, 1300)
    noises = [RoundNoise(seed, 4) for seed in (1, 2, 3)]
    blocks = [block_over(probs.numpy()[3 * index : 3 * index + 3], noise) for index, noise in enumerate(noises)]
    together = support_rows(probs, blocks)
    tokens = sample_rows(probs, [Sample(noise, 3) for noise in noises])
    for index, (noise, block) in enumerate(zip(noises, blocks, strict=True)):
        own = probs[3 * index : 3 * index + 3].clone()
        (alone,) = support_rows(own, [block])
        for field in ("probs", "tail_masses", "tail_tokens"):
            assert getattr(alone, field).tolist() == getattr(together[index], field).tolist()
        assert sample_rows(own, [Sample(noise, 3)])[0].tolist() == tokens[index].tolist()


def test_coupled_rows_depend_on_the_position_and_not_on_the_base_length():
    probs = softmax(1, 300).repeat(12, 1)
    (twelve,) = sample_rows(probs, [Sample(RoundNoise(9, 20), 12)])
    alone = [sample_rows(probs[:1], [Sample(RoundNoise(9, 20 + index), 1)])[0][0] for index in range(12)]
    assert twelve.tolist() == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize("name", LAWS)
def test_the_way_of_other_devices_gives_the_same_rows(name, monkeypatch):
    """The code for accelerators, run on a CPU; sums may differ in their last bits."""
    probs, noise = law(name, 3), RoundNoise(77, 30)
    block = block_over(probs.numpy(), noise)
    here = sample_rows(probs, [Sample(noise, 3)]), support_rows(probs, [block])
    monkeypatch.setattr(sample_module, "_at_least", sample_module._at_least_on_device)
    monkeypatch.setattr(rows_module, "_chunk_sums", rows_module._chunk_sums_on_device)
    there = sample_rows(probs, [Sample(noise, 3)]), support_rows(probs, [block])
    assert here[0][0].tolist() == there[0][0].tolist()
    assert here[1][0].probs.tolist() == there[1][0].probs.tolist()
    np.testing.assert_allclose(here[1][0].tail_masses, there[1][0].tail_masses, rtol=1e-14, atol=0)
    assert here[1][0].tail_tokens.tolist() == there[1][0].tail_tokens.tolist()


def test_what_is_no_law_is_refused():
    for broken in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite probabilities"):
            sample_rows(torch.full((1, 600), broken), [Sample(RoundNoise(1, 1), 1)])
    with pytest.raises(ValueError, match="rows of law"):
        sample_rows(softmax(2, 9), [Sample(RoundNoise(1, 1), 1)])
    with pytest.raises(ValueError, match="rows of law"):
        support_rows(softmax(2, 9), [Support(RoundNoise(1, 1), np.empty(0, np.int32), np.empty(0, np.int32))])


def test_support_rows_are_arrays_of_the_documented_types():
    probs = softmax(3, 50)
    (made,) = support_rows(probs, [block_over(probs.numpy(), RoundNoise(1, 1))])
    assert isinstance(made, SupportRows)
    assert (made.probs.dtype, made.tail_masses.dtype, made.tail_tokens.dtype) == (np.float32, np.float64, np.int32)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(threads, monkeypatch):
    monkeypatch.setattr(parallel, "_LEAST_NUMBERS", 1)
    probs, noise = softmax(9, 1300), RoundNoise(5, 4)
    block = block_over(probs.numpy(), noise)
    used, results = set(), []
    for count in (1, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        results.append((sample_rows(probs, [Sample(noise, 9)])[0].tolist(), support_rows(probs, [block])[0]))
    parallel.for_rows(lambda row: used.add(threading.get_ident()), 1000, 10)
    assert len(used) > 1
    assert results[0][0] == results[1][0]
    for field in ("probs", "tail_masses", "tail_tokens"):
        assert getattr(results[0][1], field).tolist() == getattr(results[1][1], field).tolist()


def test_an_error_in_a_thread_is_the_callers(monkeypatch):
    monkeypatch.setattr(parallel, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    probs = softmax(4, 100)
    probs[3] = 0.0
    with pytest.raises(ValueError, match="finite probabilities"):
        sample_rows(probs, [Sample(RoundNoise(1, 1), 4)])
