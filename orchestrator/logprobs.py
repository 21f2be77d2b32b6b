"""The log probabilities of a round's tokens, from those of its rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from outrider.law.logprobs import LogprobQuestion, LogprobRows, logprob_rows
from outrider.law.sparse import Int32Array, SparseLaw

_NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model thought of a token, before any transform; natural logarithms.

    Attributes:
        logprob: of the token.
        top: (id, log probability) of the likeliest tokens at its position, descending.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def of_round(tokens: Int32Array, law: SparseLaw, rows: LogprobRows) -> list[TokenLogprobs]:
    """From the rows of the target's answer.

    Args:
        tokens: [n] the round's tokens, at most one a row.
        law: the block's draft law, whose support the rows follow; without rows where it did not travel.
        rows: of the block.
    """
    return [
        TokenLogprobs(logprob, tuple(zip(ids.tolist(), values.tolist(), strict=True)))
        for logprob, ids, values in zip(_of_tokens(tokens, law, rows), rows.top_ids, rows.top, strict=False)
    ]


def of_logits(tokens: Int32Array, logits: torch.Tensor, top: int) -> list[TokenLogprobs]:
    """From dense logits [>= n, vocab_size]; tokens [n], each of its row."""
    question = LogprobQuestion(tokens, np.zeros(len(tokens) - 1, np.int32), _NOTHING, top)
    (rows,) = logprob_rows(logits[: len(tokens)], [question], logits.shape[1])
    return of_round(tokens, SparseLaw.concatenate([]), rows)


def _of_tokens(tokens: Int32Array, law: SparseLaw, rows: LogprobRows) -> Iterator[float]:
    ends = np.cumsum(law.sizes, dtype=np.int64)
    for index, token in enumerate(tokens):
        # A token outside the draft law's support is the one that the target drew there.
        support = slice(ends[index] - law.sizes[index], ends[index]) if index < len(ends) else slice(0)
        found = np.flatnonzero(law.token_ids[support] == token)
        yield float(rows.support[support][found[0]] if len(found) else rows.drawn[index])
