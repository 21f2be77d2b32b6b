"""Layer 1 of exactness: the law of what the implemented rule emits, in closed form, is the target's to 1e-12.

And each way to get it wrong that others have shipped is seen by the same instrument.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchestrator.acceptance import Outcome, block, ratio
from outrider.law.draft import truncate
from outrider.law.noise import Purpose
from outrider.law.sparse import SparseLaw
from tests.harness import mutants
from tests.harness.exactness import LARGEST
from tests.harness.joint import Judged, Tree, emitted_law, error, expected_accepted, normalised, random_tree
from tests.harness.mutants import BLOCK_MUTANTS, RATIO_MUTANTS, SHARED_MUTANTS
from tests.harness.rows import law_rows, over_rows

EXACT = 1e-12
RATIO, BLOCK = over_rows(ratio), over_rows(block)
RULES = pytest.mark.parametrize("rule", [RATIO, BLOCK], ids=["ratio", "block"])


def float32(*numbers):
    return np.array(numbers, np.float32)


def fixed(target, rows):
    """A tree whose laws depend on the position alone: target [lookahead + 1, vocab_size], rows [lookahead]."""
    return Tree.honest(len(rows), lambda prefix: target[len(prefix)], lambda prefix: rows[len(prefix)])


@RULES
@pytest.mark.parametrize(("lookahead", "vocab_size", "top"), [(1, 6, 3), (2, 4, 1), (2, 4, 3), (3, 3, 2), (3, 3, 3)])
@pytest.mark.parametrize("sharpness", [0.3, 2.0])
def test_what_a_round_and_the_target_after_it_say_is_the_targets_law(rule, lookahead, vocab_size, top, sharpness):
    assert error(rule, random_tree(top, lookahead, vocab_size, top, sharpness)) < EXACT


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize(("lookahead", "vocab_size", "top"), [(1, 6, 3), (2, 3, 2), (2, 3, 3)])
def test_with_the_rows_of_the_services_it_is_too(rule, lookahead, vocab_size, top):
    tree = random_tree(40, lookahead, vocab_size, top)
    assert error(over_rows(rule, law_rows), tree) < EXACT


def test_a_token_drawn_by_the_target_has_the_targets_law_over_a_long_vocabulary():
    """The draw goes by chunks of 512; tokens stand at both sides of their borders, and zeros between them."""
    target = np.zeros(2000, np.float32)
    target[[0, 3, 510, 511, 512, 1023, 1024, 1999]] = normalised(np.arange(1, 9))
    plain = Tree.honest(0, lambda prefix: target, lambda prefix: (np.empty(0, np.int32), float32()))
    assert error(over_rows(ratio, law_rows), plain) < EXACT


@RULES
def test_what_rounds_upon_rounds_say_is_the_targets_law(rule):
    tree = random_tree(5, lookahead=2, vocab_size=2)
    assert np.abs(emitted_law(rule, tree, 4, rounds=True) - tree.target_law(4)).max() < EXACT


@RULES
def test_a_block_may_end_early_at_a_token_of_its_own(rule):
    """As after a drafted stop token: how long a block is may depend on its tokens, and on nothing behind them."""
    tree = replace(random_tree(6, lookahead=3, vocab_size=3, top=3), ends=lambda prefix: prefix[-1] == 1)
    assert len({len(tokens) for tokens, _ in tree.blocks()}) == 3
    assert error(rule, tree) < EXACT


@RULES
def test_the_output_law_is_the_targets_where_it_has_zeros(rule):
    """top_k and top_p on the target: zeros inside and outside the draft's support."""
    tree = random_tree(20, lookahead=2, vocab_size=5, top=3)

    def target(prefix):
        row = tree.target(prefix).copy()
        row[[0, 3] if len(prefix) != 1 else slice(4)] = 0
        return row

    assert error(rule, replace(tree, target=target)) < EXACT


@RULES
def test_the_output_law_is_the_targets_when_the_laws_are_equal(rule):
    tree = random_tree(21, lookahead=3)
    same = Tree.honest(3, tree.target, lambda prefix: (np.arange(3, dtype=np.int32), tree.target(prefix)))
    assert error(rule, same) < EXACT
    assert expected_accepted(rule, same) == pytest.approx(3, abs=1e-12)


@RULES
def test_the_output_law_is_the_targets_when_the_laws_never_meet(rule):
    rows = [(np.array([2, 3], np.int32), float32(0.5, 0.5))] * 2
    tree = fixed(np.array([[0.5, 0.5, 0, 0]] * 3, np.float32), rows)
    assert error(rule, tree) < EXACT
    assert expected_accepted(rule, tree) == 0


