"""Speculative sampling: keep a draft token with probability min(1, target/draft), else draw from the residual law.

Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1; Chen et al. 2023.
"""

import numpy as np

from orchestrator.acceptance.laws import BlockLaws, draw, side_by_side
from orchestrator.acceptance.outcome import Outcome, origin_after
from outrider.law.noise import Float64Array, Purpose, RoundNoise
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array, SparseLaw


def ratio(draft_tokens: Int32Array, draft_law: SparseLaw, rows: SupportRows, noise: RoundNoise) -> Outcome:
    """Accepts a prefix of the block and draws the token after it.

    Args:
        draft_tokens: [lookahead]; token i stands at position noise.base_length + i.
        draft_law: [lookahead] rows, the laws that the tokens were drawn from; audited.
        rows: [lookahead + 1] rows of the target over the support of draft_law.
        noise: of the round.

    Raises ValueError when shapes do not fit, a draft token has no draft probability, or a row is no law.
    """
    laws, lookahead = side_by_side(draft_tokens, draft_law, rows), len(draft_tokens)
    uniforms = noise.uniforms(Purpose.ACCEPT, noise.base_length + np.arange(lookahead))
    rejected = np.flatnonzero(uniforms >= keep_probabilities(laws))
    accepted = int(rejected[0]) if len(rejected) else lookahead
    return Outcome(accepted, draw(laws, accepted, 1.0, noise), origin_after(accepted, lookahead))


def keep_probabilities(laws: BlockLaws) -> Float64Array:
    """[lookahead] how likely each draft token is kept when those before it are."""
    return np.minimum(1.0, laws.ratios)
