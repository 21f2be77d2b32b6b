from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.law.audit import audit
from outrider.law.draft import point_mass, propose, truncate
from outrider.law.noise import RoundNoise
from outrider.law.sparse import SparseLaw

VOCAB = 50
NOISE = RoundNoise(seed=123, base_length=40)


def block(noise=NOISE, lookahead=8, temperature=1.0, seed=0, top=12):
    logits = torch.randn(lookahead, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    rows = truncate((logits / temperature).softmax(dim=1), top)
    tokens = [propose(ids, probs, noise, noise.base_length + index) for index, (ids, probs) in enumerate(rows)]
    return np.array(tokens, dtype=np.int32), SparseLaw.concatenate(rows)


def changed(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


def test_an_honest_block_passes():
    for seed in range(50):
        noise = RoundNoise(seed=seed << 33 | 7, base_length=seed)
        assert audit(*block(noise, seed=seed), noise, VOCAB) is None
    assert audit(np.empty(0, np.int32), SparseLaw.concatenate([]), NOISE, VOCAB) is None
    assert audit(np.array([9, 9], np.int32), SparseLaw.concatenate([point_mass(9)] * 2), NOISE, VOCAB) is None


TOKENS, LAW = block()
DISHONEST = {
    "rows of draft law": (TOKENS[:-1], LAW),
    "is empty": (TOKENS, replace(LAW, sizes=changed(LAW.sizes, 3, 0))),
    "entries with": (TOKENS, replace(LAW, probs=LAW.probs[:-1])),
    "draft token 50 is outside": (changed(TOKENS, 2, VOCAB), LAW),
    "draft token -1 is outside": (changed(TOKENS, 2, -1), LAW),
    "law token 2147483647 is outside": (TOKENS, replace(LAW, token_ids=changed(LAW.token_ids, 5, 2**31 - 1))),
    "law token -7 is outside": (TOKENS, replace(LAW, token_ids=changed(LAW.token_ids, 5, -7))),
    "nan is not above 0": (TOKENS, replace(LAW, probs=changed(LAW.probs, 5, np.nan))),
    "-0.5 is not above 0": (TOKENS, replace(LAW, probs=changed(LAW.probs, 5, -0.5))),
    "0.0 is not above 0": (TOKENS, replace(LAW, probs=changed(LAW.probs, 5, 0))),
    "sums to inf": (TOKENS, replace(LAW, probs=changed(LAW.probs, 5, np.inf))),
    "stands twice in row 1": (TOKENS, replace(LAW, token_ids=changed(LAW.token_ids, 13, LAW.token_ids[12]))),
    "row 2 sums to": (TOKENS, replace(LAW, probs=changed(LAW.probs, 24, LAW.probs[24] + 3e-5))),
    "is not in row 4": (changed(TOKENS, 4, next(t for t in range(VOCAB) if t not in LAW.row(4)[0])), LAW),
    "was not drawn from row 6": (changed(TOKENS, 6, next(t for t in LAW.row(6)[0] if t != TOKENS[6])), LAW),
}


@pytest.mark.parametrize("fault", DISHONEST)
def test_each_fault_is_named(fault):
    assert fault in audit(*DISHONEST[fault], NOISE, VOCAB)


@pytest.mark.parametrize("lie", ["temperature", "seed", "base_length", "truncation"])
def test_accidental_lies_about_the_draft_law_are_caught_at_once(lie):
    """Each lie in 20 blocks of 8: most blocks are dropped, no statistics needed.

    A truncation after the draw is one only where it cuts the token drawn: a race over the rest has the same winner.
    """
    caught = 0
    for seed in range(20):
        tokens, law = block(seed=seed)
        told = {
            "temperature": (tokens, block(seed=seed, temperature=1.6)[1], NOISE),
            "seed": (tokens, law, replace(NOISE, seed=124)),
            "base_length": (tokens, law, replace(NOISE, base_length=41)),
            "truncation": (block(seed=seed, top=VOCAB)[0], law, NOISE),
        }[lie]
        caught += audit(*told, VOCAB) is not None
    assert caught >= 10


def test_the_last_bits_of_another_machines_logarithm_are_forgiven():
    """Two tokens so close in score that rounding may order them either way: either is honest."""
    ids = np.array([3, 8], dtype=np.int32)
    first, second = NOISE.exponentials(1, NOISE.base_length, ids)
    share = first / (first + second)
    for nudge, honest in ((1e-7, True), (1e-3, False)):
        probs = np.array([share * (1 + nudge), 1 - share * (1 + nudge)]).astype(np.float32)
        law = SparseLaw.concatenate([(ids, probs)])
        assert (audit(ids[1:], law, NOISE, VOCAB) is None) is honest