@RULES
def test_float32_sums_that_are_not_quite_one_do_not_bend_the_law(rule):
    tree = random_tree(22)

    def draft(prefix):
        ids, probs = tree.shipped(prefix, 0)
        return ids, probs * np.float32(1 - 5e-6)

    assert error(rule, Tree.honest(2, lambda prefix: tree.target(prefix) * np.float32(1 + 3e-6), draft)) < EXACT


@RULES
def test_a_plain_round_draws_from_the_target(rule):
    assert error(rule, random_tree(23, lookahead=0, vocab_size=40)) < EXACT


@RULES
def test_a3_tokens_that_the_target_never_says_are_never_kept(rule):
    target = np.array([[0.0, 0.6, 0.4, 0.0]] * 3, dtype=np.float32)
    tree = fixed(target, [(np.array([0, 3], np.int32), float32(0.7, 0.3))] * 2)
    assert expected_accepted(rule, tree) == 0
    assert error(rule, tree) < EXACT


@RULES
def test_a4_a_draft_that_says_its_argmax_ships_a_point_mass(rule):
    target = torch.tensor([[2, 1.5, 1, 0.5]]).softmax(dim=1).numpy().repeat(3, axis=0)
    tree = fixed(target, [(np.array([0], np.int32), float32(1.0))] * 2)
    assert error(rule, tree) < EXACT


@RULES
@pytest.mark.parametrize("count", [0, 1])
def test_a11_after_a_rejected_point_mass_the_target_without_it_is_left(rule, count):
    target = np.array([[0.4, 0.3, 0.2, 0.1]] * 3, np.float32)
    judged = Judged(rule, fixed(target, [(np.array([0], np.int32), float32(1.0))] * 2), (), (0, 0))
    chance, accept = judged.counts()[count]
    assert 0 < chance < 1
    np.testing.assert_allclose(judged.next_token(count, accept), np.r_[0, normalised(target[0, 1:])], atol=EXACT)


@RULES
def test_each_uniform_has_one_threshold_whatever_the_others_are(rule):
    """What the instrument takes for granted: its counts are those of random uniforms, block by block."""
    rng = np.random.default_rng(9)
    tree = random_tree(24, lookahead=3)
    for tokens, _ in tree.blocks():
        judged = Judged(rule, tree, (), tokens)
        edges = judged.thresholds()
        for uniforms in rng.random((40, 3)):
            kind = np.where(uniforms < edges, 1e-300, LARGEST)
            assert judged.accepted(uniforms.tolist()) == judged.accepted(kind.tolist())


# Mutants.

MUTANTS = [
    *((RATIO, name, mutant) for name, mutant in (SHARED_MUTANTS | RATIO_MUTANTS).items()),
    *((BLOCK, name, mutant) for name, mutant in (SHARED_MUTANTS | BLOCK_MUTANTS).items()),
]


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [pytest.param(rule, it, id=f"{'ratio' if rule is RATIO else 'block'}-{name}") for rule, name, it in MUTANTS],
)
def test_a_mutant_of_the_rule_is_seen(rule, mutant, monkeypatch):
    tree = random_tree(35, lookahead=3, vocab_size=4, top=2)
    mutant.install(monkeypatch)
    assert error(rule, tree) > 1e-3


@RULES
def test_sums_that_are_not_divided_out_are_seen(rule, monkeypatch):
    """An error of 1e-8, which no statistic sees."""
    monkeypatch.setattr(mutants.laws, "_positive", lambda sums, rows: np.ones_like(sums))
    assert error(rule, random_tree(30, vocab_size=5, top=4)) > 100 * EXACT


def first_rejection_ends_the_block(tokens, law, target_probs, noise):
    """`block`'s probabilities, asked in `ratio`'s order."""
    low, kept = np.full(len(tokens), LARGEST), 0
    for index, uniform in enumerate(noise.uniforms(Purpose.ACCEPT, noise.base_length + np.arange(len(tokens)))):
        alone = low.copy()
        alone[index] = uniform
        scripted = {noise.base_length + place: float(it) for place, it in enumerate(alone)}
        if BLOCK(tokens, law, target_probs, replace(noise, accept=scripted)).accepted != index + 1:
            break
        kept = index + 1
    forced = {noise.base_length + place: 1e-300 if place == kept - 1 else LARGEST for place in range(len(tokens))}
    return BLOCK(tokens, law, target_probs, replace(noise, accept=forced))


