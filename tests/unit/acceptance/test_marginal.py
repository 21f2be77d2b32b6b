"""Layer 1 of exactness: the law of what the implemented rule emits, in closed form, is the target's to 1e-12.

And each way to get it wrong that others have shipped is seen by the same instrument.
"""

import numpy as np
import pytest
import torch

from orchestrator.acceptance import Outcome, ratio
from outrider.law.draft import truncate
from outrider.law.sparse import SparseLaw
from tests.harness.exactness import Block, output_law
from tests.harness.mutants import RULE_MUTANTS, module

EXACT = 1e-12


def normalised(rows):
    rows = np.asarray(rows, dtype=np.float64)
    return rows / rows.sum(axis=-1, keepdims=True)


def honest(rows, target_probs):
    """A block whose tokens were drawn from exactly the law beside them."""
    law, vocab_size = SparseLaw.concatenate(rows), target_probs.shape[1]
    drawn = np.zeros((len(rows), vocab_size))
    for index, (ids, probs) in enumerate(rows):
        drawn[index, ids] = normalised(probs)
    return Block(drawn, lambda tokens: law, target_probs)


def random_laws(seed, lookahead=2, vocab_size=6, sharpness=1.0):
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.full(vocab_size, sharpness), lookahead + 1).astype(np.float32)
    draft = torch.from_numpy(rng.dirichlet(np.full(vocab_size, sharpness), lookahead).astype(np.float32))
    return target, draft


def error(rule, block):
    law = output_law(rule, block)
    return np.abs(law - normalised(block.target_probs)[: len(law)]).max()


@pytest.mark.parametrize("top", [1, 3, 6])
@pytest.mark.parametrize("seed", range(6))
def test_the_output_law_is_the_targets(seed, top):
    target, draft = random_laws(seed, sharpness=(0.3, 1.0, 5.0)[seed % 3])
    assert error(ratio, honest(truncate(draft, top), target)) < EXACT


def test_the_output_law_is_the_targets_where_it_has_zeros():
    """top_k and top_p on the target: zeros inside and outside the draft's support."""
    target, draft = random_laws(20, lookahead=3)
    target[:, [0, 3]] = 0
    target[1, :4] = 0
    assert error(ratio, honest(truncate(draft, 4), target)) < EXACT


def test_the_output_law_is_the_targets_when_the_laws_are_equal():
    target, _ = random_laws(21)
    assert error(ratio, honest(truncate(torch.from_numpy(target[:2]), 6), target)) < EXACT


def test_the_output_law_is_the_targets_when_the_laws_never_meet():
    target = np.array([[0.5, 0.5, 0, 0, 0], [0, 0, 0.25, 0.5, 0.25]], dtype=np.float32)
    rows = [(np.array([2, 3, 4], np.int32), np.array([0.5, 0.25, 0.25], np.float32))]
    assert error(ratio, honest(rows, target)) < EXACT


def test_float32_sums_that_are_not_quite_one_do_not_bend_the_law():
    target, draft = random_laws(22)
    target *= np.float32(1 + 3e-6)
    rows = [(ids, probs * np.float32(1 - 5e-6)) for ids, probs in truncate(draft, 4)]
    assert error(ratio, honest(rows, target)) < EXACT


def test_a_plain_round_draws_from_the_target():
    target, _ = random_laws(23, lookahead=0, vocab_size=40)
    assert error(ratio, honest([], target)) < EXACT


def test_a3_tokens_that_the_target_never_says_are_never_kept():
    target = np.array([[0.0, 0.6, 0.4, 0.0]] * 3, dtype=np.float32)
    rows = [(np.array([0, 3], np.int32), np.array([0.7, 0.3], np.float32))] * 2
    law = output_law(ratio, honest(rows, target))
    assert len(law) == 1, "a draft token was kept"
    np.testing.assert_allclose(law[0], normalised(target[0]), atol=EXACT)


