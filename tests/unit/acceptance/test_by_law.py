"""`ratio` and `block`, case by case: edges, refusals, identity probes."""

from functools import partial

import numpy as np
import pytest
import torch

from orchestrator.acceptance import Block, accept, block, ratio
from orchestrator.acceptance.laws import residual, side_by_side
from outrider.law.audit import audit
from outrider.law.draft import point_mass, propose, truncate
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.rows import Sample, SupportRows, sample_rows
from outrider.law.sparse import SparseLaw
from outrider.law.transforms import RowContext, law_probs
from outrider.v1.orchestrator_pb2 import Acceptance, TokenOrigin
from tests.harness.exactness import LARGEST, ScriptedNoise
from tests.harness.rows import law_rows, over_rows

RECOVERED, BONUS, PLAIN = (
    TokenOrigin.TOKEN_ORIGIN_RECOVERED,
    TokenOrigin.TOKEN_ORIGIN_BONUS,
    TokenOrigin.TOKEN_ORIGIN_PLAIN,
)
NOTHING = np.empty(0, np.int32), SparseLaw.concatenate([])
RATIO, BLOCK = over_rows(ratio), over_rows(block)
RULES = pytest.mark.parametrize("rule", [RATIO, BLOCK], ids=["ratio", "block"])


def laws(logits, params, tokens, drafted):
    """Target rows of a block: each row's context holds the draft tokens before it."""
    contexts = [RowContext(params, np.concatenate([tokens, drafted[:count]])) for count in range(len(drafted) + 1)]
    return law_probs(logits, contexts, logits.shape[1])


def drafted(noise, rows):
    tokens = [propose(*row, noise, noise.base_length + index) for index, row in enumerate(rows)]
    return np.array(tokens, np.int32), SparseLaw.concatenate(rows)


@RULES
def test_draft_equal_to_target_is_always_kept_whole(rule):
    """An identity probe: at every lookahead, whatever the noise, and at the largest uniform there is."""
    for seed in range(60):
        lookahead = seed % 8 + 1
        logits = torch.randn(lookahead + 1, 40, generator=torch.Generator().manual_seed(seed)) * 3
        probs = logits.softmax(dim=1)
        noise = RoundNoise(seed, base_length=10)
        tokens, law = drafted(noise, truncate(probs[:-1], 40))
        outcome = rule(tokens, law, probs.numpy(), noise)
        assert (outcome.accepted, outcome.origin) == (lookahead, BONUS)


@RULES
def test_a_token_that_target_and_draft_like_equally_survives_the_largest_uniform(rule):
    row = np.array([0.1, 0.2, 0.7], np.float32)
    noise = ScriptedNoise(accept={0: LARGEST}, tail_runner=1.0)
    law = SparseLaw.concatenate([(np.arange(3, dtype=np.int32), row)])
    for token in range(3):
        assert rule(np.array([token], np.int32), law, np.stack([row, row]), noise).accepted == 1


@RULES
def test_thresholds_belong_to_the_right_side(rule):
    """Uniforms are multiples of a step: each outcome owns exactly as many of them as its probability has steps."""
    law = SparseLaw.concatenate([(np.arange(2, dtype=np.int32), np.array([0.5, 0.5], np.float32))])
    target = np.array([[0.25, 0.0, 0.75]] * 2, np.float32)
    for uniform, kept in ((0.5 - 2**-54, 1), (0.5, 0)):
        noise = ScriptedNoise(accept={0: uniform}, tail_runner=1.0)
        assert rule(np.array([0], np.int32), law, target, noise).accepted == kept
    for uniform, token in ((0.25 - 2**-54, 0), (0.25, 2), (LARGEST, 2), (2.0**-65, 0)):
        assert rule(*NOTHING, target[:1], ScriptedNoise(tail_runner=1.0, tail_uniform=uniform)).token == token


@RULES
def test_the_same_noise_repeats_the_round_and_another_seed_does_not(rule):
    probs = torch.full((1, 1000), 1e-3)
    outcomes = [rule(*NOTHING, probs.numpy(), RoundNoise(seed, 7)) for seed in (1, 1, 2)]
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert outcomes[0].origin == PLAIN