def rows_off_by_one(rule):
    return lambda tokens, law, target_probs, noise: rule(tokens, law, np.roll(target_probs, -1, axis=0), noise)


def recovered_drawn_again(rule):
    """The token after a rejection is drawn from the target's own law of the row, by the bonus path."""

    def wrong(tokens, law, target_probs, noise):
        outcome = rule(tokens, law, target_probs, noise)
        if outcome.accepted == len(tokens):
            return outcome
        row = target_probs[outcome.accepted : outcome.accepted + 1]
        return Outcome(outcome.accepted, rule(tokens[:0], SparseLaw.concatenate([]), row, noise).token, outcome.origin)

    return wrong


def bonus_dropped(rule):
    def wrong(tokens, law, target_probs, noise):
        outcome = rule(tokens, law, target_probs, noise)
        return replace(outcome, token=int(tokens[-1])) if outcome.accepted == len(tokens) else outcome

    return wrong


@RULES
@pytest.mark.parametrize("mutate", [rows_off_by_one, recovered_drawn_again, bonus_dropped])
def test_a_mutant_around_the_rule_is_seen(rule, mutate):
    assert error(mutate(rule), random_tree(32, vocab_size=3, top=2)) > 1e-3


def test_block_that_stops_at_the_first_rejection_is_seen():
    assert error(first_rejection_ends_the_block, random_tree(32, lookahead=3)) > 1e-3


# Lies about the draft's law, which no rule can see, and the instrument does.


def lying(drawn, shipped=None, seed=33):
    tree = random_tree(seed, vocab_size=4, top=4)
    return replace(tree, drawn=lambda prefix: drawn(tree.drawn(prefix)), shipped=shipped or tree.shipped)


@RULES
def test_a_draft_temperature_lied_about_is_seen(rule):
    assert error(rule, lying(lambda law: normalised(law ** (1 / 1.1)))) > 1e-3


@RULES
def test_a_draw_from_bfloat16_beside_a_float32_law_is_seen(rule):
    """1e-4 of error: far below what a chi-square of 100 000 rounds sees, far above 1e-12."""
    assert error(rule, lying(lambda law: normalised(torch.from_numpy(law).bfloat16().double().numpy()))) > 1e-5


@RULES
def test_a_law_truncated_after_the_draw_is_seen(rule):
    """Drawn from four tokens; shipped: the two likeliest and, when it is none of them, the token drawn."""
    honest = random_tree(35, vocab_size=4, top=4)

    def shipped(prefix, token):
        law = honest.drawn(prefix)
        ids = np.union1d(law.argsort()[-2:], [token]).astype(np.int32)
        return ids, normalised(law[ids]).astype(np.float32)

    assert error(rule, lying(lambda law: law, shipped, seed=35)) > 1e-3


def test_a_law_truncated_before_the_draw_is_none_of_these():
    assert error(BLOCK, random_tree(35, vocab_size=4, top=2)) < EXACT
    assert truncate(torch.tensor([[0.5, 0.3, 0.2]]), 2)[0][1].sum() == pytest.approx(1)


# `block` against `ratio`.


@pytest.mark.parametrize("seed", range(12))
def test_block_keeps_no_fewer_tokens_than_ratio_in_expectation(seed):
    tree = random_tree(seed, lookahead=3, vocab_size=3, top=seed % 3 + 1, sharpness=(0.5, 2.0)[seed % 2])
    more = expected_accepted(BLOCK, tree) - expected_accepted(RATIO, tree)
    assert more > -EXACT


def test_block_keeps_more_tokens_than_ratio_where_a_likelier_token_can_pay_for_a_later_one():
    """Two tokens, target and draft swapped at each place: 'better in expectation' with numbers of the paper's kind."""
    target = np.array([[1 / 3, 2 / 3]] * 3, np.float32)
    tree = fixed(target, [(np.arange(2, dtype=np.int32), float32(2 / 3, 1 / 3))] * 2)
    assert expected_accepted(RATIO, tree) == pytest.approx(10 / 9, abs=1e-6)
    assert expected_accepted(BLOCK, tree) == pytest.approx(11 / 9, abs=1e-6)


def test_one_draft_token_is_judged_alike_by_both():
    for seed in range(5):
        tree = random_tree(seed, lookahead=1, vocab_size=4)
        assert expected_accepted(BLOCK, tree) == pytest.approx(expected_accepted(RATIO, tree), abs=EXACT)
