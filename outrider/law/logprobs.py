"""Log probabilities of what the model said, before any transform: log-softmax of the raw logits, float32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.law.sparse import Float32Array, Int32Array

MAX_LOGPROBS = 20

# Sorting keys that are made at once: what a CPU's cache holds, and what an accelerator's memory hardly notices.
_BYTES_ON_CPU, _BYTES_ON_DEVICE = 1 << 22, 1 << 28


@dataclass(frozen=True)
class LogprobQuestion:
    """Which tokens of a block's rows are asked about.

    Attributes:
        drawn: [lookahead + 1] int32, one token a row.
        sizes: [lookahead] int32, further tokens of each row; the last row has none.
        support: [sum(sizes)] int32, these tokens, row after row.
        top: how many of the likeliest tokens of each row are wanted beside them.
    """

    drawn: Int32Array
    sizes: Int32Array
    support: Int32Array
    top: int


@dataclass(frozen=True)
class LogprobRows:
    """The answer; LogprobRows in target.proto. Natural logarithms, -inf where the model rules a token out.

    Attributes:
        support: [sum(sizes)] float32.
        drawn: [lookahead + 1] float32.
        top_ids: [lookahead + 1, min(top, vocab_size)] int32, likeliest first, the lower id first among equals.
        top: of the same shape, float32.
    """

    support: Float32Array
    drawn: Float32Array
    top_ids: Int32Array
    top: Float32Array


def logprob_rows(logits: torch.Tensor, questions: Sequence[LogprobQuestion], vocab_size: int) -> list[LogprobRows]:
    """The answers for many blocks in one call.

    Args:
        logits: [sum of the blocks' rows, >= vocab_size] raw logits, any float dtype and device, every row with a law.
        questions: in the order of the rows.
        vocab_size: real token ids.

    A row's answer does not depend on its neighbours. Raises ValueError when rows and questions differ in number.
    """
    counts = [len(question.drawn) for question in questions]
    if len(logits) != sum(counts):
        raise ValueError(f"{len(logits)} rows of logits for questions about {sum(counts)}")
    width = min(max((question.top for question in questions), default=0), vocab_size)
    rows, tokens = (index.to(logits.device) for index in _entries(questions))
    totals, ids, top = (torch.cat(parts) for parts in zip(*_summaries(logits, vocab_size, width), strict=True))
    picked = logits[rows, tokens].float() - totals[rows]
    return _split(questions, picked.cpu().numpy(), ids.cpu().numpy().astype(np.int32), top.cpu().numpy())


def _summaries(
    logits: torch.Tensor, vocab_size: int, width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(log of the sum of exponentials [n], likeliest ids [n, width], their log probabilities) of successive rows."""
    limit = _BYTES_ON_CPU if logits.device.type == "cpu" else _BYTES_ON_DEVICE
    for part in torch.split(logits.detach()[:, :vocab_size], max(1, limit // (8 * vocab_size))):
        scores = part.float()
        totals = scores.logsumexp(dim=1)
        ids = _likeliest(scores, width)
        yield totals, ids, scores.gather(1, ids) - totals[:, None]


def _entries(questions: Sequence[LogprobQuestion]) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) of everything asked about, block after block, the drawn tokens of each before its support."""
    rows, first = [], 0
    for question in questions:
        numbers = first + np.arange(len(question.drawn), dtype=np.int64)
        rows += [numbers, np.repeat(numbers[:-1], question.sizes)]
        first += len(question.drawn)
    tokens = [part.astype(np.int64) for question in questions for part in (question.drawn, question.support)]
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(tokens))


def _likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] int64 ids of the largest scores, descending, the lower id first among equals."""
    # One key orders by score, then by lower id. Floats order as their bits do once those of negative ones are turned
    # round; adding 0 makes -0 an ordinary zero.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits.bitwise_xor(bits.bitwise_right_shift(31).bitwise_and_(0x7FFFFFFF)).long()
    reversed_ids = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    best = ordered.bitwise_left_shift_(32).bitwise_or_(reversed_ids).topk(count, dim=1).values
    return scores.shape[1] - 1 - best.bitwise_and_(0xFFFFFFFF)


def _split(
    questions: Sequence[LogprobQuestion], picked: Float32Array, top_ids: Int32Array, top: Float32Array
) -> list[LogprobRows]:
    answers, entry, row = [], 0, 0
    for question in questions:
        rows, width = len(question.drawn), min(question.top, top.shape[1])
        drawn = picked[entry : entry + rows]
        entry += rows + len(question.support)
        support = picked[entry - len(question.support) : entry]
        own = slice(row, row := row + rows)
        answers.append(LogprobRows(support, drawn, top_ids[own, :width], top[own, :width]))
    return answers
