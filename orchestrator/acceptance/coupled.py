"""Coupled sampling: draft and target race with the same noise, and only the target's winner counts.

The noise is common to both (COUPLE), so laws that are alike have the same winner often: with probability at least
(1 - d) / (1 + d) at total variation distance d (Daliri et al. 2025, "Coupling without communication and drafter-
invariant speculative decoding"). The draft is trusted in nothing: it can only be wrong.
"""

from orchestrator.acceptance.outcome import Outcome, follow
from outrider.law.sparse import Int32Array
from outrider.law.tree import Tree


def coupled(draft_tokens: Int32Array, target_tokens: Int32Array, tree: Tree | None = None) -> Outcome:
    """Keeps draft tokens as long as each is the target's own draw; then the target's.

    Every token that comes out, accepted or not, is the target's draw at its position, and COUPLE noise depends on seed
    and position alone: the output is the same for any draft, any lookahead, and without one.

    Args:
        draft_tokens: [lookahead].
        target_tokens: [lookahead + 1], winner of the race over each row's law with COUPLE noise.
        tree: the block's shape; None for a chain.

    Raises ValueError when shapes do not fit.
    """
    return follow(draft_tokens, target_tokens, tree)
