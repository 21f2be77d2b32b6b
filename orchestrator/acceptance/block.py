"""Block verification: the longest prefix that the whole block pays for, in expectation never shorter than `ratio`'s.

Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2. Where `ratio` loses at each token
what the target likes better than the draft, a token that the target likes better here pays for a later one that it
likes less. docs/exactness.md has the proof.
"""

import numpy as np

from orchestrator.acceptance.laws import BlockLaws, accept_uniforms, draw
from orchestrator.acceptance.outcome import Outcome, outcomes
from outrider.law.noise import BatchNoise, Float64Array


def block(laws: BlockLaws, noise: BatchNoise) -> list[Outcome]:
    """Accepts a prefix of each block and draws the token after it; arguments as in `ratio`.

    The decision about a prefix looks at the tokens after it, so the noise behind discarded draft tokens must never be
    used again: RoundNoise depends on the base length.
    """
    blocks, weights = laws.blocks, running_weights(laws)
    # Row i of a block stands for the prefix of i tokens, which the uniform of its last one decides about. A first row
    # gets the 1 of the last row before it: the empty prefix is what is left when no other is kept.
    kept = np.roll(accept_uniforms(laws, noise), 1) < keep_probabilities(laws, weights)
    accepted = blocks.reduce(np.maximum, np.where(kept, blocks.offsets, 0), 0)
    return outcomes(accepted, draw(laws, accepted, weights[blocks.starts + accepted], noise), blocks.sizes - 1)


def running_weights(laws: BlockLaws) -> Float64Array:
    """c_0 = 1, c_i = min(1, c_{i-1} * target/draft of token i) of each block: [rows].

    c_i is the probability that at least i tokens are accepted, given the first i and not those after.
    """
    weights, offsets = np.ones(len(laws.last)), laws.blocks.offsets
    for count in range(1, int(offsets.max()) + 1):
        rows = np.flatnonzero(offsets == count)
        weights[rows] = np.minimum(1.0, weights[rows - 1] * laws.ratios[rows - 1])
    return weights


def keep_probabilities(laws: BlockLaws, weights: Float64Array) -> Float64Array:
    """h_0 .. h_K of each block: [rows] how likely exactly i tokens are kept when no longer prefix is.

    h_i = S_i / (S_i + 1 - c_i) with S_i the residual mass after i tokens; h_K = c_K. Where nothing is left and
    c_i = 1 the laws after i tokens are equal, and the longer prefix is kept anyway.
    """
    masses = residual_masses(laws, weights)
    rest = masses + (1.0 - weights)
    keep = np.divide(masses, rest, out=np.ones_like(rest), where=rest > 0)
    return np.where(laws.last, weights, keep)


def residual_masses(laws: BlockLaws, weights: Float64Array) -> Float64Array:
    """S_i = sum of max(c_i * target - draft, 0) over the law after i tokens: [rows]."""
    rows = laws.rows
    left = np.maximum(weights[rows.support.owners] * rows.target - rows.draft, 0.0)
    mass: Float64Array = rows.support.reduce(np.add, left, 0.0) + weights * rows.tails
    return mass
