"""Acceptance: pure functions of a block, its rows and the noise.

Words: an *accepted* token is a draft token that was kept; a *recovered* token is drawn from the residual law after the
first rejection; a *bonus* token is drawn after a block accepted whole; *plain* is the token of a round without a block.
`target_probs` is the target's law, `draft_probs` the law that the draft token was drawn from.
"""

from orchestrator.acceptance.greedy import greedy
from orchestrator.acceptance.outcome import Outcome
from orchestrator.acceptance.ratio import ratio
from outrider.law.noise import RoundNoise
from outrider.law.sparse import Float32Array, Int32Array, SparseLaw
from outrider.v1.orchestrator_pb2 import Acceptance

__all__ = ["Outcome", "accept", "greedy", "ratio"]


def accept(
    rule: "Acceptance.ValueType",
    draft_tokens: Int32Array,
    draft_law: SparseLaw,
    target_probs: Float32Array,
    noise: RoundNoise,
) -> Outcome:
    """Decides a round by the rule; arguments as in `ratio`. Raises ValueError for a rule that is none."""
    if rule == Acceptance.ACCEPTANCE_GREEDY:
        return greedy(draft_tokens, target_probs)
    if rule == Acceptance.ACCEPTANCE_RATIO:
        return ratio(draft_tokens, draft_law, target_probs, noise)
    raise ValueError(f"{rule} is no acceptance rule")
