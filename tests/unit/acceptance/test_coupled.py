"""`coupled`: what comes out is the target's draw at each position, a function of seed, prompt and target alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from bench.acceptance_law import Place
from orchestrator.acceptance import Outcome, accept, coupled, ratio
from outrider.law import couple
from outrider.law.draft import truncate
from outrider.law.noise import Purpose, RoundNoise
from outrider.law.race import race
from outrider.law.rows import Sample, sample_rows
from outrider.law.sparse import SparseLaw
from outrider.v1.orchestrator_pb2 import Acceptance, TokenOrigin
from tests.harness.exactness import NEVER, drawn_law
from tests.harness.joint import normalised
from tests.harness.rows import over_rows

RECOVERED, BONUS = TokenOrigin.TOKEN_ORIGIN_RECOVERED, TokenOrigin.TOKEN_ORIGIN_BONUS
NO_LAW = SparseLaw.concatenate([])
VOCAB = 6

Target = Callable[[list[int]], np.ndarray]  # what was said -> [VOCAB] float32


def laws(seed: int, near: "Target | None" = None, share: float = 0.0) -> Target:
    """Laws that depend on the last two tokens; a `share` of them is that of `near`."""

    def law(said: list[int]) -> np.ndarray:
        own = np.random.default_rng([seed, *said[-2:]]).dirichlet(np.ones(VOCAB))
        return (own if near is None else (1 - share) * own + share * near(said)).astype(np.float32)

    return law


def target_tokens(target: Target, said: list[int], drafted: list[int], noise: RoundNoise) -> np.ndarray:
    probs = torch.from_numpy(np.stack([target(said + drafted[:index]) for index in range(len(drafted) + 1)]))
    (tokens,) = sample_rows(probs, [Sample(noise, len(drafted) + 1)])
    return tokens


def draw(law: np.ndarray, noise: RoundNoise, position: int, top: int) -> int:
    ((ids, probs),) = truncate(torch.from_numpy(law)[None], top)
    return int(ids[race(probs, noise.exponentials(Purpose.COUPLE, position, ids))])


def speak(target, draft, seed, length, lookahead, *, rule=coupled, top=VOCAB, propose=draw, tokens_of=target_tokens):
    """(tokens said after the prompt, accepted tokens a round)."""
    said, accepted = [1, 2], []
    while len(said) < 2 + length:
        noise, drafted = RoundNoise(seed, len(said)), []
        for index in range(lookahead):
            drafted.append(propose(draft(said + drafted), noise, len(said) + index, top))
        outcome = rule(np.array(drafted, np.int32), tokens_of(target, said, drafted, noise))
        accepted.append(outcome.accepted)
        said += [*drafted[: outcome.accepted], outcome.token]
    return said[2 : 2 + length], accepted


@pytest.mark.parametrize(
    ("block", "target", "outcome"),
    [
        ([1, 2, 3], [1, 2, 3, 4], Outcome(3, 4, BONUS)),
        ([1, 2, 3], [1, 2, 5, 4], Outcome(2, 5, RECOVERED)),
        ([1, 2, 3], [0, 2, 3, 4], Outcome(0, 0, RECOVERED)),
        ([], [4], Outcome(0, 4, TokenOrigin.TOKEN_ORIGIN_PLAIN)),
    ],
)
def test_draft_tokens_are_kept_as_long_as_the_target_drew_them_too(block, target, outcome):
    block, target = np.array(block, np.int32), np.array(target, np.int32)
    assert coupled(block, target) == outcome
    assert accept(Acceptance.ACCEPTANCE_COUPLED, block, NO_LAW, target, RoundNoise(1, 1)) == outcome


def test_rows_of_another_rule_or_shape_are_refused():
    with pytest.raises(ValueError, match="one row more"):
        coupled(np.array([1], np.int32), np.array([1], np.int32))
    with pytest.raises(ValueError, match="ACCEPTANCE_RATIO does not judge rows of type ndarray"):
        accept(Acceptance.ACCEPTANCE_RATIO, np.array([1], np.int32), NO_LAW, np.array([1], np.int32), RoundNoise(1, 1))
    with pytest.raises(ValueError, match="no acceptance rule"):
        accept(Acceptance.ACCEPTANCE_UNSPECIFIED, np.array([], np.int32), NO_LAW, np.array([1]), RoundNoise(1, 1))


def outputs(**how) -> set[tuple[int, ...]]:
    """What is said with different drafts, lookaheads and truncations, and without a draft."""
    target, seed = laws(1), 77
    drafts = [laws(2), laws(3, target, 0.8), target]
    plain = speak(target, target, seed, 25, 0, **how)[0]
    return {tuple(plain)} | {
        tuple(speak(target, draft, seed, 25, lookahead, top=top, **how)[0])
        for draft in drafts
        for lookahead, top in ((1, VOCAB), (3, 2), (8, 1))
    }


def test_the_output_is_a_function_of_seed_and_target():
    assert len(outputs()) == 1
    said = {tuple(speak(laws(1), laws(2), seed, 25, 3)[0]) for seed in range(20)}
    assert len(said) == 20


def test_a_draft_swapped_in_mid_request_changes_nothing():
    target = laws(1)

    def swapped(said):
        return (laws(2) if len(said) < 14 else laws(3, target, 0.9))(said)

    assert speak(target, swapped, 5, 40, 4)[0] == speak(target, target, 5, 40, 0)[0]


@pytest.mark.parametrize("lookahead", [1, 2, 5, 8])
def test_a_draft_equal_to_the_target_is_always_kept_whole(lookahead):
    for seed in range(20):
        _, accepted = speak(laws(seed), laws(seed), seed, 30, lookahead)
        assert set(accepted) == {lookahead}


# The law of a draw, in closed form: the race over the whole row, as the target runs it, with noise that was scripted.


def race_law(row: np.ndarray, monkeypatch) -> np.ndarray:
    scripted = np.empty(len(row))

    def low_tokens(seeds, positions, vocab_size):
        return np.append(np.flatnonzero(-np.expm1(-scripted) < couple.LOW), vocab_size)[None]

    monkeypatch.setattr(couple, "low_tokens", low_tokens)
    monkeypatch.setattr(couple, "exponentials", lambda seeds, positions, ids, low: scripted[ids])
    probs = torch.from_numpy(row)[None]

    def run(runners: dict[int, float], tail: float, uniform: float = 0.5) -> int:
        scripted[:] = NEVER
        for token, exponential in runners.items():
            scripted[token] = exponential
        return int(sample_rows(probs, [Sample(RoundNoise(0, 1), 1)])[0][0])

    return drawn_law(run, list(range(len(row))), len(row))


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 5.0])
def test_the_law_of_a_draw_is_the_targets(sharpness, monkeypatch):
    row = np.random.default_rng(4).dirichlet(np.full(24, sharpness)).astype(np.float32)
    row[[0, 7, 23]] = 0
    np.testing.assert_allclose(race_law(row, monkeypatch), normalised(row), rtol=0, atol=1e-12)


def test_a_race_over_rounded_probabilities_is_seen(monkeypatch):
    row = np.random.default_rng(4).dirichlet(np.ones(24)).astype(np.float32)
    rounded = torch.from_numpy(row).bfloat16().float().numpy()
    assert np.abs(race_law(rounded, monkeypatch) - normalised(row)).max() > 1e-5


def p_value(rule=coupled, sessions=3000, draft=None, **how) -> float:
    """Chi-square of the first two tokens of many sessions, lookahead 2, against the target's law."""
    target, seen = laws(1), np.zeros((VOCAB, VOCAB))
    for seed in range(sessions):
        seen[tuple(speak(target, draft or laws(3, target, 0.5), seed, 2, 2, rule=rule, **how)[0])] += 1
    first = normalised(target([1, 2]))
    law = np.stack([first[token] * normalised(target([2, token])) for token in range(VOCAB)])
    return float(stats.chisquare(seen.ravel(), law.ravel() * sessions).pvalue)


