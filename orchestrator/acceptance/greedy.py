"""Acceptance at temperature 0: the target's argmax, and nothing else."""

import numpy as np

from orchestrator.acceptance.outcome import Outcome, origin_after
from outrider.law.sparse import Float32Array, Int32Array


def greedy(draft_tokens: Int32Array, target_probs: Float32Array) -> Outcome:
    """Keeps draft tokens as long as each is the target's token; then the target's own.

    Args:
        draft_tokens: [lookahead].
        target_probs: [lookahead + 1, vocab_size], one-hot.

    Raises ValueError when shapes do not fit or a row is not one-hot at its argmax.
    """
    if len(target_probs) != len(draft_tokens) + 1:
        raise ValueError(f"{len(draft_tokens)} draft tokens need one row more, not {len(target_probs)}")
    best = target_probs.argmax(axis=1)
    if not (target_probs[np.arange(len(best)), best] == 1.0).all():
        raise ValueError("greedy acceptance needs one-hot rows; the law is not greedy")
    wrong = np.flatnonzero(best[:-1] != draft_tokens)
    accepted = int(wrong[0]) if len(wrong) else len(draft_tokens)
    return Outcome(accepted, int(best[accepted]), origin_after(accepted, len(draft_tokens)))
