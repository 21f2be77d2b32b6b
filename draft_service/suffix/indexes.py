"""The indexes of running sessions: what a request has said itself, its prompt included."""

from collections import OrderedDict
from dataclasses import dataclass, field

from draft_service.commands import Key
from draft_service.suffix.index import SuffixIndex
from outrider.lm.session_cache import Session


@dataclass
class _Known:
    """An index, and the session that it is of: another one may have the same key one day."""

    session: Session[Key]
    index: SuffixIndex = field(default_factory=SuffixIndex)


class SessionIndexes:
    """An index for each session that was asked for, the most recently used up to so many tokens of all together. One
    that went is made anew, from its session's tokens, when it is asked for again.

    Attributes:
        tokens: indexed, of all.

    Args:
        most_tokens: indexed at once; a single session may have more.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        self.tokens = 0

    def of(self, session: Session[Key]) -> SuffixIndex:
        """That of a session, with all of its tokens; costs what was added and taken back since the last time."""
        known = self._known.get(session.key)
        if known is None or known.session is not session:
            self.forget(session.key)
            known = self._known[session.key] = _Known(session)
            session.unchanged = 0
        index = known.index
        before = len(index)
        if session.unchanged < before:
            index.cut(session.unchanged)
        index.extend(session.tokens[len(index) :])
        session.unchanged = session.length
        self.tokens += len(index) - before
        self._known.move_to_end(session.key)
        while self.tokens > self._most_tokens and len(self._known) > 1:
            self.forget(next(iter(self._known)))
        return index

    def forget(self, key: Key) -> None:
        """Frees an index. Idempotent."""
        known = self._known.pop(key, None)
        if known is not None:
            self.tokens -= len(known.index)
