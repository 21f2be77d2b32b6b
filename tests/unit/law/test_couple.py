import numpy as np
import pytest
from scipy import stats

from outrider.law import couple
from outrider.law.noise import Purpose, RoundNoise, exponentials_of_rows


def low(seed, position, vocab_size):
    tokens = couple.low_tokens(np.array([seed], np.uint64), np.array([position]), vocab_size)[0]
    return tokens[tokens < vocab_size].tolist()


def noise(seed, position, ids):
    return RoundNoise(seed, 0).exponentials(Purpose.COUPLE, position, np.asarray(ids, np.int32))


def test_low_tokens_are_those_whose_number_is_below_the_border():
    for seed, position in ((0, 0), (7, 1), (2**64 - 3, 2**31 - 1)):
        numbers = -np.expm1(-noise(seed, position, np.arange(60_000)))
        assert np.flatnonzero(numbers < couple.LOW).tolist() == low(seed, position, 60_000)


def test_low_tokens_come_at_their_rate_and_independently():
    ids = [low(seed, 5, 100_000) for seed in range(400)]
    counts = np.array([len(one) for one in ids])
    mean = 100_000 * couple.LOW
    assert abs(counts.mean() - mean) < 4 * np.sqrt(mean / 400)
    assert 0.8 < counts.var() / mean < 1.25
    # Uniform over the vocabulary, its first and last tokens included; gaps are geometric.
    assert stats.kstest(np.concatenate(ids) / 100_000, "uniform").pvalue > 1e-3
    gaps = np.concatenate([np.diff(one) for one in ids])
    assert stats.kstest(gaps * couple.LOW, "expon").pvalue > 1e-3
    firsts = [low(seed, 6, 4) for seed in range(4000)]
    assert any(0 in one for one in firsts)


def test_low_tokens_of_many_rows_are_those_of_each():
    seeds, positions = np.array([1, 1, 2**64 - 1], np.uint64), np.array([3, 4, 4])
    together = couple.low_tokens(seeds, positions, 9000)
    for seed, position, row in zip(seeds.tolist(), positions.tolist(), together, strict=True):
        assert row[row < 9000].tolist() == low(seed, position, 9000)
        assert (np.diff(row) > 0).all()
        assert row[-1] >= 9000


def test_a_longer_vocabulary_changes_no_token():
    ids = low(3, 9, 200_000)
    for size in (1, 33, 5000, 60_000):
        assert low(3, 9, size) == [token for token in ids if token < size]
    assert noise(3, 9, range(33)).tolist() == noise(3, 9, range(5000))[:33].tolist()


def test_more_low_tokens_than_expected_are_all_found(monkeypatch):
    expected = low(3, 9, 200_000)
    monkeypatch.setattr(np, "sqrt", lambda value: -value / 6.0)  # as if none were expected
    assert low(3, 9, 200_000) == expected


def test_noise_of_few_tokens_is_that_of_the_whole_vocabulary():
    ids = np.array([70, 3, 999, 16], np.int32)
    whole = noise(2**64 - 9, 8, np.arange(1000))
    assert noise(2**64 - 9, 8, ids).tolist() == whole[ids].tolist()
    positions = np.array([8, 9, 8, 9])
    mixed = RoundNoise(2**64 - 9, 4).exponentials(Purpose.COUPLE, positions, ids)
    for index, position in enumerate(positions):
        assert mixed[index] == noise(2**64 - 9, int(position), ids[index : index + 1])[0]
    assert len(noise(1, 1, [])) == 0


def test_many_rows_at_once_have_the_noise_of_each():
    noises = [RoundNoise(5, 1), RoundNoise(5, 2), RoundNoise(2**64 - 1, 3)]
    positions, sizes = [40, 41, 41], [3, 4, 2]
    ids = np.array([9, 0, 5, 1, 2, 3, 17, 800, 4], np.int32)
    alone = [
        one.exponentials(Purpose.COUPLE, position, part)
        for one, position, part in zip(noises, positions, np.split(ids, [3, 7]), strict=True)
    ]
    together = exponentials_of_rows(Purpose.COUPLE, noises, positions, sizes, ids)
    assert together.tolist() == np.concatenate(alone).tolist()


def test_low_or_not_the_numbers_are_exponential():
    draws = np.concatenate([noise(11, place, np.arange(50_000)) for place in range(8)])
    assert stats.kstest(draws, "expon").pvalue > 1e-3
    numbers = -np.expm1(-draws)
    below = numbers[numbers < couple.LOW] / couple.LOW
    assert len(below) > 150
    assert stats.kstest(below, "uniform").pvalue > 1e-3
    assert len(np.unique(draws)) == len(draws)


def test_the_ends_are_finite_and_resolved():
    many = np.arange(200_000)
    flags = np.ones(len(many), bool)
    draws = couple.exponentials(np.zeros(len(many), np.uint64), np.zeros(len(many), np.int64), many, flags)
    assert 0 < draws.min() < draws.max() < -np.log1p(-couple.LOW)
    draws = couple.exponentials(np.zeros(len(many), np.uint64), np.zeros(len(many), np.int64), many, ~flags)
    assert couple.LOW <= draws.min() < draws.max() < 40
    assert np.isfinite(draws).all()


def test_neighbours_seeds_and_positions_are_independent():
    ids = np.arange(20_000)
    draws = [noise(seed, place, ids) for seed, place in ((1, 5), (1, 6), (2, 5), (6, 1))]
    draws += [np.roll(draws[0], 1), np.roll(draws[0], 16)]
    assert np.abs(np.corrcoef(np.array(draws)) - np.eye(6)).max() < 0.03


@pytest.mark.parametrize("purpose", [Purpose.PROPOSE, Purpose.RESAMPLE])
def test_other_purposes_have_other_noise(purpose):
    ids = np.arange(1000, dtype=np.int32)
    assert not (RoundNoise(1, 0).exponentials(purpose, 5, ids) == noise(1, 5, ids)).any()
