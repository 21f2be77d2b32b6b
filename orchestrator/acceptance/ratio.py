"""Speculative sampling: keep a draft token with probability min(1, target/draft), else draw from the residual law.

Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1; Chen et al. 2023.
"""

import numpy as np

from orchestrator.acceptance.laws import BlockLaws, accept_uniforms, draw
from orchestrator.acceptance.outcome import Outcome, outcomes
from outrider.law.noise import BatchNoise, Float64Array


def ratio(laws: BlockLaws, noise: BatchNoise) -> list[Outcome]:
    """Accepts a prefix of each block and draws the token after it.

    Args:
        laws: of the blocks.
        noise: of their rounds.
    """
    blocks = laws.blocks
    kept = accept_uniforms(laws, noise) < keep_probabilities(laws)
    # The first token that is not kept; in a last row nothing is.
    accepted = blocks.reduce(np.minimum, np.where(kept, len(kept), blocks.offsets), 0)
    return outcomes(accepted, draw(laws, accepted, np.ones(len(accepted)), noise), blocks.sizes - 1)


def keep_probabilities(laws: BlockLaws) -> Float64Array:
    """[rows] how likely each draft token is kept when those before it are; 0 in a last row."""
    return np.minimum(1.0, laws.ratios)
