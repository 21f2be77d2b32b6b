"""Trees in the making: the places of largest worth, found level by level; what is drawn there decides nothing."""

from itertools import pairwise

import numpy as np
import pytest

from draft_service.growth import Growth, chances_drawn
from outrider.law.noise import RoundNoise
from outrider.law.tree import Tree

NOISE = RoundNoise(seed=3, base_length=10)
VOCAB = 6


def law_after(path, seed):
    rng = np.random.default_rng([seed, *path])
    return rng.dirichlet(np.full(VOCAB, 0.4)), rng.permutation(VOCAB)


def grow(nodes, depth, laws, chances, ends=()):
    """(tokens, parents, laws) of the tree; `laws`: path -> (probs, order in which its tokens are drawn)."""
    growth, paths = Growth(NOISE, nodes, depth), {}
    while True:
        for node in growth.level:
            paths[node] = (*paths[node.parent], node.token) if node.parent is not None else ()
            probs, order = laws(paths[node])
            row = np.arange(VOCAB, dtype=np.int32), probs.astype(np.float32)
            growth.branch(node, row, order.tolist(), iter(chances(probs, order)))
        for place, node in enumerate(growth.next_level(ends)):
            node.place = place
        if not growth.level:
            return growth.result()


def all_places(nodes, depth, laws, chances):
    """Every place of the whole tree with its worth, largest first, the first `nodes` of them: their paths."""
    found = []

    def visit(path, worth):
        if len(path) == depth:
            return
        probs, order = laws(path)
        own = worth
        for token, chance in zip(order.tolist(), chances(probs, order), strict=False):
            own = min(own, worth * chance)
            if own > 0:
                found.append((own, (*path, token)))
                visit((*path, token), own)

    visit((), 1.0)
    return {path for _, path in sorted(found, key=lambda it: -it[0])[:nodes]}


def paths_of(tokens, parents):
    shape = Tree(parents)
    return {tuple(tokens[token] for token in shape.path(row)) for row in range(1, len(tokens) + 1)}


def drawn(probs, order):
    return list(chances_drawn(probs[order].tolist()))


def by_probability(probs, order):
    return sorted(probs.tolist(), reverse=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (4, 1), (7, 3), (16, 4)])
def test_a_tree_has_the_places_of_largest_worth(seed, nodes, depth):
    tokens, parents, rows = grow(nodes, depth, lambda path: law_after(path, seed), drawn)
    assert paths_of(tokens, parents) == all_places(nodes, depth, lambda path: law_after(path, seed), drawn)
    assert len(tokens) == nodes
    shape = Tree.of(parents)
    depths = shape.depths if shape is not None else np.arange(nodes + 1)
    assert depths.max() <= depth
    followed = set(parents.tolist())
    assert [len(ids) > 0 for ids, _ in rows] == [row in followed for row in range(nodes)]


def test_of_a_greedy_law_they_are_the_likeliest_texts():
    def likeliest(path):
        probs, _ = law_after(path, 5)
        return probs, (-probs).argsort()

    tokens, parents, _ = grow(12, 3, likeliest, by_probability)
    texts = {}
    for path in np.ndindex(VOCAB, VOCAB, VOCAB):
        chance = 1.0
        for end in range(3):
            chance *= law_after(path[:end], 5)[0][path[end]]
            texts[path[: end + 1]] = chance
    assert paths_of(tokens, parents) == set(sorted(texts, key=texts.__getitem__)[-12:])


def test_whether_a_place_is_in_the_tree_does_not_depend_on_what_is_drawn_there():
    """Each token of the tree is drawn anew, last of its siblings, together with all that follows it."""
    rng = np.random.default_rng(1)
    for seed in range(20):
        orders = {}

        def laws(path, seed=seed, orders=orders):
            probs, order = law_after(path, seed)
            return probs, orders.get(path, order)

        tokens, parents, _ = grow(9, 3, laws, drawn)
        for path in sorted(paths_of(tokens, parents)):
            _, order = laws(path[:-1])
            at = order.tolist().index(path[-1])
            others = rng.permutation(order[at:])
            again = dict(orders)
            again[path[:-1]] = np.concatenate([order[:at], others])
            redrawn = grow(
                9,
                3,
                lambda it, again=again, seed=seed: (law_after(it, seed)[0], again.get(it, law_after(it, seed)[1])),
                drawn,
            )
            assert (*path[:-1], int(others[0])) in paths_of(*redrawn[:2])


def test_nothing_follows_an_end():
    tokens, parents, _ = grow(20, 4, lambda path: law_after(path, 2), drawn, ends=(0, 1))
    assert {0, 1} & set(tokens)
    for parent in parents.tolist():
        assert parent == 0 or tokens[parent - 1] not in (0, 1)


def test_chances_are_those_of_what_was_drawn_before():
    probs = [0.4, 0.3, 0.2, 0.1]
    first, second, *_ = chances_drawn(probs)
    assert first == pytest.approx(0.5 + 0.5 * 0.3)
    assert second == pytest.approx(0.35 * (0.09 + 0.04 + 0.01) / 0.36)
    assert next(chances_drawn([0.3, 0.4, 0.2, 0.1])) == pytest.approx(first)
    assert all(low <= high for high, low in pairwise(chances_drawn(probs)))
    assert sum(chances_drawn([1.0])) == pytest.approx(1.0)
    assert sum(chances_drawn(probs)) <= 1.0 + 1e-9
