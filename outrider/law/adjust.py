"""The transforms of single tokens: penalties on what the prefix holds, biases, masks, stop tokens too early."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.masking import Words, forbid
from outrider.law.params import BAN, LawParams
from outrider.law.sparse import Int32Array


@dataclass(frozen=True)
class RowContext:
    """What a row's law depends on besides its logits.

    Attributes:
        params: the session's law parameters.
        tokens: all tokens before the row's position, prompt and draft tokens included.
        mask: the tokens that the session's language allows here, a row of `GrammarState.masks`; None allows all.
    """

    params: LawParams
    tokens: Int32Array
    mask: Words | None = None

    @property
    def stop_masked(self) -> bool:
        """Whether it is too early for a stop token."""
        return len(self.tokens) - self.params.prompt_length < self.params.min_tokens


@dataclass(frozen=True)
class _Entries:
    """Single entries of the score matrix, each at most once.

    Attributes:
        index: ([n] rows, [n] token ids), int64, on the device of the scores.
        values: [n] float32, one number per entry; its meaning is the caller's.
    """

    index: tuple[torch.Tensor, torch.Tensor]
    values: torch.Tensor


def adjust(scores: torch.Tensor, contexts: Sequence[RowContext]) -> torch.Tensor:
    """Repetition, presence, frequency penalty, logit bias, allowed, banned and stop tokens, the grammar; in this order.

    Takes and returns [rows, vocab_size] float32; returns `scores` itself when nothing applies, else a changed copy.
    """
    scores = _penalise_repetition(scores, contexts)
    scores = _penalise_output(scores, contexts)
    biases = _gather(scores, [_bias_entries(context.params.logit_bias) for context in contexts])
    if biases is not None:
        values = torch.where(biases.values <= BAN, -torch.inf, biases.values)
        scores = scores.index_put(biases.index, scores[biases.index] + values)
    scores = _only_allowed(scores, contexts)
    masked = _gather(scores, [_masked_entries(context) for context in contexts])
    if masked is not None:
        scores = scores.index_put(masked.index, masked.values)
    masks = [(row, context.mask) for row, context in enumerate(contexts) if context.mask is not None]
    return forbid(scores, masks) if masks else scores


def _only_allowed(scores: torch.Tensor, contexts: Sequence[RowContext]) -> torch.Tensor:
    allowed = _gather(scores, [_allowed_entries(context.params) for context in contexts])
    if allowed is None:
        return scores
    rows = [row for row, context in enumerate(contexts) if context.params.allowed_token_ids]
    emptied = scores.index_fill(0, torch.tensor(rows, device=scores.device), -torch.inf)
    return emptied.index_put(allowed.index, scores[allowed.index])


def _penalise_repetition(scores: torch.Tensor, contexts: Sequence[RowContext]) -> torch.Tensor:
    seen = _gather(scores, [_seen_entries(context) for context in contexts])
    if seen is None:
        return scores
    old = scores[seen.index]
    return scores.index_put(seen.index, torch.where(old < 0, old * seen.values, old / seen.values))


def _penalise_output(scores: torch.Tensor, contexts: Sequence[RowContext]) -> torch.Tensor:
    counts = _gather(scores, [_count_entries(context) for context in contexts])
    if counts is None:
        return scores
    rows = counts.index[0]
    presence, frequency = (
        torch.tensor(column, dtype=torch.float32, device=scores.device)[rows]
        for column in (
            [context.params.presence_penalty for context in contexts],
            [context.params.frequency_penalty for context in contexts],
        )
    )
    return scores.index_put(counts.index, scores[counts.index] - presence - frequency * counts.values)


# What each row contributes: (token ids, distinct; one value for each), or None.
_Row = tuple[npt.NDArray[np.integer], npt.NDArray[np.floating]] | None


def _seen_entries(context: RowContext) -> _Row:
    if context.params.repetition_penalty == 1.0:
        return None
    ids = np.unique(context.tokens)
    return ids, np.full(len(ids), context.params.repetition_penalty)


def _count_entries(context: RowContext) -> _Row:
    params = context.params
    if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return None
    ids, counts = np.unique(context.tokens[params.prompt_length :], return_counts=True)
    return ids, counts.astype(np.float64)


@lru_cache(maxsize=64)
def _bias_entries(logit_bias: tuple[tuple[int, float], ...]) -> _Row:
    # Cached: a session has the same thousand pairs at every row, and to unpack them costs more than the row's softmax.
    if not logit_bias:
        return None
    ids, values = zip(*logit_bias, strict=True)
    return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)


def _allowed_entries(params: LawParams) -> _Row:
    if not params.allowed_token_ids:
        return None
    # The values are not looked at: an allowed token keeps its score.
    return params.allowed, np.zeros(len(params.allowed))


def _masked_entries(context: RowContext) -> _Row:
    """What is never drawn here, banned tokens and those that would end the output too early; each token once."""
    params = context.params
    if not context.stop_masked or not params.stop_token_ids:
        ids = params.banned
    else:
        ids = np.union1d(params.banned, np.array(params.stop_token_ids, dtype=np.int64))
    return (ids, np.full(len(ids), -np.inf)) if len(ids) else None


def _gather(scores: torch.Tensor, rows: Sequence[_Row]) -> _Entries | None:
    present = [(index, *row) for index, row in enumerate(rows) if row is not None and len(row[0])]
    if not present:
        return None
    indices = np.concatenate([np.full(len(ids), index, dtype=np.int64) for index, ids, _ in present])
    ids = np.concatenate([ids.astype(np.int64) for _, ids, _ in present])
    values = np.concatenate([values.astype(np.float32) for _, _, values in present])
    device = scores.device
    return _Entries(
        (torch.from_numpy(indices).to(device), torch.from_numpy(ids).to(device)), torch.from_numpy(values).to(device)
    )
