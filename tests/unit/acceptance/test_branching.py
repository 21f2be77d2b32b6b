"""Token trees under `ratio`, in closed form: what a round emits has the target's law to 1e-12, and mutants are seen."""

import importlib
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.acceptance import Block, accept, accept_each, ratio
from outrider.law.noise import RoundNoise
from outrider.law.rows import SupportRows
from outrider.law.sparse import SparseLaw
from outrider.law.tree import Tree as Shape
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_BLOCK,
    ACCEPTANCE_COUPLED,
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_RECOVERED,
)
from tests.harness import joint
from tests.harness.branching import END, error, expected_accepted, fixed
from tests.harness.joint import Tree, normalised, random_tree
from tests.harness.rows import over_rows, reference_rows

module = importlib.import_module("orchestrator.acceptance.branching")
EXACT = 1e-12

# What each candidate follows: None is the committed prefix.
SHAPES = {
    "two": (None, None),
    "all three": (None, None, None),
    "two and two": (None, None, 0, 0),
    "the second goes on": (None, None, 1),
    "deep and wide": (None, 0, None, 0, 2),
    "a chain beside a leaf": (None, 0, 1, None),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("vocab_size", "top", "sharpness"), [(3, 2, 0.4), (3, 3, 1.0)])
def test_a_round_with_a_tree_says_what_the_target_says(shape, vocab_size, top, sharpness):
    laws = random_tree(top, 0, vocab_size, top, sharpness)
    assert error(laws, fixed(*SHAPES[shape]), 2) < EXACT


def test_whole_paths_and_their_bonus_do():
    assert error(random_tree(7, 0, 3, 2), fixed(None, None, 0, 0, 1), 3) < EXACT
    assert error(random_tree(8, 0, 3, 2, 0.3), fixed(None, 0, None, 1), 4) < EXACT


def grows_by_what_was_drawn(candidates):
    """As a draft worker may: whether a row gets a candidate depends on all that were drawn before, in any branch."""
    if len(candidates) < 2:
        return (None, 0)[len(candidates)]
    if len(candidates) == 2:
        return None if candidates[1].token != 0 else 0
    if len(candidates) == 3 and candidates[2].parent is None:
        return 2 if candidates[0].token == 1 or candidates[1].token == 2 else END
    return END


@pytest.mark.parametrize("seed", range(3))
def test_a_shape_may_depend_on_candidates_that_were_drawn_before(seed):
    laws = random_tree(50 + seed, 0, 3, 3)
    assert error(laws, grows_by_what_was_drawn, 3) < EXACT


def test_zeros_of_the_target_and_laws_that_never_meet():
    laws = random_tree(20, 0, 4, 3)

    def target(prefix):
        row = laws.target(prefix).copy()
        row[[0, 2] if not prefix else slice(3)] = 0
        return row

    assert error(replace(laws, target=target), fixed(None, None, 0, None), 2) < EXACT
    apart = Tree.honest(
        0, lambda prefix: np.float32([0.5, 0.5, 0, 0]), lambda prefix: (np.int32([2, 3]), np.float32([0.5, 0.5]))
    )
    assert error(apart, fixed(None, None, 0), 2) < EXACT
    assert expected_accepted(apart, fixed(None, None, 0)) == 0


def test_equal_laws_keep_the_first_candidate_always():
    laws = random_tree(21, 0, 3, 3)
    same = Tree.honest(0, laws.target, lambda prefix: (np.arange(3, dtype=np.int32), laws.target(prefix)))
    assert error(same, fixed(None, None, 0, 0), 3) < EXACT
    assert expected_accepted(same, fixed(None, None, 0, 0)) == pytest.approx(2, abs=1e-12)


def test_every_token_of_the_support_as_a_candidate_leaves_no_mass_but_the_tails():
    """The draft's law is empty after its last token, and what the target has elsewhere is drawn."""
    laws = random_tree(22, 0, 4, 2)
    assert error(laws, fixed(None, None), 1) < EXACT


def test_float32_sums_that_are_not_quite_one_do_not_bend_the_law():
    laws = random_tree(23, 0, 3, 3)

    def draft(prefix):
        ids, probs = laws.shipped(prefix, 0)
        return ids, probs * np.float32(1 - 5e-6)

    bent = Tree.honest(0, lambda prefix: laws.target(prefix) * np.float32(1 + 3e-6), draft)
    assert error(bent, fixed(None, None, 0), 2) < EXACT


