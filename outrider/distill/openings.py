"""How texts begin: in the frame of the chat template, with the first words of a question or with a whole one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.distill.starters import STARTERS

_MARK = "@@@"
# Questions that the target begins as well.
_FREE_SHARE = 0.05


@dataclass(frozen=True)
class Frame:
    """What stands around a user's turn.

    Attributes:
        before: tokens before it, at least one.
        after: tokens after it, up to where the answer begins; empty without a chat template.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase | None) -> "Frame":
        """The chat template's; without one the token that begins every text, or ends it, or token 0."""
        if tokenizer is None:
            return Frame((0,), ())
        if tokenizer.chat_template is None:
            marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
            return Frame((next(int(mark) for mark in marks if mark is not None),), ())
        turn = [{"role": "user", "content": _MARK}]
        text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        before, _, after = text.partition(_MARK)
        return Frame(encoded(tokenizer, before), encoded(tokenizer, after))


@dataclass(frozen=True)
class Opening:
    """How one text begins.

    Attributes:
        tokens: of the user's turn.
        whole: whether they are the whole turn; if not, the target writes the rest of it.
    """

    tokens: tuple[int, ...]
    whole: bool = False


class Openings:
    """Draws openings: from `prompts` (whole questions) and the built-in beginnings in equal parts.

    Without a tokenizer, whose text means nothing, single tokens below `vocab_size`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, prompts: Sequence[str] = ()) -> None:
        self._vocab_size = vocab_size
        self._starters = [Opening(encoded(tokenizer, text)) for text in STARTERS] if tokenizer else []
        self._prompts = [Opening(encoded(tokenizer, text), whole=True) for text in prompts] if tokenizer else []

    def draw(self, count: int, rng: np.random.Generator) -> list[Opening]:
        """`count` openings."""
        return [self._one(rng) for _ in range(count)]

    def _one(self, rng: np.random.Generator) -> Opening:
        if not self._starters:
            return Opening((int(rng.integers(self._vocab_size)),))
        if self._prompts and rng.random() < 0.5:
            return self._prompts[rng.integers(len(self._prompts))]
        return Opening(()) if rng.random() < _FREE_SHARE else self._starters[rng.integers(len(self._starters))]


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Its tokens, none added."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))
