"""Blocks of every shape, with laws that have nothing to do with any model."""

import numpy as np

from orchestrator.acceptance import Block
from outrider.law.draft import propose
from outrider.law.noise import RoundNoise
from outrider.law.rows import SupportRows
from outrider.law.sparse import SparseLaw

VOCAB = 300


def random_block(rng: np.random.Generator) -> Block:
    """Lookahead 0 to 8; supports of one token, of some, of all; target laws near the draft's and far from it, with and
    without zeros and tails.
    """
    noise = RoundNoise(int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(1, 100_000)))
    rows, tokens, target, tails = [], [], [], []
    near, far, cut, mass = rng.choice([0.3, 1.0, 1.0]), rng.choice([0.0, 0.3]), rng.choice([0.7, 1.0]), rng.random()
    for index in range(rng.integers(0, 9)):
        size = int(rng.choice([1, 2, 8, 32, VOCAB]))
        ids = rng.permutation(VOCAB)[:size].astype(np.int32)
        draft = rng.dirichlet(np.full(size, rng.choice([0.5, 5.0]))).astype(np.float32) + np.float32(1e-9)
        rows.append((ids, draft))
        tokens.append(propose(ids, draft, noise, noise.base_length + index))
        law = near * draft + far * rng.dirichlet(np.ones(size))
        if rng.random() < 0.1:
            law = (ids == rng.choice(ids)).astype(float)
        law *= rng.random(size) < cut
        tails.append(rng.choice([0.0, mass]) if law.any() else 1.0)
        target.append(law * (1 - tails[-1]) / max(law.sum(), 1e-9))
    probs = np.concatenate([np.empty(0), *target]).astype(np.float32)
    tail_tokens = rng.integers(0, VOCAB, len(tokens) + 1).astype(np.int32)
    support = SupportRows(probs, np.array([*tails, 1.0]), tail_tokens)
    return Block(np.array(tokens, np.int32), SparseLaw.concatenate(rows), support, noise)
