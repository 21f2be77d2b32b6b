"""How texts begin: in the frame of the chat template, with the first words of a question or with a whole one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.distill.questions import is_held_out, question
from outrider.distill.starters import STARTERS

_MARK = "@@@"
# Of the texts: whole questions of the user's or of ours; of the others, those that the target begins as well.
_WHOLE_SHARE, _FREE_SHARE = 0.5, 0.05


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
        """The chat template's; where nothing stands before a turn the token that begins texts, or ends them, or 0."""
        if tokenizer is None:
            return Frame((0,), ())
        marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        mark = (next(int(mark) for mark in marks if mark is not None),)
        if tokenizer.chat_template is None:
            return Frame(mark, ())
        turn = [{"role": "user", "content": _MARK}]
        text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        before, _, after = text.partition(_MARK)
        return Frame(encoded(tokenizer, before) or mark, encoded(tokenizer, after))


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
    """Draws openings, half of them whole questions: `prompts`, or the built-in ones where there are none.

    Without a tokenizer, whose text means nothing, single tokens below `vocab_size`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, prompts: Sequence[str] = ()) -> None:
        self._vocab_size = vocab_size
        self._starters = [Opening(encoded(tokenizer, text)) for text in STARTERS] if tokenizer else []
        self._tokenizer, self._prompts = tokenizer, prompts

    def draw(self, count: int, rng: np.random.Generator, *, held_out: bool = False) -> list[Opening]:
        """`count` openings. No whole question is drawn both with `held_out` and without."""
        prompts = [text for text in self._prompts if is_held_out(text) == held_out]
        return [self._one(rng, prompts, held_out) for _ in range(count)]

    def _one(self, rng: np.random.Generator, prompts: Sequence[str], held_out: bool) -> Opening:
        if self._tokenizer is None:
            return Opening((int(rng.integers(self._vocab_size)),))
        if rng.random() < _WHOLE_SHARE:
            text = prompts[int(rng.integers(len(prompts)))] if prompts else question(rng, held_out=held_out)
            return Opening(encoded(self._tokenizer, text), whole=True)
        return Opening(()) if rng.random() < _FREE_SHARE else self._starters[rng.integers(len(self._starters))]


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Its tokens, none added."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))