def test_a_second_candidate_is_worth_something_and_never_costs():
    gains = []
    for seed in range(6):
        laws = random_tree(seed, 0, 4, 3)
        alone = joint.expected_accepted(over_rows(ratio), replace(laws, lookahead=1))
        gains.append(expected_accepted(laws, fixed(None, None)) - alone)
    assert min(gains) > -EXACT
    assert sum(gain > 0.01 for gain in gains) > 3


# Mutants.


def _residual_of(target, tail):
    mass = target.sum() + tail
    return (target / mass, tail / mass) if mass > 0 else (target, tail)


MUTANTS = {
    "accept everything": ("keep_probability", lambda left, at: 1.0),
    "squared acceptance": ("keep_probability", lambda left, at: min(1.0, left.target[at] / left.draft[at]) ** 2),
    "target and draft swapped": (
        "keep_probability",
        lambda left, at: min(1.0, left.draft[at] / max(left.target[at], 1e-30)),
    ),
    "residual from target": ("residual", lambda left: (left.target, left.tail)),
    "residual swapped": ("residual", lambda left: _residual_of(np.maximum(left.draft - left.target, 0), 0.0)),
    "residual without tail": ("residual", lambda left: _residual_of(np.maximum(left.target - left.draft, 0), 0.0)),
    "residual without clamp": ("residual", lambda left: _residual_of(np.abs(left.target - left.draft), left.tail)),
    "residual not divided": ("residual", lambda left: (np.maximum(left.target - left.draft, 0), left.tail)),
    "tail not divided": (
        "residual",
        lambda left: (_residual_of(np.maximum(left.target - left.draft, 0), left.tail)[0], left.tail),
    ),
    "drawn with replacement": ("without", lambda draft, at: draft),
    "draft not divided": ("without", lambda draft, at: np.where(np.arange(len(draft)) == at, 0, draft)),
    "draft without the next": (
        "without",
        lambda draft, at: normalised(np.where(np.arange(len(draft)) == (at + 1) % len(draft), 0, draft)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_rule_is_seen(name, monkeypatch):
    monkeypatch.setattr(module, *MUTANTS[name])
    try:
        wrong = max(error(random_tree(seed, 0, 4, 3), fixed(None, None, None), 1) for seed in (35, 36, 37))
    except (ValueError, ZeroDivisionError):
        return  # a candidate that cannot have been drawn
    assert wrong > 1e-3


def test_a_uniform_for_several_candidates_is_seen(monkeypatch):
    scripted = importlib.import_module("tests.harness.branching").Scripted
    monkeypatch.setattr(scripted, "branch", lambda noise, position, rank: noise)
    with pytest.raises(AssertionError, match="used twice"):
        error(random_tree(35, 0, 4, 3), fixed(None, None), 1)


def test_a_candidate_dropped_because_of_its_token_is_seen():
    """Which candidates there are must not depend on their own tokens: here the second is unused when it is token 1."""

    def worst(chosen):
        laws, grow = [random_tree(seed, 0, 4, 3) for seed in (37, 38)], fixed(None, None, 0, 0)
        return max(error(it, grow, 1, lambda drawn: (drawn[0], *drawn[2:]) if chosen(drawn) else drawn) for it in laws)

    assert worst(lambda drawn: drawn[0].token == 1) < EXACT
    assert worst(lambda drawn: drawn[1].token == 1) > 1e-3


# Path following, and what the rules have in common.

SHAPE = Shape.of(np.array([0, 0, 1, 1, 2], np.int32))
TOKENS = np.array([5, 6, 7, 8, 7], np.int32)
NO_LAW = SparseLaw.concatenate([])


@pytest.mark.parametrize("rule", [ACCEPTANCE_GREEDY, ACCEPTANCE_COUPLED])
@pytest.mark.parametrize(
    ("rows", "path", "token", "origin"),
    [
        ([9, 0, 0, 0, 0, 0], (), 9, TOKEN_ORIGIN_RECOVERED),
        ([5, 9, 0, 0, 0, 0], (0,), 9, TOKEN_ORIGIN_RECOVERED),
        ([5, 8, 0, 0, 3, 0], (0, 3), 3, TOKEN_ORIGIN_BONUS),
        ([6, 0, 7, 0, 0, 4], (1, 4), 4, TOKEN_ORIGIN_BONUS),
        ([6, 0, 8, 0, 0, 4], (1,), 8, TOKEN_ORIGIN_RECOVERED),
    ],
)
def test_rules_that_compare_tokens_follow_the_targets_own(rule, rows, path, token, origin):
    outcome = accept(rule, TOKENS, NO_LAW, np.array(rows, np.int32), RoundNoise(1, 1), SHAPE)
    assert (outcome.path, outcome.accepted, outcome.token, outcome.origin) == (path, len(path), token, origin)
    assert outcome.kept(TOKENS).tolist() == [TOKENS[index] for index in path]
    assert outcome.rows.tolist() == [0, *(index + 1 for index in path)]


def sampled(seed, shape=SHAPE, count=5, top=3):
    """A tree as a draft draws it, over 6 tokens, and the target's rows."""
    rng = np.random.default_rng(seed)
    noise, tokens, rows = RoundNoise(seed, 10), [], []
    for row in range(count):
        law = rng.dirichlet(np.ones(6)).astype(np.float32)
        ids = np.argsort(-law)[:top].astype(np.int32)
        children = len(shape.children(row))
        probs = normalised(law[ids]).astype(np.float32)
        rows.append((ids, probs) if children else (ids[:0], probs[:0]))
        tokens += rng.choice(ids, children, replace=False, p=normalised(probs)).tolist()
    law = SparseLaw.concatenate(rows)
    target = rng.dirichlet(np.ones(6), count + 1).astype(np.float32)
    return Block(np.array(tokens, np.int32), law, reference_rows(target, law, noise), noise, shape)


def test_trees_are_judged_among_chains_as_alone_and_block_judges_them_as_ratio():
    trees = [sampled(seed) for seed in range(12)]
    chains = [
        replace(
            it,
            tree=None,
            tokens=it.tokens[:0],
            law=NO_LAW,
            rows=SupportRows(np.empty(0, np.float32), it.rows.tail_masses[-1:], it.rows.tail_tokens[-1:]),
        )
        for it in trees
    ]
    mixed = [each for pair in zip(trees, chains, strict=True) for each in pair]
    together = accept_each(ACCEPTANCE_RATIO, mixed)
    assert together == [accept(ACCEPTANCE_RATIO, it.tokens, it.law, it.rows, it.noise, it.tree) for it in mixed]
    assert together == accept_each(ACCEPTANCE_BLOCK, mixed)
    assert {outcome.origin for outcome in together[::2]} == {TOKEN_ORIGIN_BONUS, TOKEN_ORIGIN_RECOVERED}
    assert len({outcome.path for outcome in together[::2]}) >= 3


def nan_row(block):
    masses = block.rows.tail_masses.copy()
    masses[3] = np.nan
    return replace(block, rows=replace(block.rows, tail_masses=masses))


REFUSED = {
    "5 draft tokens, 5 draft rows, 5 target rows": lambda it: replace(
        it, rows=replace(it.rows, tail_masses=it.rows.tail_masses[1:])
    ),
    "4 draft tokens": lambda it: replace(it, tokens=it.tokens[1:]),
    "empty row": lambda it: replace(it, law=replace(it.law, sizes=np.roll(it.law.sizes, 1))),
    "entries of draft law": lambda it: replace(it, rows=replace(it.rows, probs=it.rows.probs[1:])),
    "NaN": nan_row,
    "sum to": lambda it: replace(
        it, rows=replace(it.rows, probs=it.rows.probs * 0, tail_masses=it.rows.tail_masses * 0)
    ),
    "no draft probability": lambda it: replace(it, tokens=np.full_like(it.tokens, 99)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_tree_or_no_law_is_refused_alone(why):
    good, bad = sampled(1), REFUSED[why](sampled(2))
    outcomes = accept_each(ACCEPTANCE_RATIO, [good, bad, good])
    assert outcomes[0] == outcomes[2] != outcomes[1]
    assert isinstance(outcomes[1], ValueError)
    assert why in str(outcomes[1])
    with pytest.raises(ValueError, match=why):
        accept(ACCEPTANCE_RATIO, bad.tokens, bad.law, bad.rows, bad.noise, bad.tree)