@RULES
def test_a16_sessions_with_seeds_of_their_own_say_different_things(rule):
    probs = np.full((1, 50), 0.02, np.float32)
    outputs = {tuple(rule(*NOTHING, probs, RoundNoise(seed, base)).token for base in range(8)) for seed in range(64)}
    assert len(outputs) >= 60


def test_a6_top_k_1_is_greedy_token_for_token():
    prefix = np.array([1, 2], np.int32)
    for seed in range(100):
        logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(seed)) * 2
        noise = RoundNoise(seed, base_length=2)
        tokens, law = drafted(noise, truncate((logits[:-1] * 0.8).softmax(dim=1), 8))
        one = laws(logits, LawParams(top_k=1), prefix, tokens)
        (argmax,) = sample_rows(laws(logits, LawParams(temperature=0.0), prefix, tokens), [Sample(noise, 4)])
        outcomes = {
            accept(Acceptance.ACCEPTANCE_RATIO, tokens, law, law_rows(one, law, noise), noise),
            accept(Acceptance.ACCEPTANCE_BLOCK, tokens, law, law_rows(one, law, noise), noise),
            accept(Acceptance.ACCEPTANCE_COUPLED, tokens, law, sample_rows(one, [Sample(noise, 4)])[0], noise),
            accept(Acceptance.ACCEPTANCE_GREEDY, tokens, law, argmax, noise),
        }
        assert len(outcomes) == 1


@RULES
def test_a6_nothing_outside_the_nucleus_at_any_kind_of_position(rule):
    """10 000 tokens with both rules, with top_p = 0.5, each position tagged by the origin of its token."""
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(3)) * 1.5
    prefix = np.array([0], np.int32)
    rows = truncate((logits[:-1] * 0.5).softmax(dim=1), 12)
    seen = {"accepted": [set(), set()], RECOVERED: [set(), set(), set()], BONUS: [set(), set(), set()]}
    target = laws(logits, LawParams(top_p=0.5), prefix, np.zeros(2, np.int32)).numpy()
    for seed in range(4000):
        noise = RoundNoise(seed, base_length=1)
        tokens, law = drafted(noise, rows)
        outcome = rule(tokens, law, target, noise)
        for index in range(outcome.accepted):
            seen["accepted"][index].add(int(tokens[index]))
        seen[outcome.origin][outcome.accepted].add(outcome.token)
    for places in seen.values():
        for tokens, row in zip(places, target, strict=False):
            assert tokens <= set(np.flatnonzero(row))
    assert all(seen["accepted"])
    assert seen[BONUS][2] == set(np.flatnonzero(target[2]))
    assert seen[RECOVERED][0]
    assert seen[RECOVERED][1]


def test_a11_a_rejected_point_mass_is_not_drawn_again():
    """p = [.5, .3, .2], a point mass on 0, rejected: then 1 with .6 and 2 with .4 (10 000 rejections, +-0.02)."""
    target = np.array([[0.5, 0.3, 0.2]] * 2, np.float32)
    tokens, law = np.array([0], np.int32), SparseLaw.concatenate([point_mass(0)])
    outcomes = (RATIO(tokens, law, target, RoundNoise(seed, 5)) for seed in range(20_000))
    recovered = [outcome.token for outcome in outcomes if outcome.accepted == 0]
    assert abs(len(recovered) / 20_000 - 0.5) < 0.02
    shares = np.bincount(recovered, minlength=3) / len(recovered)
    np.testing.assert_allclose(shares, [0, 0.6, 0.4], atol=0.02)
    assert shares[0] == 0


def rows_of(probs, masses, tokens):
    return SupportRows(np.array(probs, np.float32), np.array(masses, float), np.array(tokens, np.int32))


def test_no_residual_left_falls_back_to_the_target():
    """Laws equal up to rounding, and a uniform that rejects all the same: a decided case, not NaN."""
    law = SparseLaw.concatenate([(np.arange(2, dtype=np.int32), np.array([0.25, 0.75], np.float32))])
    rows = rows_of([0.25, 0.75], [0, 1], [0, 0])
    both = side_by_side([Block(np.array([0], np.int32), law, rows, RoundNoise(0, 0))])
    weights, tails = residual(both.rows.take(np.array([0])), np.ones(1))
    assert (weights.tolist(), tails.tolist()) == ([0.25, 0.75], [0.0])


