"""Lines out of chunks of a process' output."""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"([\r\n])")
_LONGEST_LINE = 16 * 1024


@dataclass(frozen=True)
class Line:
    """A line that a process printed; a passing one ended with a carriage return, as progress bars do."""

    text: str
    passing: bool = False


class LineSplitter:
    """Cuts a stream of bytes into lines. Empty ones are left out; of an overlong one the end is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        *whole, rest = _LINE_END.split(self._rest + data)
        self._rest = rest[-_LONGEST_LINE:]
        pairs = zip(whole[::2], whole[1::2], strict=True)
        return [_line(text, passing=end == b"\r") for text, end in pairs if text.strip()]

    def close(self) -> list[Line]:
        """The last line, when nothing ended it."""
        rest, self._rest = self._rest, b""
        return [_line(rest, passing=False)] if rest.strip() else []


def _line(text: bytes, *, passing: bool) -> Line:
    return Line(text[-_LONGEST_LINE:].decode(errors="replace").rstrip(), passing)
