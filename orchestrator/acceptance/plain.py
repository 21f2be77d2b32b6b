"""A round without a block, by a rule that looks at laws: the token is what the target drew from its whole law."""

import math

from orchestrator.acceptance.outcome import Outcome, origin_after
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array, SparseLaw


def plain(draft_tokens: Int32Array, draft_law: SparseLaw, rows: SupportRows) -> Outcome | None:
    """What `ratio` and `block` come to without draft tokens, for a hundredth of their time; None for a block with any,
    and for what they refuse."""
    sizes = (draft_tokens, draft_law.sizes, draft_law.token_ids, draft_law.probs, rows.probs)
    if any(map(len, sizes)) or not len(rows.tail_masses) == len(rows.tail_tokens) == 1:
        return None
    if not 0.0 < float(rows.tail_masses[0]) < math.inf:
        return None
    return Outcome(0, int(rows.tail_tokens[0]), origin_after(0, 0))
