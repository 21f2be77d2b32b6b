import numpy as np
import pytest
from scipy import stats

from outrider.law.noise import Purpose, RoundNoise
from outrider.law.race import race, scores


def test_a_race_draws_in_proportion_to_the_probabilities():
    # A rarest token off by a tenth is a noncentrality of 60: seen at p < 1e-3 with power above 0.999.
    probs = np.array([0.4, 0.3, 0.2, 0.07, 0.0, 0.03], dtype=np.float32)
    ids = np.tile(np.arange(6, dtype=np.int32), 200_000)
    positions = np.repeat(np.arange(200_000), 6)
    noise = RoundNoise(7, 0).exponentials(Purpose.PROPOSE, positions, ids).reshape(-1, 6)
    winners = scores(np.broadcast_to(probs, noise.shape), noise).argmin(axis=1)
    assert winners[:50].tolist() == [race(probs, row) for row in noise[:50]]
    seen = np.bincount(winners, minlength=6)
    assert seen[4] == 0
    positive = probs > 0
    expected = probs[positive].astype(float) / probs.sum(dtype=float) * len(winners)
    assert stats.chisquare(seen[positive], expected).pvalue > 1e-3


def test_a_race_may_be_run_in_pieces():
    noise, ids = RoundNoise(5, 3), np.arange(40, dtype=np.int32)
    probs = np.random.default_rng(0).dirichlet(np.ones(40))
    whole = scores(probs, noise.exponentials(Purpose.RESAMPLE, 4, ids))
    parts = [scores(probs[part], noise.exponentials(Purpose.RESAMPLE, 4, ids[part])) for part in (ids < 17, ids >= 17)]
    assert np.concatenate(parts).argmin() == whole.argmin()


def test_zero_never_wins_and_equals_go_to_the_lowest_index():
    assert race(np.array([0.0, 1e-30], np.float32), np.array([1e-20, 50.0])) == 1
    assert race(np.array([0.25, 0.5, 0.25]), np.array([1.0, 2.0, 1.0])) == 0


def test_scores_are_float64_even_where_float32_would_overflow():
    assert race(np.array([1e-45, 1e-44], np.float32), np.array([30.0, 40.0])) == 1


@pytest.mark.parametrize("probs", [[0.0, 0.0], [], [np.nan, 1.0], [np.inf, 1.0]])
def test_what_is_no_law_is_refused(probs):
    with pytest.raises(ValueError, match="race needs"):
        race(np.array(probs, np.float32), np.ones(len(probs)))
