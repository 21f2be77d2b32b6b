import numpy as np
import torch
from scipy import stats

from outrider.law.draft import point_mass, propose, propose_each, truncate
from outrider.law.noise import Purpose, RoundNoise
from outrider.law.race import scores


def test_truncate_keeps_the_likeliest_renormalised_and_ordered():
    probs = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15], [0.0, 0.0, 1.0, 0.0, 0.0]])
    (ids, kept), (one_id, one) = truncate(probs, 3)
    assert ids.tolist() == [1, 3, 4]
    assert ids.dtype == np.int32
    assert kept.dtype == np.float32
    np.testing.assert_allclose(kept, np.array([0.4, 0.3, 0.15]) / 0.85, rtol=1e-6)
    assert (one_id.tolist(), one.tolist()) == ([2], [1.0])


def test_truncate_takes_lower_ids_first_among_equals():
    probs = torch.full((3, 4096), 1 / 4096)
    assert all(ids.tolist() == list(range(10)) for ids, _ in truncate(probs, 10))


def test_truncate_matches_a_stable_sort():
    generator = torch.Generator().manual_seed(0)
    # bfloat16 logits: many equal probabilities.
    probs = (torch.randn(8, 500, generator=generator) * 2).bfloat16().float().softmax(dim=1)
    for top in (1, 7, 32, 499, 500, 1000):
        for row, (ids, kept) in zip(probs, truncate(probs, top), strict=True):
            expected = np.argsort(-row.numpy(), kind="stable")[:top]
            assert ids.tolist() == expected.tolist()
            assert abs(kept.sum(dtype=np.float64) - 1) < 1e-6


def test_truncate_ships_no_zero_after_rounding():
    probs = torch.tensor([[1.0, 1e-45, 0.0]])
    ((ids, kept),) = truncate(probs, 3)
    assert (kept > 0).all()
    assert len(ids) == len(kept)


def test_propose_draws_from_exactly_the_numbers_shipped():
    ((ids, probs),) = truncate(torch.tensor([[0.05, 0.45, 0.3, 0.2, 0.0]]), 3)
    positions = np.repeat(np.arange(100_000), len(ids))
    noise = RoundNoise(11, 0)
    exponentials = noise.exponentials(Purpose.PROPOSE, positions, np.tile(ids, 100_000)).reshape(-1, len(ids))
    winners = scores(np.broadcast_to(probs, exponentials.shape), exponentials).argmin(axis=1)
    assert ids[winners[:200]].tolist() == [propose(ids, probs, noise, position) for position in range(200)]
    seen = np.bincount(winners, minlength=len(ids))
    assert stats.chisquare(seen, probs.astype(float) / probs.sum(dtype=float) * len(winners)).pvalue > 1e-3


def test_rows_of_many_sessions_are_drawn_as_each_alone():
    generator = torch.Generator().manual_seed(1)
    probs = (torch.randn(40, 60, generator=generator) * 2).softmax(dim=1)
    rows = [truncate(row[None], 1 + index)[0] for index, row in enumerate(probs)]
    noises = [RoundNoise((index * 0x9E3779B97F4A7C15) % 2**64, index % 7) for index in range(40)]
    positions = [3 * index for index in range(40)]
    alone = [propose(*row, noise, position) for row, noise, position in zip(rows, noises, positions, strict=True)]
    assert propose_each(rows, noises, positions) == alone
    assert propose_each(rows[:1], noises[:1], positions[:1]) == alone[:1]


def test_a_point_mass_proposes_itself():
    ids, probs = point_mass(17)
    assert (ids.dtype, probs.dtype) == (np.int32, np.float32)
    assert all(propose(ids, probs, RoundNoise(seed, 4), 4) == 17 for seed in range(20))
