import numpy as np
import pytest
from scipy import stats

from outrider.law.noise import BatchNoise, Purpose, RoundNoise, exponential_of, philox, philox_of_arrays, uniform_of
from tests.harness.rows import EachNoise

# Random123 1.14, tests/kat_vectors, philox4x32 10: (counter, key, answer).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
IDS = np.arange(1000, dtype=np.int32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert philox(counter, key) == answer


def test_philox_gives_the_published_answers_on_arrays():
    counters, keys, answers = (np.array(column).T for column in zip(*KNOWN_ANSWERS, strict=True))
    for words, answer in zip(philox_of_arrays(tuple(counters), tuple(keys)), answers, strict=True):
        assert words.tolist() == answer.tolist()


def test_philox_of_arrays_broadcasts():
    rng = np.random.default_rng(1)
    counter, key = rng.integers(0, 2**32, (4, 2, 1)), rng.integers(0, 2**32, (2, 3))
    words = np.stack(philox_of_arrays((*counter[:3], 7), (key[0], 9)))
    assert words.shape == (4, 2, 3)
    for row, column in np.ndindex(2, 3):
        expected = philox((*counter[:3, row, 0].tolist(), 7), (int(key[0, column]), 9))
        assert tuple(words[:, row, column].tolist()) == expected
    assert [len(it) for it in philox_of_arrays((counter[0, :0, 0], 1, 2, 3), (4, 5))] == [0] * 4


@pytest.mark.parametrize("purpose", Purpose)
def test_the_noise_of_many_rounds_is_that_of_each(purpose):
    rng = np.random.default_rng(int(purpose))
    noises = [RoundNoise(int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(1, 2**31))) for _ in range(20)]
    rounds = np.repeat(rng.permutation(20), 5)
    positions = BatchNoise.of(noises).base_lengths[rounds] + np.repeat(rng.integers(0, 9, 20), 5)
    ids = rng.integers(0, 150_000, 100).astype(np.int32)
    together, each = BatchNoise.of(noises), EachNoise(noises)
    for ours, plain in (
        (together.uniforms(purpose, rounds, positions), each.uniforms(purpose, rounds, positions)),
        (together.exponentials(purpose, rounds, positions, ids), each.exponentials(purpose, rounds, positions, ids)),
        (together.tails(purpose, rounds, positions), each.tails(purpose, rounds, positions)),
    ):
        assert ours.tolist() == plain.tolist()


def test_scalar_and_array_noise_are_the_same_numbers():
    noise = RoundNoise(seed=2**64 - 5, base_length=70_000)
    positions = np.arange(70_000, 70_050)
    expected = [noise.uniform(Purpose.ACCEPT, int(position)) for position in positions]
    assert noise.uniforms(Purpose.ACCEPT, positions).tolist() == expected
    one_each = noise.exponentials(Purpose.PROPOSE, np.repeat(positions, 20), np.tile(IDS[:20], 50))
    for index, position in enumerate(positions):
        row = noise.exponentials(Purpose.PROPOSE, int(position), IDS[:20])
        assert row.tolist() == one_each[20 * index : 20 * index + 20].tolist()


def test_the_counter_holds_token_position_base_length_and_purpose():
    noise = RoundNoise(seed=0xA4093822 | 0x299F31D0 << 32, base_length=77)
    high, low, _, _ = philox((5, 1234, 77, int(Purpose.RESAMPLE)), (0xA4093822, 0x299F31D0))
    expected = exponential_of(np.array([high]), np.array([low]))
    assert noise.exponentials(Purpose.RESAMPLE, 1234, np.array([5], np.int32)) == expected


def test_everything_but_couple_depends_on_the_base_length():
    one, other = RoundNoise(1, base_length=10), RoundNoise(1, base_length=11)
    for purpose in Purpose:
        equal = one.exponentials(purpose, 20, IDS) == other.exponentials(purpose, 20, IDS)
        assert equal.all() if purpose is Purpose.COUPLE else not equal.any()
    assert one.uniform(Purpose.ACCEPT, 20) != other.uniform(Purpose.ACCEPT, 20)
    assert one.tail(Purpose.RESAMPLE, 20) != other.tail(Purpose.RESAMPLE, 20)


def test_draws_of_other_seed_position_purpose_or_token_are_other_draws():
    noise = RoundNoise(3, 5)
    draws = [
        noise.exponentials(Purpose.PROPOSE, 6, IDS),
        noise.exponentials(Purpose.PROPOSE, 7, IDS),
        noise.exponentials(Purpose.RESAMPLE, 6, IDS),
        RoundNoise(4, 5).exponentials(Purpose.PROPOSE, 6, IDS),
        RoundNoise(3 | 1 << 40, 5).exponentials(Purpose.PROPOSE, 6, IDS),
    ]
    assert len(np.unique(np.concatenate(draws))) == 5 * len(IDS)
    correlations = np.corrcoef(np.array(draws)) - np.eye(5)
    assert np.abs(correlations).max() < 0.15


def test_uniforms_stay_inside_the_open_interval_and_resolve_its_low_end():
    words = np.array([0, 0, 0xFFFFFFFF])
    others = np.array([0, 1, 0xFFFFFFFF])
    low, next_low, high = uniform_of(words, others)
    assert 0 < low == 2.0**-65
    assert next_low == 3 * low
    assert high == 1 - 2.0**-53
    exponentials = exponential_of(words, others)
    assert exponentials[0] == low
    assert np.isfinite(exponentials).all()


def test_noise_has_its_distributions():
    noise = RoundNoise(20_261_129, 0)
    ids = np.arange(200_000, dtype=np.int32)
    assert stats.kstest(noise.exponentials(Purpose.PROPOSE, 9, ids), "expon").pvalue > 1e-3
    assert stats.kstest(noise.uniforms(Purpose.ACCEPT, ids), "uniform").pvalue > 1e-3
    tails = np.array([noise.tail(Purpose.RESAMPLE, position) for position in range(20_000)])
    assert stats.kstest(tails[:, 0], "expon").pvalue > 1e-3
    assert stats.kstest(tails[:, 1], "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(tails.T)[0, 1]) < 0.03
