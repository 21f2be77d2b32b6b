import numpy as np
import pytest
import torch

from orchestrator.acceptance import accept, ratio
from outrider.law.audit import audit
from outrider.law.draft import point_mass, propose, truncate
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.sparse import SparseLaw
from outrider.law.transforms import RowContext, law_probs
from outrider.v1.orchestrator_pb2 import Acceptance, TokenOrigin
from tests.harness.exactness import LARGEST, ScriptedNoise

RECOVERED, BONUS, PLAIN = (
    TokenOrigin.TOKEN_ORIGIN_RECOVERED,
    TokenOrigin.TOKEN_ORIGIN_BONUS,
    TokenOrigin.TOKEN_ORIGIN_PLAIN,
)
NOTHING = np.empty(0, np.int32), SparseLaw.concatenate([])


def laws(logits, params, tokens, drafted):
    """Target rows of a block: each row's context holds the draft tokens before it."""
    contexts = [RowContext(params, np.concatenate([tokens, drafted[:count]])) for count in range(len(drafted) + 1)]
    return law_probs(logits, contexts, logits.shape[1]).numpy()


def drafted(noise, rows):
    tokens = [propose(*row, noise, noise.base_length + index) for index, row in enumerate(rows)]
    return np.array(tokens, np.int32), SparseLaw.concatenate(rows)


def test_draft_equal_to_target_is_always_kept_whole():
    """An identity probe: at every lookahead, whatever the noise, and at the largest uniform there is."""
    for seed in range(60):
        lookahead = seed % 8 + 1
        logits = torch.randn(lookahead + 1, 40, generator=torch.Generator().manual_seed(seed)) * 3
        probs = logits.softmax(dim=1)
        noise = RoundNoise(seed, base_length=10)
        tokens, law = drafted(noise, truncate(probs[:-1], 40))
        outcome = ratio(tokens, law, probs.numpy(), noise)
        assert (outcome.accepted, outcome.origin) == (lookahead, BONUS)


def test_a_token_that_target_and_draft_like_equally_survives_the_largest_uniform():
    row = np.array([0.1, 0.2, 0.7], np.float32)
    noise = ScriptedNoise(accept={0: LARGEST}, tail_runner=1.0)
    law = SparseLaw.concatenate([(np.arange(3, dtype=np.int32), row)])
    for token in range(3):
        assert ratio(np.array([token], np.int32), law, np.stack([row, row]), noise).accepted == 1


def test_thresholds_belong_to_the_right_side():
    """Uniforms are multiples of a step: each outcome owns exactly as many of them as its probability has steps."""
    law = SparseLaw.concatenate([(np.arange(2, dtype=np.int32), np.array([0.5, 0.5], np.float32))])
    target = np.array([[0.25, 0.0, 0.75]] * 2, np.float32)
    for uniform, kept in ((0.5 - 2**-54, 1), (0.5, 0)):
        noise = ScriptedNoise(accept={0: uniform}, tail_runner=1.0)
        assert ratio(np.array([0], np.int32), law, target, noise).accepted == kept
    for uniform, token in ((0.25 - 2**-54, 0), (0.25, 2), (LARGEST, 2), (2.0**-65, 0)):
        assert ratio(*NOTHING, target[:1], ScriptedNoise(tail_runner=1.0, tail_uniform=uniform)).token == token


def test_the_same_noise_repeats_the_round_and_another_seed_does_not():
    probs = torch.full((1, 1000), 1e-3)
    outcomes = [ratio(*NOTHING, probs.numpy(), RoundNoise(seed, 7)) for seed in (1, 1, 2)]
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert outcomes[0].origin == PLAIN


def test_a16_sessions_with_seeds_of_their_own_say_different_things():
    probs = np.full((1, 50), 0.02, np.float32)
    outputs = {tuple(ratio(*NOTHING, probs, RoundNoise(seed, base)).token for base in range(8)) for seed in range(64)}
    assert len(outputs) >= 60


