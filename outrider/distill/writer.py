"""Text that the target writes: many at once, each a turn of a user and the answer to it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.distill.lockstep import Lockstep
from outrider.distill.openings import Opening
from outrider.distill.shard import ScoredText, likeliest
from outrider.distill.target import Target
from outrider.law.sparse import Float32Array, Int32Array
from outrider.lm.engine import ModelRefused


@dataclass(frozen=True)
class WriterOptions:
    """How text is written.

    Attributes:
        slots: texts that are written at once.
        turn_tokens: most tokens of a user's turn.
        answer_tokens: most tokens of an answer.
        temperatures: one is drawn for each answer; 0 is greedy. A user's turn has 1.
        k: tokens of a law that are kept, and from which is drawn.
    """

    slots: int = 64
    turn_tokens: int = 40
    answer_tokens: int = 192
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    k: int = 20


@dataclass
class _Text:
    tokens: list[int]
    temperature: float
    fed: int
    answer_start: int = 0  # 0: the user's turn is not over
    rows: dict[int, tuple[Int32Array, Float32Array]] = field(default_factory=dict)

    def scored(self) -> ScoredText:
        """The last token was never fed: it has no law."""
        rows = [row for _, row in sorted(self.rows.items())]
        return ScoredText(
            tokens=np.array(self.tokens, np.int32),
            scored=np.isin(np.arange(len(self.tokens)), list(self.rows)),
            ids=np.stack([ids for ids, _ in rows]),
            logits=np.stack([logits for _, logits in rows]).astype(np.float16),
        )


class Writer:
    """Equal random generators and openings give equal text. Used by one thread at a time."""

    def __init__(self, target: Target, options: WriterOptions) -> None:
        """Raises ModelRefused when not even the shortest answer fits into the target's context."""
        frame = target.frame
        self._frame, self._options, self._ends = frame, options, set(target.ends)
        # A turn ends with the first token that is too many, which is left out.
        given = len(frame.before) + options.turn_tokens + len(frame.after)
        self._answer_tokens = min(options.answer_tokens, target.context_length - given)
        if self._answer_tokens < 1:
            raise ModelRefused(f"a context of {target.context_length} tokens has no room for a question and an answer")
        self._lockstep = Lockstep(target.model, options.slots, given + self._answer_tokens)
        for position, token in enumerate(frame.before[:-1]):  # these stay in every slot
            self._lockstep.step([token] * options.slots, [position] * options.slots)

    def write(
        self, openings: Sequence[Opening], rng: np.random.Generator, written: Callable[[int], None]
    ) -> list[ScoredText]:
        """One text for each opening; `written` is called with the number of texts that are through with each pass."""
        waiting = iter(openings)
        slots: list[_Text | None] = [None] * self._options.slots
        texts: list[_Text] = []
        while True:
            before = len(texts)
            for index, text in enumerate(slots):
                if text is None or self._over(text):
                    texts += [text] if text else []
                    slots[index] = self._begin(waiting, rng)
            written(len(texts) - before)
            if not any(slots):
                return [text.scored() for text in texts]
            self._step(slots, rng)

    def _begin(self, openings: Iterator[Opening], rng: np.random.Generator) -> _Text | None:
        opening = next(openings, None)
        if opening is None:
            return None
        start = opening.tokens[: self._options.turn_tokens]
        temperature = float(rng.choice(self._options.temperatures))
        text = _Text([*self._frame.before, *start], temperature, fed=len(self._frame.before) - 1)
        if opening.whole or not self._frame.after:
            self._answer(text)
        return text

    def _answer(self, text: _Text) -> None:
        text.tokens += self._frame.after
        text.answer_start = len(text.tokens)

    def _step(self, slots: Sequence[_Text | None], rng: np.random.Generator) -> None:
        """One token into every slot; texts whose tokens are all in get their next one."""
        fed = [(text.tokens[text.fed], text.fed) if text else (0, len(self._frame.before)) for text in slots]
        tokens, positions = zip(*fed, strict=True)
        ids, logits = likeliest(self._lockstep.step(tokens, positions), self._options.k)
        for text, row_ids, row in zip(slots, ids, logits, strict=True):
            if text is None:
                continue
            text.fed += 1
            if text.fed == len(text.tokens):
                text.rows[text.fed - 1] = row_ids, row
                self._extend(text, _draw(text.temperature if text.answer_start else 1.0, row_ids, row, rng))

    def _extend(self, text: _Text, token: int) -> None:
        turn = len(text.tokens) - len(self._frame.before)
        closing = token in self._ends or token in self._frame.after[:1] or turn >= self._options.turn_tokens
        if not text.answer_start and closing:
            self._answer(text)
        else:
            text.tokens.append(token)

    def _over(self, text: _Text) -> bool:
        answer = len(text.tokens) - text.answer_start if text.answer_start else 0
        return answer >= self._answer_tokens or (answer > 0 and text.tokens[-1] in self._ends)


def _draw(temperature: float, ids: Int32Array, logits: Float32Array, rng: np.random.Generator) -> int:
    if temperature == 0.0:
        return int(ids[0])
    weights: npt.NDArray[np.float64] = np.exp(logits.astype(np.float64) / temperature)
    return int(rng.choice(ids, p=weights / weights.sum()))
