"""Rows from a dense law, written as plainly as can be: the reference for `outrider.law.rows`. And rules made dense."""

from collections.abc import Callable

import numpy as np
import torch

from orchestrator.acceptance import Outcome
from outrider.law.noise import Purpose
from outrider.law.rows import Support, SupportRows, support_rows
from outrider.law.sparse import SparseLaw

NOBODY = np.empty(0, np.int32)


def reference_rows(target_probs, draft_law: SparseLaw, noise) -> SupportRows:
    """Of target_probs [lookahead + 1, vocab_size] float32, over the support of draft_law [lookahead]."""
    probs, masses, tokens = [], [], []
    for index, row in enumerate(target_probs):
        ids = draft_law.row(index)[0] if index < len(draft_law.sizes) else NOBODY
        outside = row.astype(np.float64)
        outside[ids] = 0
        mass = np.cumsum(outside)
        _, uniform = noise.tail(Purpose.RESAMPLE, noise.base_length + index)
        probs.append(row[ids])
        masses.append(mass[-1])
        tokens.append(np.searchsorted(mass, uniform * mass[-1], side="right") if mass[-1] > 0 else 0)
    return SupportRows(np.concatenate(probs).astype(np.float32), np.array(masses), np.array(tokens, np.int32))


def law_rows(target_probs, draft_law: SparseLaw, noise) -> SupportRows:
    """`support_rows` of one block; arguments as in `reference_rows`."""
    block = Support(noise, draft_law.sizes, draft_law.token_ids)
    (rows,) = support_rows(torch.asarray(target_probs).contiguous(), [block])
    return rows


def over_rows(rule, rows: Callable = reference_rows) -> Callable[..., Outcome]:
    """The rule as a function of (draft_tokens, draft_law, target_probs [lookahead + 1, vocab_size], noise)."""

    def dense(draft_tokens, draft_law, target_probs, noise) -> Outcome:
        return rule(draft_tokens, draft_law, rows(target_probs, draft_law, noise), noise)

    return dense