def test_what_is_said_over_many_seeds_has_the_targets_law():
    assert p_value() > 1e-3


@pytest.mark.parametrize("top", [1, 3, VOCAB])
def test_a_token_is_kept_as_often_as_the_closed_form_says(top):
    """And at least (1 - d) / (1 + d) times, d the distance of the laws. 4000 draws: within four standard errors."""
    target, near = laws(1), laws(3, laws(1), 0.6)
    row = np.asarray(target([1, 2]))
    ((ids, probs),) = truncate(torch.from_numpy(near([1, 2]))[None], top)
    kept = np.mean([speak(target, near, seed, 1, 1, top=top)[1][0] for seed in range(4000)])
    rate = Place(0, normalised(row), ids, normalised(probs)).coupled_rate
    assert abs(kept - rate) < 4 * np.sqrt(rate * (1 - rate) / 4000)
    draft = np.zeros(VOCAB)
    draft[ids] = probs
    distance = np.abs(draft - row).sum() / 2
    assert rate >= (1 - distance) / (1 + distance) - 1e-6


# Mutants.


def draft_with_noise_of_its_own(law, noise, position, top):
    ((ids, probs),) = truncate(torch.from_numpy(law)[None], top)
    return int(ids[race(probs, noise.exponentials(Purpose.PROPOSE, position, ids))])