def test_a6_top_k_1_is_greedy_token_for_token():
    prefix = np.array([1, 2], np.int32)
    for seed in range(100):
        logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(seed)) * 2
        noise = RoundNoise(seed, base_length=2)
        tokens, law = drafted(noise, truncate((logits[:-1] * 0.8).softmax(dim=1), 8))
        outcomes = {
            accept(rule, tokens, law, laws(logits, params, prefix, tokens), noise)
            for rule, params in (
                (Acceptance.ACCEPTANCE_RATIO, LawParams(top_k=1)),
                (Acceptance.ACCEPTANCE_GREEDY, LawParams(temperature=0.0)),
            )
        }
        assert len(outcomes) == 1


def test_a6_nothing_outside_the_nucleus_at_any_kind_of_position():
    """10 000 tokens and more with top_p = 0.5, each position tagged by the origin of its token."""
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(3)) * 1.5
    prefix = np.array([0], np.int32)
    rows = truncate((logits[:-1] * 0.5).softmax(dim=1), 12)
    seen = {"accepted": [set(), set()], RECOVERED: [set(), set(), set()], BONUS: [set(), set(), set()]}
    target = laws(logits, LawParams(top_p=0.5), prefix, np.zeros(2, np.int32))
    for seed in range(6000):
        noise = RoundNoise(seed, base_length=1)
        tokens, law = drafted(noise, rows)
        outcome = ratio(tokens, law, target, noise)
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
    outcomes = (ratio(tokens, law, target, RoundNoise(seed, 5)) for seed in range(20_000))
    recovered = [outcome.token for outcome in outcomes if outcome.accepted == 0]
    assert abs(len(recovered) / 20_000 - 0.5) < 0.02
    shares = np.bincount(recovered, minlength=3) / len(recovered)
    np.testing.assert_allclose(shares, [0, 0.6, 0.4], atol=0.02)
    assert shares[0] == 0


def test_no_residual_left_falls_back_to_the_target():
    """Laws equal up to rounding, and a uniform that rejects all the same: a decided case, not NaN."""
    from orchestrator.acceptance.ratio import residual

    row = np.array([0.25, 0.75], np.float32)
    assert residual(row, np.arange(2, dtype=np.int32), row).tolist() == [0.25, 0.75]


def test_what_is_no_block_or_no_law_is_refused():
    law = SparseLaw.concatenate([(np.array([1, 2], np.int32), np.array([0.5, 0.5], np.float32))])
    target = np.full((2, 4), 0.25, np.float32)
    noise = RoundNoise(0, 3)
    with pytest.raises(ValueError, match="no draft probability"):
        ratio(np.array([3], np.int32), law, target, noise)
    with pytest.raises(ValueError, match="target rows"):
        ratio(np.array([1], np.int32), law, target[:1], noise)
    for broken in (np.nan, np.inf, -1.0):
        with pytest.raises(ValueError, match="sum to"):
            ratio(np.array([1], np.int32), law, np.where(target > 0, broken, 0).astype(np.float32), noise)
        with pytest.raises(ValueError, match="finite probabilities"):
            ratio(*NOTHING, np.full((1, 4), broken, np.float32), noise)
    with pytest.raises(ValueError, match="no acceptance rule"):
        accept(Acceptance.ACCEPTANCE_UNSPECIFIED, *NOTHING, target[:1], noise)


def test_an_audited_block_is_one_that_ratio_takes():
    for seed in range(30):
        noise = RoundNoise(seed, 9)
        probs = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed)).softmax(dim=1)
        tokens, law = drafted(noise, truncate(probs[:-1] ** 2 / (probs[:-1] ** 2).sum(dim=1, keepdim=True), 6))
        assert audit(tokens, law, noise, 40) is None
        assert 0 <= ratio(tokens, law, probs.numpy(), noise).accepted <= 4
