"""The audit of trees: siblings are the first winners of one race, in their order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.law.audit import Claim, audit, audit_each
from outrider.law.draft import propose, truncate
from outrider.law.noise import Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.sparse import SparseLaw
from outrider.law.tree import Tree

VOCAB = 50
NOISE = RoundNoise(seed=123, base_length=40)
TREE = Tree.of(np.array([0, 0, 0, 1, 1, 3, 4], np.int32))


def block(noise=NOISE, seed=0, temperature=1.0, top=12, with_replacement=False):
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    rows = truncate((logits / temperature).softmax(dim=1), top)
    noises, tokens = TREE.noises(noise), []
    for row, (ids, probs) in enumerate(rows):
        position = noise.base_length + int(TREE.depths[row])
        order = scores(probs, noises[row].exponentials(Purpose.PROPOSE, position, ids)).argsort()
        count = len(TREE.children(row))
        tokens += [ids[order[0]]] * count if with_replacement else ids[order[:count]].tolist()
        if not count:
            rows[row] = ids[:0], probs[:0]
    return np.array(tokens, np.int32), SparseLaw.concatenate(rows)


def test_an_honest_tree_passes_beside_chains():
    claims = []
    for seed in range(30):
        noise = RoundNoise(seed=seed << 33 | 7, base_length=seed)
        claims.append(Claim(*block(noise, seed=seed), noise, VOCAB, TREE))
        ids, probs = claims[-1].law.row(0)
        token = propose(ids, probs, noise, seed)
        claims.append(Claim(np.array([token], np.int32), SparseLaw.concatenate([(ids, probs)]), noise, VOCAB))
    assert audit_each(claims) == [None] * 60
    assert all(audit(it.tokens, it.law, it.noise, VOCAB, it.tree) is None for it in claims)


def swapped(array, first, second):
    copy = array.copy()
    copy[[first, second]] = array[[second, first]]
    return copy


def changed(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


TOKENS, LAW = block()
OTHER = next(t for t in LAW.row(0)[0] if t not in TOKENS[:3])
DISHONEST = {
    "7 draft tokens with 6 parents": (TOKENS, LAW, Tree(TREE.parents[:-1])),
    "empty": (TOKENS, replace(LAW, sizes=changed(LAW.sizes, 3, 0)), TREE),
    "followed by no token": (TOKENS, replace(LAW, sizes=changed(LAW.sizes, 6, 1)), TREE),
    "was not drawn from row 0": (swapped(TOKENS, 1, 2), LAW, TREE),
    f"token {OTHER} was not drawn from row 0": (changed(TOKENS, 2, OTHER), LAW, TREE),
    "is not in row 1": (changed(TOKENS, 4, TOKENS[3]), LAW, TREE),
    "was not drawn from row 1": (swapped(TOKENS, 3, 4), LAW, TREE),
    "row 4 of its law": (changed(TOKENS, 6, next(t for t in LAW.row(4)[0] if t != TOKENS[6])), LAW, TREE),
    "token 50 is outside": (changed(TOKENS, 6, VOCAB), LAW, TREE),
}


@pytest.mark.parametrize("fault", DISHONEST)
def test_each_fault_is_named(fault):
    tokens, law, tree = DISHONEST[fault]
    assert fault in audit(tokens, law, NOISE, VOCAB, tree)


@pytest.mark.parametrize("lie", ["temperature", "seed", "base_length", "noise shared by branches", "replacement"])
def test_lies_about_a_tree_are_caught(lie, monkeypatch):
    caught = 0
    for seed in range(20):
        if lie == "noise shared by branches":
            with monkeypatch.context() as patch:
                patch.setattr(RoundNoise, "branch", lambda noise, position, rank: noise)
                tokens, law = block(seed=seed)
            told = tokens, law, NOISE
        else:
            tokens, law = block(seed=seed)
            told = {
                "temperature": (tokens, block(seed=seed, temperature=1.6)[1], NOISE),
                "seed": (tokens, law, replace(NOISE, seed=124)),
                "base_length": (tokens, law, replace(NOISE, base_length=41)),
                "replacement": (block(seed=seed, with_replacement=True)[0], law, NOISE),
            }[lie]
        caught += audit(*told, VOCAB, TREE) is not None
    assert caught >= 10