def test_block_keeps_a_whole_block_over_a_prefix_that_would_be_rejected():
    """The first is worth half, the second twice what the draft gave it: both are kept, whatever the first says."""
    law = SparseLaw.concatenate([(np.arange(2, dtype=np.int32), np.array([2 / 3, 1 / 3], np.float32))] * 2)
    target = np.array([[1 / 3, 2 / 3]] * 3, np.float32)
    noise = ScriptedNoise(accept={0: LARGEST, 1: 0.999}, tail_runner=1.0)
    assert BLOCK(np.array([0, 1], np.int32), law, target, noise).accepted == 2
    assert RATIO(np.array([0, 1], np.int32), law, target, noise).accepted == 0


def test_block_keeps_nothing_after_a_token_that_the_target_never_says():
    law = SparseLaw.concatenate([(np.arange(2, dtype=np.int32), np.array([0.5, 0.5], np.float32))] * 3)
    target = np.array([[0.5, 0.5], [1.0, 0.0], [0.1, 0.9], [0.5, 0.5]], np.float32)
    noise = ScriptedNoise(accept=dict.fromkeys(range(3), 1e-300), tail_runner=1.0)
    assert BLOCK(np.array([0, 1, 1], np.int32), law, target, noise).accepted == 1


@pytest.mark.parametrize("kind", [Acceptance.ACCEPTANCE_RATIO, Acceptance.ACCEPTANCE_BLOCK])
def test_what_is_no_block_or_no_law_is_refused(kind):
    rule = partial(accept, kind)
    law = SparseLaw.concatenate([(np.array([1, 2], np.int32), np.array([0.5, 0.5], np.float32))])
    good, noise, one = rows_of([0.25, 0.25], [0.5, 1], [0, 0]), RoundNoise(0, 3), np.array([1], np.int32)
    with pytest.raises(ValueError, match=r"\[3\] have no draft probability"):
        rule(np.array([3], np.int32), law, good, noise)
    with pytest.raises(ValueError, match="have no draft probability, or more than one"):
        rule(one, SparseLaw(law.sizes, np.array([1, 1], np.int32), law.probs), good, noise)
    with pytest.raises(ValueError, match="target rows"):
        rule(one, law, rows_of([0.25, 0.25], [0.5], [0]), noise)
    with pytest.raises(ValueError, match="2 entries of draft law, 1 of target law"):
        rule(one, law, rows_of([0.25], [0.5, 1], [0, 0]), noise)
    with pytest.raises(ValueError, match="empty row"):
        rule(
            np.array([1, 1], np.int32),
            SparseLaw(np.array([2, 0], np.int32), law.token_ids, law.probs),
            rows_of([0.25] * 2, [0.5, 1, 1], [0] * 3),
            noise,
        )
    for broken in (np.nan, -1.0):
        with pytest.raises(ValueError, match="NaN or a probability below 0"):
            rule(one, law, rows_of([broken, 0.25], [0.5, 1], [0, 0]), noise)
        with pytest.raises(ValueError, match="NaN or a probability below 0"):
            rule(*NOTHING, rows_of([], [broken], [0]), noise)
    for broken in (np.inf, 0.0):
        with pytest.raises(ValueError, match="sum to"):
            rule(*NOTHING, rows_of([], [broken], [0]), noise)


def test_rows_of_another_rule_are_refused():
    rows, noise = rows_of([], [1], [0]), RoundNoise(0, 3)
    for rule in (Acceptance.ACCEPTANCE_GREEDY, Acceptance.ACCEPTANCE_COUPLED):
        with pytest.raises(ValueError, match="does not judge rows of type SupportRows"):
            accept(rule, *NOTHING, rows, noise)
    with pytest.raises(ValueError, match="no acceptance rule"):
        accept(Acceptance.ACCEPTANCE_UNSPECIFIED, *NOTHING, rows, noise)


@RULES
def test_an_audited_block_is_one_that_the_rule_takes(rule):
    for seed in range(30):
        noise = RoundNoise(seed, 9)
        probs = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed)).softmax(dim=1)
        tokens, law = drafted(noise, truncate(probs[:-1] ** 2 / (probs[:-1] ** 2).sum(dim=1, keepdim=True), 6))
        assert audit(tokens, law, noise, 40) is None
        assert 0 <= rule(tokens, law, probs.numpy(), noise).accepted <= 4
