"""From the logits of blocks to their rows: the target does it for SUPPORT and SAMPLE, the orchestrator for LOGITS."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.law.masking import Words
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.rows import Sample, Support, SupportRows, race_of, support_rows
from outrider.law.sparse import Int32Array
from outrider.law.transforms import NonFiniteLogits, RowContext, greedy_tokens, law_probs
from outrider.law.tree import Tree

# Laws in float32 that are made at once: what a CPU's cache holds, and what an accelerator's memory hardly notices.
_BYTES_ON_CPU, _BYTES_ON_DEVICE = 1 << 22, 1 << 28

Answer = SupportRows | Int32Array


@dataclass(frozen=True)
class Question:
    """What is asked about one block.

    Attributes:
        params: the session's law parameters.
        noise: of the round.
        tokens: [base_length + lookahead] int32, all committed tokens and the block's.
        support: (sizes [lookahead] int32, token ids [sum(sizes)] int32) of the draft law, see Support, for SupportRows;
            None for the target's own tokens.
        masks: [lookahead + 1, words] the tokens that the session's language allows; None without one.
        tree: the block's shape; None for a chain.
    """

    params: LawParams
    noise: RoundNoise
    tokens: Int32Array
    support: tuple[Int32Array, Int32Array] | None = None
    masks: Words | None = None
    tree: Tree | None = None

    @property
    def rows(self) -> int:
        """lookahead + 1."""
        return len(self.tokens) - self.noise.base_length + 1

    @property
    def contexts(self) -> list[RowContext]:
        """One per row."""
        masks = [None] * self.rows if self.masks is None else list(self.masks)
        return [RowContext(self.params, self._text(row), mask) for row, mask in enumerate(masks)]

    def _text(self, row: int) -> Int32Array:
        """What the row follows."""
        base_length = self.noise.base_length
        if self.tree is None:
            return self.tokens[: base_length + row]
        path = np.array(self.tree.path(row), np.int64)
        return np.concatenate([self.tokens[:base_length], self.tokens[base_length + path]])

    @property
    def kind(self) -> int:
        """Questions of one kind are answered together."""
        if self.support is not None:
            return 0
        return 2 if self.params.greedy else 1


# (raw logits [lookahead + 1, >= vocab_size], question).
_Block = tuple[torch.Tensor, Question]


def answer(blocks: Sequence[_Block], vocab_size: int) -> list[Answer | None]:
    """The rows of each block; None for a block with a row that has no law (NaN, +inf, nothing above -inf).

    Args:
        blocks: (raw logits [lookahead + 1, >= vocab_size], question); the logits of all on one device.
        vocab_size: real token ids.

    An answer is SupportRows or int32 [lookahead + 1], as asked. It does not depend on the other blocks of the call.
    """
    answers: list[Answer | None] = [None] * len(blocks)
    for kind, answer_kind in enumerate((_supports, _samples, _argmaxes)):
        numbers = [number for number, (_, question) in enumerate(blocks) if question.kind == kind]
        if numbers:
            for number, made in zip(numbers, answer_kind([blocks[it] for it in numbers], vocab_size), strict=True):
                answers[number] = made
    return answers


def _supports(blocks: Sequence[_Block], vocab_size: int) -> list[Answer | None]:
    answers: list[Answer | None] = [None] * len(blocks)

    def make(part: list[int], logits: torch.Tensor, contexts: list[RowContext]) -> None:
        supports = [
            Support(question.noise, *question.support, question.tree)
            for question in (blocks[number][1] for number in part)
            if question.support is not None
        ]
        for number, made in zip(part, support_rows(law_probs(logits, contexts, vocab_size), supports), strict=True):
            answers[number] = made

    _in_parts(blocks, vocab_size, make)
    return answers


def _samples(blocks: Sequence[_Block], vocab_size: int) -> list[Answer | None]:
    race = race_of([Sample(question.noise, question.rows, question.tree) for _, question in blocks], vocab_size)
    ends = np.cumsum([question.rows for _, question in blocks])
    raced: set[int] = set()

    def make(part: list[int], logits: torch.Tensor, contexts: list[RowContext]) -> None:
        rows = np.concatenate([np.arange(ends[number] - blocks[number][1].rows, ends[number]) for number in part])
        race.look(rows, law_probs(logits, contexts, vocab_size))
        raced.update(part)

    _in_parts(blocks, vocab_size, make)
    tokens = np.split(race.result(), ends[:-1])
    return [made if number in raced else None for number, made in enumerate(tokens)]


def _argmaxes(blocks: Sequence[_Block], vocab_size: int) -> list[Answer | None]:
    answers: list[Answer | None] = [None] * len(blocks)

    def make(part: list[int], logits: torch.Tensor, contexts: list[RowContext]) -> None:
        ends = np.cumsum([blocks[number][1].rows for number in part])
        for number, made in zip(part, np.split(greedy_tokens(logits, contexts, vocab_size), ends[:-1]), strict=True):
            answers[number] = made

    _in_parts(blocks, vocab_size, make)
    return answers


# Takes the numbers of some blocks, their logits and the contexts of all their rows.
_Make = Callable[[list[int], torch.Tensor, list[RowContext]], None]


def _in_parts(blocks: Sequence[_Block], vocab_size: int, make: _Make) -> None:
    """Calls `make` on parts of the blocks, each of them once and not more laws at once than the limit; on those that
    have no law not at all."""
    for part in _parts(blocks, vocab_size):
        while part:
            logits = [blocks[number][0] for number in part]
            contexts = [context for number in part for context in blocks[number][1].contexts]
            try:
                make(part, torch.cat(logits) if len(part) > 1 else logits[0], contexts)
                break
            except NonFiniteLogits as error:
                owners = np.repeat(part, [blocks[number][1].rows for number in part])
                bad = set(owners[error.rows].tolist())
                part = [number for number in part if number not in bad]


def _parts(blocks: Sequence[_Block], vocab_size: int) -> Iterator[list[int]]:
    """Consecutive blocks whose laws together stay within the limit, or one block that does not."""
    part: list[int] = []
    room = 0
    for number, (logits, _) in enumerate(blocks):
        size = len(logits) * vocab_size * 4
        if size > room:
            if part:
                yield part
            part, room = [], _BYTES_ON_CPU if logits.device.type == "cpu" else _BYTES_ON_DEVICE
        part.append(number)
        room -= size
    if part:
        yield part
