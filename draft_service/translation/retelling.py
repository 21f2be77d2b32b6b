"""What the draft model has drawn in own tokens, in the target's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.translation.reading import Reading, unfinished
from draft_service.translation.vocabularies import Vocabularies


@dataclass(frozen=True)
class Retold:
    """A continuation in the target's tokens.

    Attributes:
        tokens: all of it.
        settled: how many of them more text would hardly change.
        ended: nothing can follow: a special token was drawn.
    """

    tokens: list[int]
    settled: int
    ended: bool


def retell(vocabularies: Vocabularies, reading: Reading, drawn: Sequence[int]) -> Retold:
    """The own tokens `drawn` after the reading.

    The text is encoded together with what the target last said, from where a word begins, for its tokens are the
    tokenizer's own as a rule; where they are not, by itself. Only special tokens that both vocabularies have are told.
    """
    pieces = [vocabularies.own.pieces[token] for token in drawn]
    ended = None in pieces
    spoken = pieces.index(None) if ended else len(pieces)
    data = b"".join(piece or b"" for piece in pieces[:spoken])
    tokens = _continuation(vocabularies, reading, data)
    if ended:
        twin = int(vocabularies.shared.targets_of(np.array(drawn[spoken : spoken + 1]))[0])
        tokens += [twin] if twin >= 0 else []
        return Retold(tokens, len(tokens), ended)
    last = len(pieces[-1] or b"") if pieces else 0
    return Retold(tokens, _settled(vocabularies, tokens, data, last), ended)


def _continuation(vocabularies: Vocabularies, reading: Reading, data: bytes) -> list[int]:
    target, tail = vocabularies.target, _spoken(vocabularies, reading.open_tokens)
    before = target.spell(tail)
    whole = target.encode(before + data)
    at = seen = 0
    while at < len(whole) and seen < len(before):
        seen += len(target.pieces[whole[at]] or b"")
        at += 1
    return whole[at:] if seen == len(before) else target.encode(data)


def _spoken(vocabularies: Vocabularies, tokens: list[int]) -> list[int]:
    """The tokens after the last special one."""
    pieces = vocabularies.target.pieces
    begin = next((at for at in range(len(tokens), 0, -1) if pieces[tokens[at - 1]] is None), 0)
    return tokens[begin:]


def _settled(vocabularies: Vocabularies, tokens: list[int], data: bytes, last: int) -> int:
    """Without the tokens of an unfinished character, and without a last token that began before the last own one."""
    sizes = [len(vocabularies.target.pieces[token] or b"") for token in tokens]
    count, open_bytes = len(tokens), unfinished(data)
    if not open_bytes and tokens and sizes[-1] > last:
        return count - 1
    while count and open_bytes > 0:
        count -= 1
        open_bytes -= sizes[count]
    return count
