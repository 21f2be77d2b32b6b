"""The closed forms that the truncation bench prints, against the rules themselves, and a run of the bench."""

import numpy as np
import pytest

from bench import truncation
from bench.acceptance_law import Place, survival_block, survival_coupled, survival_ratio
from orchestrator.acceptance import block, ratio
from tests.harness.joint import Tree, expected_accepted, normalised, random_tree
from tests.harness.rows import over_rows


def place(tree: Tree, prefix: tuple[int, ...], token: int) -> Place:
    ids, probs = tree.shipped(prefix, token)
    return Place(token, normalised(tree.target(prefix)), ids, normalised(probs))


def expected(tree: Tree, survival) -> float:
    """Accepted tokens of a block: the mean over every text of the target."""
    total, law = 0.0, tree.target_law(tree.lookahead)
    for text in np.ndindex(law.shape):
        total += law[text] * survival([place(tree, text[:index], token) for index, token in enumerate(text)]).sum()
    return total


@pytest.mark.parametrize(("rule", "survival"), [(ratio, survival_ratio), (block, survival_block)])
@pytest.mark.parametrize("top", [1, 2, 3])
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_accepted_tokens_are_those_of_the_rule(rule, survival, top, sharpness):
    tree = random_tree(top, lookahead=3, vocab_size=3, top=top, sharpness=sharpness)
    assert expected(tree, survival) == pytest.approx(expected_accepted(over_rows(rule), tree), abs=1e-12)


def coupled_by_integration(one: Place) -> float:
    """Over the winner's exponential e: every other one is at least e times the larger of two ratios."""
    draft = np.zeros(len(one.target))
    draft[one.token_ids] = one.draft
    total = 0.0
    for x in np.flatnonzero(one.target * draft):
        rate = sum(max(one.target[y] / one.target[x], draft[y] / draft[x]) for y in range(len(draft)))
        total += 1 / rate
    return total


@pytest.mark.parametrize("top", [1, 3, 6])
def test_coupled_winners_agree_as_often_as_the_definition_says(top):
    for seed in range(5):
        one = place(random_tree(seed, vocab_size=6, top=top), (), 0)
        assert one.coupled_rate == pytest.approx(coupled_by_integration(one), abs=1e-14)
        assert one.coupled_rate <= one.ratio_rate + 1e-14


def test_coupled_survival_multiplies_the_rates_of_independent_places():
    """Where laws depend on the position alone, a block is kept as often as its places together."""
    rows = [random_tree(seed, vocab_size=4, top=3) for seed in (3, 4, 5)]
    tree = Tree.honest(3, lambda it: rows[len(it)].target(()), lambda it: rows[len(it)].shipped((), 0))
    rates = [place(tree, (0,) * index, 0).coupled_rate for index in range(3)]
    assert expected(tree, survival_coupled) == pytest.approx(np.cumprod(rates).sum(), abs=1e-12)


def test_equal_laws_keep_everything():
    law = np.array([0.5, 0.3, 0.2])
    at = [Place(token, law, np.arange(3, dtype=np.int32), law) for token in (0, 2, 1)]
    for survival in (survival_ratio, survival_block, survival_coupled):
        np.testing.assert_allclose(survival(at), 1.0, atol=1e-15)


def test_the_bench_runs_and_its_lines_are_in_order(capsys):
    truncation.main(["--smoke"])
    lines = {line[:15].strip(): line[15:].split() for line in capsys.readouterr().out.splitlines()}
    few, some, full, argmax = (
        np.array(lines[name], dtype=float) for name in ("m = 2", "m = 8", "full", "argmax, no law")
    )
    assert (few <= some).all()
    assert (some <= full).all()
    assert (argmax < full).all()
    assert full[0] == 1
    assert full[4] >= full[3]
