"""The log probabilities of a round's tokens, from those of its rows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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


def of_round(
    tokens: Int32Array, law: SparseLaw, rows: LogprobRows, judged_by: npt.NDArray[np.int64] | None = None
) -> list[TokenLogprobs]:
    """From the rows of the target's answer.

    Args:
        tokens: [n] the round's tokens, at most one a row.
        law: the block's draft law, whose support the rows follow; without rows where it did not travel.
        rows: of the block.
        judged_by: [n] the row of each token; None for the first n.
    """
    numbers = range(len(tokens)) if judged_by is None else judged_by.tolist()
    return [
        TokenLogprobs(
            _of_token(token, number, law, rows),
            tuple(zip(rows.top_ids[number].tolist(), rows.top[number].tolist(), strict=True)),
        )
        for token, number in zip(tokens.tolist(), numbers, strict=True)
    ]


def of_logits(tokens: Int32Array, logits: torch.Tensor, top: int) -> list[TokenLogprobs]:
    """From dense logits [>= n, vocab_size]; tokens [n], each of its row."""
    question = LogprobQuestion(tokens, np.zeros(len(tokens) - 1, np.int32), _NOTHING, top)
    (rows,) = logprob_rows(logits[: len(tokens)], [question], logits.shape[1])
    return of_round(tokens, SparseLaw.concatenate([]), rows)


def _of_token(token: int, row: int, law: SparseLaw, rows: LogprobRows) -> float:
    # A token outside the draft law's support is the one that the target drew there.
    end = int(law.sizes[: row + 1].sum())
    support = slice(end - int(law.sizes[row]), end) if row < len(law.sizes) else slice(0)
    found = np.flatnonzero(law.token_ids[support] == token)
    return float(rows.support[support][found[0]] if len(found) else rows.drawn[row])