def tokens_drawn_by(exponentials) -> Callable[..., np.ndarray]:
    def tokens(target, said, drafted, noise):
        ids = np.arange(VOCAB, dtype=np.int32)
        rows = [target(said + drafted[:index]) for index in range(len(drafted) + 1)]
        return np.array([race(row, exponentials(noise, index, ids)) for index, row in enumerate(rows)], np.int32)

    return tokens


def resample_noise(noise, index, ids):
    return noise.exponentials(Purpose.RESAMPLE, noise.base_length + index, ids)


def noise_by_place_in_the_round(noise, index, ids):
    return RoundNoise(noise.seed, 0).exponentials(Purpose.COUPLE, index, ids)


def test_coupled_with_separate_noise_is_right_and_useless():
    """Nothing in the output shows it; the identity probe does."""
    assert len(outputs(propose=draft_with_noise_of_its_own)) == 1
    _, accepted = speak(laws(1), laws(1), 7, 30, 4, propose=draft_with_noise_of_its_own)
    assert np.mean(accepted) < 2


@pytest.mark.parametrize("noise", [resample_noise, noise_by_place_in_the_round])
def test_coupled_with_noise_that_depends_on_the_round_is_seen(noise):
    """Noise with the base length in it, or that counts positions from it: the output depends on the lookahead."""
    assert len(outputs(tokens_of=tokens_drawn_by(noise))) > 1


def test_the_draws_of_these_mutants_are_right_with_the_right_noise():
    right = tokens_drawn_by(
        lambda noise, index, ids: noise.exponentials(Purpose.COUPLE, noise.base_length + index, ids)
    )
    assert outputs(tokens_of=right) == outputs()


def believes_the_draft(draft_tokens, target_tokens):
    return Outcome(len(draft_tokens), int(target_tokens[-1]), BONUS)


def emits_the_row_after(draft_tokens, target_tokens):
    outcome = coupled(draft_tokens, target_tokens)
    return Outcome(outcome.accepted, int(target_tokens[min(outcome.accepted + 1, len(draft_tokens))]), outcome.origin)


def skips_the_last_draft_token(draft_tokens, target_tokens):
    """Compares one token too few, and keeps the last one unseen."""
    outcome = coupled(draft_tokens, np.append(target_tokens[:-2], [draft_tokens[-1], target_tokens[-1]]))
    return outcome if outcome.accepted else coupled(draft_tokens, target_tokens)


@pytest.mark.parametrize("rule", [believes_the_draft, emits_the_row_after, skips_the_last_draft_token])
def test_a_mutant_of_coupled_fails(rule):
    assert p_value(rule) < 1e-4
    target = laws(1)
    assert speak(target, laws(2), 77, 25, 3, rule=rule)[0] != speak(target, target, 77, 25, 0)[0]


def test_ratio_with_the_noise_of_coupled_fails():
    """Shared noise is wrong for `ratio`: a residual race with the noise of the draft's own draw."""

    class Shared(RoundNoise):
        def exponentials(self, purpose, position, token_ids):
            return super().exponentials(Purpose.COUPLE, position, token_ids)

    target, draft = np.array([0.1, 0.5, 0.2, 0.2], np.float32), np.array([0.7, 0.06, 0.12, 0.12], np.float32)
    rows = truncate(torch.from_numpy(draft)[None], 4)

    def said(seed: int, noise: RoundNoise) -> int:
        token = int(rows[0][0][race(rows[0][1], noise.exponentials(Purpose.PROPOSE, 2, rows[0][0]))])
        law = SparseLaw.concatenate(rows)
        outcome = over_rows(ratio)(np.array([token], np.int32), law, np.stack([target, target]), noise)
        return token if outcome.accepted else outcome.token

    def chance(kind: type[RoundNoise]) -> float:
        seen = np.bincount([said(seed, kind(seed, 2)) for seed in range(4000)], minlength=4)
        return float(stats.chisquare(seen, normalised(target) * 4000).pvalue)

    assert chance(Shared) < 1e-4
    assert chance(RoundNoise) > 1e-3
