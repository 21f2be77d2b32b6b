"""Block verification: the longest prefix that the whole block pays for, in expectation never shorter than `ratio`'s.

Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2. Where `ratio` loses at each token
what the target likes better than the draft, a token that the target likes better here pays for a later one that it
likes less. docs/exactness.md has the proof.
"""

import numpy as np

from orchestrator.acceptance.laws import BlockLaws, draw, row_sums, side_by_side
from orchestrator.acceptance.outcome import Outcome, origin_after
from outrider.law.noise import Float64Array, Purpose, RoundNoise
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array, SparseLaw


def block(draft_tokens: Int32Array, draft_law: SparseLaw, rows: SupportRows, noise: RoundNoise) -> Outcome:
    """Accepts a prefix of the block and draws the token after it; arguments and errors as in `ratio`.

    The decision about a prefix looks at the tokens after it, so the noise behind discarded draft tokens must never be
    used again: RoundNoise depends on the base length.
    """
    laws, lookahead = side_by_side(draft_tokens, draft_law, rows), len(draft_tokens)
    weights = running_weights(laws.ratios)
    uniforms = noise.uniforms(Purpose.ACCEPT, noise.base_length + np.arange(lookahead))
    kept = np.flatnonzero(uniforms < keep_probabilities(laws, weights))
    accepted = int(kept[-1]) + 1 if len(kept) else 0
    return Outcome(accepted, draw(laws, accepted, float(weights[accepted]), noise), origin_after(accepted, lookahead))


def running_weights(ratios: Float64Array) -> Float64Array:
    """c_0 = 1, c_i = min(1, c_{i-1} * target/draft of token i): [lookahead + 1].

    c_i is the probability that at least i tokens are accepted, given the first i and not those after.
    """
    weights = np.ones(len(ratios) + 1)
    for index, ratio in enumerate(ratios):
        weights[index + 1] = min(1.0, weights[index] * ratio)
    return weights


def keep_probabilities(laws: BlockLaws, weights: Float64Array) -> Float64Array:
    """h_1 .. h_K: [lookahead] how likely exactly i tokens are kept when no longer prefix is.

    h_i = S_i / (S_i + 1 - c_i) with S_i the residual mass after i tokens; h_K = c_K. Where nothing is left and
    c_i = 1 the laws after i tokens are equal, and the longer prefix is kept anyway.
    """
    masses = residual_masses(laws, weights)[1:]
    rest = masses + (1.0 - weights[1:-1])
    keep = np.divide(masses, rest, out=np.ones_like(rest), where=rest > 0)
    return np.append(keep, weights[-1]) if len(laws.ratios) else keep


def residual_masses(laws: BlockLaws, weights: Float64Array) -> Float64Array:
    """S_i = sum of max(c_i * target - draft, 0) over the law after i tokens, i < lookahead: [lookahead]."""
    starts, lookahead = laws.starts, len(laws.ratios)
    scaled = np.repeat(weights[:lookahead], np.diff(starts[:-1])) * laws.target
    on_support = row_sums(np.maximum(scaled - laws.draft, 0.0), starts[:lookahead])
    return on_support + weights[:lookahead] * laws.tails[:lookahead]
