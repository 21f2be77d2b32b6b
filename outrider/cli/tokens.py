"""Tokens on a screen, coloured by where they come from."""

import re
from collections.abc import Iterable
from typing import TextIO

from rich.color import ColorSystem
from rich.style import Style

from outrider.v1 import orchestrator_pb2 as pb

STYLES: "dict[pb.TokenOrigin.ValueType, tuple[str, Style]]" = {  # name, how it looks
    pb.TOKEN_ORIGIN_ACCEPTED: ("accepted", Style.parse("green")),
    pb.TOKEN_ORIGIN_RECOVERED: ("recovered", Style.parse("red")),
    pb.TOKEN_ORIGIN_BONUS: ("bonus", Style.parse("cyan")),
    pb.TOKEN_ORIGIN_PLAIN: ("plain", Style.null()),
    pb.TOKEN_ORIGIN_REPLAYED: ("replayed", Style.parse("dim")),
}
_NO_STYLE = ("unknown", Style.null())
# Of the origins that a stream has which was not resumed.
_MEANINGS = {
    pb.TOKEN_ORIGIN_ACCEPTED: "drafted, and kept by the target",
    pb.TOKEN_ORIGIN_RECOVERED: "the target's own, where it rejected a drafted one",
    pb.TOKEN_ORIGIN_BONUS: "the target's own, after a block that it kept whole",
    pb.TOKEN_ORIGIN_PLAIN: "the target's own, in a round without a block",
}

# A model can print anything; what moves the cursor or talks to the terminal shows as a sign instead.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_VISIBLE = "�"


class TokenWriter:
    """Writes tokens as they arrive.

    Args:
        stream: where to.
        color: whether to colour; without it exactly the text is written.
    """

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self._stream = stream
        self._color = color

    def write(self, tokens: Iterable[pb.Token]) -> None:
        """Appends the tokens' texts and flushes."""
        for token in tokens:
            self._stream.write(self._rendered(token))
        self._stream.flush()

    def legend(self) -> str:
        """The names of the origins, each in its colour; empty without colour."""
        if not self._color:
            return ""
        return "  ".join(_ansi(*STYLES[origin]) for origin in _MEANINGS)

    def explanation(self) -> str:
        """The origins and what they mean, one a line, each in its colour; empty without colour."""
        if not self._color:
            return ""
        return "\n".join(f"  {_ansi(f'{STYLES[it][0]:<11}', STYLES[it][1])}{text}" for it, text in _MEANINGS.items())

    def _rendered(self, token: pb.Token) -> str:
        if not self._color:
            return token.text
        _, style = STYLES.get(token.origin, _NO_STYLE)
        return _ansi(_CONTROL.sub(_VISIBLE, token.text), style)


def _ansi(text: str, style: Style) -> str:
    return style.render(text, color_system=ColorSystem.STANDARD) if text else ""
