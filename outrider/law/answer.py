"""From the logits of blocks to their rows: the target does it for SUPPORT and SAMPLE, the orchestrator for LOGITS."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.law.masking import Words
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.rows import Sample, Support, SupportRows, sample_rows, support_rows
from outrider.law.sparse import Int32Array
from outrider.law.transforms import NonFiniteLogits, RowContext, greedy_tokens, law_probs

# Laws in float32 that are made at once: what a CPU's cache holds, and what an accelerator's memory hardly notices.
_BYTES_ON_CPU, _BYTES_ON_DEVICE = 1 << 22, 1 << 28

Answer = SupportRows | Int32Array


@dataclass(frozen=True)
class Question:
    """What is asked about one block.

    Attributes:
        params: the session's law parameters.
        noise: of the round.
        tokens: [base_length + lookahead] int32, all committed tokens and the block.
        support: (sizes [lookahead] int32, token ids [sum(sizes)] int32) of the draft law, for SupportRows; None for the
            target's own tokens.
        masks: [lookahead + 1, words] the tokens that the session's language allows; None without one.
    """

    params: LawParams
    noise: RoundNoise
    tokens: Int32Array
    support: tuple[Int32Array, Int32Array] | None = None
    masks: Words | None = None

    @property
    def rows(self) -> int:
        """lookahead + 1."""
        return len(self.tokens) - self.noise.base_length + 1

    @property
    def contexts(self) -> list[RowContext]:
        """One per row."""
        masks = [None] * self.rows if self.masks is None else list(self.masks)
        base_length = self.noise.base_length
        return [RowContext(self.params, self.tokens[: base_length + row], mask) for row, mask in enumerate(masks)]

    @property
    def kind(self) -> int:
        """Questions of one kind are answered together."""
        if self.support is not None:
            return 0
        return 2 if self.params.greedy else 1


def answer(blocks: Sequence[tuple[torch.Tensor, Question]], vocab_size: int) -> list[Answer | None]:
    """The rows of each block; None for a block with a row that has no law (NaN, +inf, nothing above -inf).

    Args:
        blocks: (raw logits [lookahead + 1, >= vocab_size], question) of each; the logits of all on one device.
        vocab_size: real token ids.

    An answer is SupportRows or int32 [lookahead + 1], as asked. It does not depend on the other blocks of the call.
    """
    answers: list[Answer | None] = [None] * len(blocks)
    for kind in range(3):
        numbers = [number for number, (_, question) in enumerate(blocks) if question.kind == kind]
        for part in _parts(numbers, blocks, vocab_size):
            for number, made in zip(part, _answer_part([blocks[number] for number in part], vocab_size), strict=True):
                answers[number] = made
    return answers


def _parts(numbers: list[int], blocks: Sequence[tuple[torch.Tensor, Question]], vocab_size: int) -> Iterator[list[int]]:
    """Consecutive blocks whose laws together stay within the limit, or one block that does not."""
    part: list[int] = []
    room = 0
    for number in numbers:
        logits = blocks[number][0]
        size = len(logits) * vocab_size * 4
        if size > room:
            if part:
                yield part
            part, room = [], _BYTES_ON_CPU if logits.device.type == "cpu" else _BYTES_ON_DEVICE
        part.append(number)
        room -= size
    if part:
        yield part


def _answer_part(blocks: list[tuple[torch.Tensor, Question]], vocab_size: int) -> list[Answer | None]:
    """Answers to questions of one kind."""
    if not blocks:
        return []
    questions = [question for _, question in blocks]
    logits = torch.cat([rows for rows, _ in blocks]) if len(blocks) > 1 else blocks[0][0]
    contexts = [context for question in questions for context in question.contexts]
    try:
        return list(_rows(logits, questions, contexts, vocab_size))
    except NonFiniteLogits as error:
        owners = np.repeat(np.arange(len(blocks)), [question.rows for question in questions])
        bad = set(owners[error.rows].tolist())
        good = iter(_answer_part([block for number, block in enumerate(blocks) if number not in bad], vocab_size))
        return [None if number in bad else next(good) for number in range(len(blocks))]


def _rows(
    logits: torch.Tensor, questions: list[Question], contexts: list[RowContext], vocab_size: int
) -> Sequence[Answer]:
    if questions[0].kind == 2:
        tokens = greedy_tokens(logits, contexts, vocab_size)
        return np.split(tokens, np.cumsum([question.rows for question in questions])[:-1])
    probs = law_probs(logits, contexts, vocab_size)
    supports = [Support(question.noise, *question.support) for question in questions if question.support is not None]
    if supports:
        return support_rows(probs, supports)
    return sample_rows(probs, [Sample(question.noise, question.rows) for question in questions])