def test_a4_a_draft_that_says_its_argmax_ships_a_point_mass():
    """The residual is then the target's law without that token, renormalised, and the output law still the target's."""
    target = torch.tensor([[2, 1.5, 1, 0.5]]).softmax(dim=1).numpy().repeat(2, axis=0)
    block = honest([(np.array([0], np.int32), np.ones(1, np.float32))], target)
    assert error(ratio, block) < EXACT
    rest = module.residual(target[0], np.array([0], np.int32), np.ones(1, np.float32))
    np.testing.assert_allclose(normalised(rest), np.r_[0, normalised(target[0, 1:])], atol=1e-12)


@pytest.mark.parametrize("mutant", RULE_MUTANTS)
def test_a_mutant_of_the_rule_is_seen(mutant, monkeypatch):
    target, draft = random_laws(30)
    block = honest(truncate(draft, 4), target)
    assert error(ratio, block) < EXACT
    monkeypatch.setattr(module, *RULE_MUTANTS[mutant])
    assert error(ratio, block) > 1e-3


def test_sums_that_are_not_divided_out_are_seen(monkeypatch):
    """An error of 1e-8, which no statistic sees."""
    target, draft = random_laws(30)
    monkeypatch.setattr(module, "total", lambda row: 1.0)
    assert error(ratio, honest(truncate(draft, 4), target)) > 1e-9


def bonus_dropped(tokens, law, target_probs, noise):
    outcome = ratio(tokens, law, target_probs, noise)
    if outcome.accepted < len(tokens):
        return outcome
    return Outcome(outcome.accepted - 1, int(tokens[-1]), outcome.origin)


def test_a_dropped_bonus_is_seen():
    target, draft = random_laws(31)
    with pytest.raises(AssertionError, match="stopped elsewhere"):
        output_law(bonus_dropped, honest(truncate(draft, 4), target))


def rows_off_by_one(tokens, law, target_probs, noise):
    return ratio(tokens, law, np.roll(target_probs, -1, axis=0), noise)


def recovered_drawn_again(tokens, law, target_probs, noise):
    """The token after a rejection is drawn from the target's own law of the row, by the bonus path."""
    outcome = ratio(tokens, law, target_probs, noise)
    if outcome.accepted == len(tokens):
        return outcome
    plain = SparseLaw.concatenate([])
    again = ratio(tokens[:0], plain, target_probs[outcome.accepted : outcome.accepted + 1], noise)
    return Outcome(outcome.accepted, again.token, outcome.origin)


@pytest.mark.parametrize("rule", [rows_off_by_one, recovered_drawn_again])
def test_a_mutant_around_the_rule_is_seen(rule):
    target, draft = random_laws(32)
    assert error(rule, honest(truncate(draft, 1), target)) > 1e-3


def lied(rows, target, drawn):
    block = honest(rows, target)
    return Block(drawn, block.shipped, target)


def test_a_draft_temperature_lied_about_is_seen():
    target, draft = random_laws(33)
    hotter = normalised(draft.numpy() ** (1 / 1.1))
    assert error(ratio, lied(truncate(draft, 6), target, hotter)) > 1e-3


def test_a_draw_from_bfloat16_beside_a_float32_law_is_seen():
    """4e-5 to 1e-3 of error: far below what a chi-square of 100 000 rounds sees, far above 1e-12."""
    target, draft = random_laws(34)
    assert error(ratio, lied(truncate(draft, 6), target, normalised(draft.bfloat16().float().numpy()))) > 1e-5


def test_a_law_truncated_after_the_draw_is_seen():
    """Drawn from six tokens; shipped: the three likeliest and, when it is none of them, the token drawn."""
    target, draft = random_laws(35)
    rows = draft.numpy()

    def shipped(tokens):
        kept = [
            np.union1d(row.argsort()[-3:], [token]).astype(np.int32) for row, token in zip(rows, tokens, strict=True)
        ]
        return SparseLaw.concatenate(
            [(ids, normalised(row[ids]).astype(np.float32)) for ids, row in zip(kept, rows, strict=True)]
        )

    assert error(ratio, Block(normalised(rows), shipped, target)) > 1e-3
