import numpy as np
import pytest
import torch
from scipy import stats

from outrider.law import couple
from outrider.law.noise import Purpose, RoundNoise, exponentials_of_rows
from outrider.law.philox import wide, wide_blocks

# Random123 1.14, tests/kat_vectors, philox4x64 10: (counter, key, answer), words from the low end.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (0xFFFFFFFFFFFFFFFF,) * 4,
        (0xFFFFFFFFFFFFFFFF,) * 2,
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


def joined(words):
    return sum(word << 64 * index for index, word in enumerate(words))


def as_int64(words):
    return tuple(torch.tensor([word - (1 << 64) if word >> 63 else word]) for word in words)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_4x64_gives_the_published_answers_both_ways(counter, key, answer):
    assert tuple(wide_blocks(joined(key), joined(counter), 1).tolist()) == answer
    assert tuple(int(word) & 0xFFFFFFFFFFFFFFFF for word in wide(as_int64(counter), as_int64(key))) == answer


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (2**64 - 3, 2**31 - 1), (1 << 63, 12_345)])
def test_the_devices_coarse_bits_are_the_cpus(seed, position):
    for count in (1, 15, 16, 17, 1000):
        expected = couple.coarse(seed, position, count)
        made = couple.coarse_on(torch.device("cpu"), [seed, 5], [position, 6], count)
        assert made[0].tolist() == expected.tolist()
        assert made[1].tolist() == couple.coarse(5, 6, count).tolist()


def test_a_longer_vocabulary_changes_no_token():
    assert couple.coarse(3, 9, 33).tolist() == couple.coarse(3, 9, 5000)[:33].tolist()


def test_noise_of_few_tokens_is_that_of_the_whole_vocabulary():
    noise, ids = RoundNoise(2**64 - 9, 4), np.array([70, 3, 999, 16], np.int32)
    whole = noise.exponentials(Purpose.COUPLE, 8, np.arange(1000, dtype=np.int32))
    assert noise.exponentials(Purpose.COUPLE, 8, ids).tolist() == whole[ids].tolist()
    positions = np.array([8, 9, 8, 9])
    mixed = noise.exponentials(Purpose.COUPLE, positions, ids)
    for index, position in enumerate(positions):
        alone = noise.exponentials(Purpose.COUPLE, int(position), ids[index : index + 1])
        assert mixed[index] == alone[0]


def test_coarse_and_fine_bits_make_an_exponential():
    draws = np.concatenate(
        [RoundNoise(11, 0).exponentials(Purpose.COUPLE, place, np.arange(50_000, dtype=np.int32)) for place in range(8)]
    )
    assert stats.kstest(draws, "expon").pvalue > 1e-3
    # Within one coarse step the fine bits are uniform too.
    inside = -np.expm1(-draws) * couple.STEPS % 1.0
    assert stats.kstest(inside, "uniform").pvalue > 1e-3
    assert len(np.unique(draws)) == len(draws)


def test_the_ends_are_finite_and_resolved():
    steps = np.array([0, 0, couple.STEPS - 1])
    ids = np.array([1, 2, 3])
    draws = couple.exponentials(np.zeros(3, np.uint64), np.zeros(3, np.int64), ids, steps)
    assert (draws > 0).all()
    assert (draws[:2] < 2.0**-16).all()
    assert draws[0] != draws[1]
    assert np.isfinite(draws).all()


def test_neighbours_seeds_and_positions_are_independent():
    ids = np.arange(20_000, dtype=np.int32)
    draws = [
        RoundNoise(seed, 0).exponentials(Purpose.COUPLE, place, ids) for seed, place in ((1, 5), (1, 6), (2, 5), (6, 1))
    ]
    draws.append(np.roll(draws[0], 1))
    draws.append(np.roll(draws[0], 16))
    assert np.abs(np.corrcoef(np.array(draws)) - np.eye(6)).max() < 0.03


def test_many_rows_at_once_have_the_noise_of_each():
    noises = [RoundNoise(5, 1), RoundNoise(5, 2), RoundNoise(2**64 - 1, 3)]
    positions, sizes = [40, 41, 41], [3, 4, 2]
    ids = np.array([9, 0, 5, 1, 2, 3, 17, 800, 4], np.int32)
    alone = [
        noise.exponentials(Purpose.COUPLE, position, part)
        for noise, position, part in zip(noises, positions, np.split(ids, [3, 7]), strict=True)
    ]
    together = exponentials_of_rows(Purpose.COUPLE, noises, positions, sizes, ids)
    assert together.tolist() == np.concatenate(alone).tolist()
