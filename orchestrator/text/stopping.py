"""When a generation ends: the rules, and stop strings found in text that arrives in pieces."""

from dataclasses import dataclass
from typing import NamedTuple

from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import FinishReason


@dataclass(frozen=True)
class StopRules:
    """When a generation ends; whatever comes first.

    Attributes:
        max_tokens: most generated tokens, at least 1.
        min_tokens: neither a stop token nor any part of a stop string is looked for among so many first tokens.
        strings: texts that end the output and are not part of it, none empty.
        token_ids: tokens that end the output, the model's end-of-sequence tokens included unless they are ignored.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Finish:
    """Why and how a generation ended.

    Attributes:
        reason: FINISH_REASON_STOP or FINISH_REASON_LENGTH.
        matched_stop: the stop string, or the stop token as the vocabulary spells it; empty for LENGTH.
    """

    reason: "FinishReason.ValueType"
    matched_stop: str = ""


LENGTH = Finish(orchestrator_pb2.FINISH_REASON_LENGTH)


def stopped_by(text: str) -> Finish:
    """The end at a stop token or stop string."""
    return Finish(orchestrator_pb2.FINISH_REASON_STOP, text)


class Match(NamedTuple):
    """A stop string in the text.

    Attributes:
        string: the stop string.
        end: characters of the last piece that belong to text and match.
    """

    string: str
    end: int


class StopMatcher:
    """Finds the first stop string to be complete; of those complete at the same character the longest.

    Knuth, Morris, Pratt (1977), one automaton per string: what is found does not depend on how the text was cut.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        # Longest first: the first one found complete at a character is the one wanted.
        self._strings = tuple(sorted(strings, key=len, reverse=True))
        self._borders = tuple(_borders(string) for string in self._strings)
        self._matched = [0] * len(strings)  # characters of each string that the text now ends with

    @property
    def held(self) -> int:
        """Characters at the end of the text that may turn out to be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> Match | None:
        """Goes on with the text. After a match the matcher is spent."""
        if not self._strings:
            return None
        for index, character in enumerate(text):
            found = self._step(character)
            if found is not None:
                return Match(found, index + 1)
        return None

    def fork(self) -> "StopMatcher":
        """An independent copy. O(number of strings)."""
        if not self._strings:
            return self  # nothing of it changes
        copy = StopMatcher.__new__(StopMatcher)
        copy._strings, copy._borders, copy._matched = self._strings, self._borders, self._matched.copy()
        return copy

    def _step(self, character: str) -> str | None:
        for i, string in enumerate(self._strings):
            matched = self._matched[i]
            while matched and string[matched] != character:
                matched = self._borders[i][matched - 1]
            self._matched[i] = matched = matched + (string[matched] == character)
            if matched == len(string):
                return string
        return None


def _borders(string: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        length += string[i] == string[length]
        borders[i] = length
    return tuple(borders)
