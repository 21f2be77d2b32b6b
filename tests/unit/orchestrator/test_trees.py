"""Trees or chains, in virtual time: whatever the workers cost, no worse than the best chain, nor than the best tree."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import pytest

from orchestrator.costs import RoundCost, TargetCosts
from orchestrator.lookahead import DraftHistory, SessionLookahead
from orchestrator.trees import TreeHistory
from outrider.v1.target_pb2 import VerifyTiming

LONGEST, NODES = 8, 16
WITHIN = 0.97


@dataclass(frozen=True)
class Scene:
    """A pair of workers with one session; seconds.

    Attributes:
        chain, tree: how often one more token is kept, of a chain and of a tree.
        position: what a position adds to the target's pass.
        step: of the draft; a tree's takes `level` times as long.
        reach: how deep trees get.
    """

    chain: float
    tree: float
    position: float = 0.0001
    step: float = 0.003
    level: float = 1.5
    target: float = 0.03
    rest: float = 0.001
    reach: int = LONGEST


class Run:
    """One session for ever. `depth`: of every block, fixed; None for the control."""

    def __init__(self, scene: Scene, depth: int | None = None, *, trees: bool = True, seed: int = 1) -> None:
        self.scene, self._random = scene, random.Random(seed)
        self.costs, self.draft, self.trees = TargetCosts(), DraftHistory(), TreeHistory() if trees else None
        self.session = SessionLookahead(depth or LONGEST, lambda: self.costs, adaptive=depth is None)
        self.treed = 0

    def rates_of(self, depth: int) -> Sequence[float]:
        """How often a tree of this depth keeps one more token, by level."""
        return [self.scene.tree] * depth

    def chain_rates(self, depth: int) -> Sequence[float]:
        """The same of a chain."""
        return [self.scene.chain] * depth

    def rate(self, rounds: int) -> float:
        """Tokens a second."""
        scene, tokens, seconds = self.scene, 0, 0.0
        for _ in range(rounds):
            depth = self.session.choose(self.draft, LONGEST, self.trees)
            tree = self.session.tree
            self.treed += tree
            reach = min(depth, scene.reach) if tree else depth
            rates = self.rates_of(reach) if tree else self.chain_rates(depth)
            kept = next(at for at in count() if at == reach or self._random.random() > rates[at])
            drafted = NODES if tree else depth
            took = scene.target + scene.position * (1 + drafted)
            wait = reach * scene.step * (scene.level if tree else 1.0)
            timing = VerifyTiming(
                passes=1,
                batch_items=1,
                batch_positions=1 + drafted,
                computed_tokens=1 + drafted,
                forward_micros=int(took * 1e6),
            )
            self.costs.observe_pass(timing, 1)
            whole = took + wait + scene.rest
            self.session.learn(RoundCost(whole, wait, 0.0, took, 1 + kept, drafted, reach), kept)
            tokens, seconds = tokens + 1 + kept, seconds + whole
        return tokens / seconds


SCENES = {
    "trees pay": Scene(0.5, 0.8),
    "chains are as good": Scene(0.8, 0.8),
    "positions are dear": Scene(0.6, 0.75, position=0.004),
    "levels are dear": Scene(0.6, 0.8, level=6.0),
    "steps cost nothing": Scene(0.4, 0.7, step=0.0001),
    "hardly anything is kept": Scene(0.05, 0.15),
    "nearly all is": Scene(0.97, 0.98),
}


def expected(scene: Scene, depth: int, *, tree: bool) -> float:
    """Tokens a second of blocks of one depth for ever."""
    rate, drafted = (scene.tree, NODES) if tree else (scene.chain, depth)
    wait = depth * scene.step * (scene.level if tree else 1.0)
    return sum(rate**kept for kept in range(depth + 1)) / (
        scene.target + scene.position * (1 + drafted) + wait + scene.rest
    )


@pytest.mark.parametrize("name", SCENES)
def test_the_control_is_no_worse_than_any_chain_or_tree(name: str) -> None:
    scene = SCENES[name]
    best = max(expected(scene, depth, tree=tree) for depth in range(1, LONGEST + 1) for tree in (False, True))
    control = Run(scene)
    control.rate(300)
    assert control.rate(5000) > WITHIN * best


def test_the_simulation_is_what_is_expected_of_it() -> None:
    scene = SCENES["trees pay"]
    for trees in (False, True):
        assert Run(scene, 4, trees=trees).rate(4000) == pytest.approx(expected(scene, 4, tree=trees), rel=0.03)


def test_trees_are_left_when_they_stop_paying_and_taken_up_again() -> None:
    run = Run(Scene(0.5, 0.8))
    run.rate(500)
    assert run.trees is not None
    assert run.trees.chosen
    run.scene = Scene(0.8, 0.3)
    run.rate(3000)
    run.treed = 0
    run.rate(2000)
    assert 0 < run.treed <= 2000 // 200 + 1
    run.scene = Scene(0.3, 0.85)
    run.rate(30_000)
    run.treed = 0
    run.rate(1000)
    assert run.treed > 900


def test_nothing_is_said_of_trees_before_chains_are_known() -> None:
    costs, draft, trees = TargetCosts(), DraftHistory(), TreeHistory()
    session = SessionLookahead(4, lambda: costs)
    assert session.choose(draft, 4, trees) > 0
    assert not session.tree
    assert trees.choose(4) == 0


def test_a_fixed_lookahead_always_has_trees_and_one_of_none_none() -> None:
    costs, draft, trees = TargetCosts(), DraftHistory(), TreeHistory()
    fixed = SessionLookahead(4, lambda: costs, adaptive=False)
    assert fixed.choose(draft, 3, trees) == 3
    assert fixed.tree
    assert fixed.choose(draft, 3) == 3
    assert not fixed.tree
    none = SessionLookahead(0, lambda: costs, adaptive=False)
    assert none.choose(draft, 3, trees) == 0
    assert not none.tree


def test_a_tree_says_nothing_of_chains() -> None:
    costs, draft, trees = TargetCosts(), DraftHistory(), TreeHistory()
    session = SessionLookahead(4, lambda: costs, adaptive=False)
    for _ in range(20):
        session.choose(draft, 4, trees)
        session.learn(RoundCost(0.05, 0.01, 0.0, 0.04, 5), 4)
    assert draft.costs.asked == 0
    assert (trees.trees[4].rounds, trees.chains.rounds) == (20, 0)
    session.choose(draft, 4, trees)
    session.withheld()
    session.learn(RoundCost(0.05, 0.01, 0.0, 0.04, 1), 0)
    assert trees.trees[4].rounds == 20


class Uneven(Run):
    """A tree as deep as it may be spreads its tokens thin: shallow ones get further than deep ones at each level."""

    def rates_of(self, depth: int) -> Sequence[float]:
        return [0.9 if depth <= 2 else 0.45] * depth


def test_what_a_shallow_tree_gives_says_nothing_of_a_deep_one() -> None:
    scene = Scene(0.6, 0.0)
    shallow = (1 + 0.9 + 0.81) / (scene.target + 17 * scene.position + 2 * scene.step * scene.level + scene.rest)
    best = max(shallow, *(expected(scene, depth, tree=False) for depth in range(1, LONGEST + 1)))
    control = Uneven(scene)
    control.rate(300)
    assert control.rate(5000) > WITHIN * best
    assert control.treed > 4000


class Flat(Run):
    """As in bench/lookahead_cells.py with --draft noise=0.7 and 12 nodes: the draft thinks many tokens about as likely,
    so that trees are broad and end early."""

    def rates_of(self, depth: int) -> Sequence[float]:
        return {1: [0.97], 2: [0.85, 0.7], 3: [0.82, 0.63, 0.62]}[min(depth, 3)]

    def chain_rates(self, depth: int) -> Sequence[float]:
        return ([0.57, 0.75, 0.56, 0.75] + [0.5] * depth)[:depth]


@pytest.mark.parametrize("level", [1.2, 4.0])
def test_what_is_found_out_about_trees_costs_little(level: float) -> None:
    """Of few rounds, and whether trees pay or not."""
    scene = Scene(0.0, 0.0, position=0.0004, step=0.0026, level=level, target=0.025, rest=0.002, reach=3)
    seeds = range(20)
    chains = sum(Flat(scene, 2, trees=False, seed=seed).rate(400) for seed in seeds)
    assert sum(Flat(scene, seed=seed).rate(400) for seed in seeds) > WITHIN * chains


def test_trees_are_not_asked_to_be_deeper_than_they_get() -> None:
    run = Run(Scene(0.5, 0.8, reach=3))
    run.rate(500)
    assert run.trees is not None
    assert set(run.trees.trees) == {2, 4}
    run.scene = Scene(0.5, 0.8)
    run.rate(2000)
    assert run.trees.trees[8].rounds


def test_a_stalled_round_is_not_like_those_to_come() -> None:
    trees = TreeHistory()
    for _ in range(20):
        trees.observe(0, 2, 0.05)
    before = trees.chains.goodput()
    trees.observe(0, 2, 5.0)
    assert trees.chains.goodput() == before
