"""Acceptance at temperature 0: the target's argmax, and nothing else."""

from orchestrator.acceptance.outcome import Outcome, follow
from outrider.law.sparse import Int32Array
from outrider.law.tree import Tree


def greedy(draft_tokens: Int32Array, target_tokens: Int32Array, tree: Tree | None = None) -> Outcome:
    """Keeps draft tokens as long as each is the target's argmax; then the target's own.

    Args:
        draft_tokens: [lookahead].
        target_tokens: [lookahead + 1], the argmax of each row.
        tree: the block's shape; None for a chain.

    Raises ValueError when shapes do not fit.
    """
    return follow(draft_tokens, target_tokens, tree)
