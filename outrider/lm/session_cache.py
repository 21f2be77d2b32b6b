"""What a worker remembers of its sessions: the tokens of each, and the state cached for them."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.law.params import SeededLaw
from outrider.law.sparse import Int32Array
from outrider.lm.branches import Branches, grown
from outrider.lm.engine import SequenceState
from outrider.lm.features import FeatureWindow
from outrider.lm.grammars import SessionGrammar
from outrider.net.arrays import PrefixHash
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2

Key = TypeVar("Key", bound=Hashable)

# Sessions without work that are kept at most, whatever the pages say.
_MAX_SESSIONS = 16_384


class Session(Generic[Key]):
    """One session's prefix as the worker knows it. Used by the engine thread alone.

    `tokens` may be longer than the cached state (a prompt still to be computed) and may end in draft tokens. Where they
    are a tree, the next `rebase` says which path of it was committed.

    Attributes:
        key: the session's id in this worker.
        sequence: the engine's state, a prefix of `tokens`; None when nothing is cached.
        used_at: monotonic seconds of the last use.
        law: what the session was opened with, where its worker needs that; None otherwise.
        grammar: where the session stands in its language; None when the law has none.
        features: of the target, where what makes its blocks is fed with them; None otherwise.
        branches: the tree that `tokens` ends in; None for a chain.
        unchanged: leading tokens that are as they were when this was last set, for whoever sets it to the length.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.sequence: SequenceState | None = None
        self.used_at = time.monotonic()
        self.law: SeededLaw | None = None
        self.grammar: SessionGrammar | None = None
        self.features: FeatureWindow | None = None
        self.branches: Branches | None = None
        self.unchanged = 0
        self._buffer = np.empty(64, np.int32)
        self._length = 0
        self._hash = PrefixHash()

    @property
    def tokens(self) -> Int32Array:
        """[length] int32, a view that later calls may overwrite."""
        return self._buffer[: self._length]

    @property
    def length(self) -> int:
        """Number of known tokens."""
        return self._length

    @property
    def straight(self) -> int:
        """Number of leading tokens that follow one another; those after them are a tree."""
        return self._length if self.branches is None else self.branches.trunk

    @property
    def cached(self) -> int:
        """Number of leading tokens whose state is cached."""
        return self.sequence.length if self.sequence is not None else 0

    def rebase(self, base_length: int, tail: Int32Array, prefix_hash: int) -> None:
        """Makes the session end at `base_length` with the tokens of `tail`.

        Whatever is known beyond base_length - len(tail) and differs from `tail` is forgotten; what is equal (accepted
        draft tokens, a repeated message) keeps its state. The last token is always left to compute: its logits are
        wanted. `prefix_hash` is compared with the tokens before `tail`, of which there may be none.
        Raises OutriderError: SESSION_NOT_FOUND when fewer tokens are known, PREFIX_MISMATCH when they differ.
        """
        start = base_length - len(tail)
        if start > self.straight:
            raise OutriderError(
                types_pb2.ERROR_REASON_SESSION_NOT_FOUND,
                f"session holds {self.straight} tokens, the message builds on {start}",
            )
        if start > 0 and self._hash_at(start) != prefix_hash:
            raise OutriderError(
                types_pb2.ERROR_REASON_PREFIX_MISMATCH,
                f"the hash of the first {start} tokens differs from prefix_hash",
            )
        self._follow(tail[self.straight - start :])
        equal = start + _common(self._buffer[start : self._length], tail)
        self._forget_from(min(equal, base_length))
        self.extend(tail[self._length - start :])
        self._truncate_state(base_length - 1)

    def holds(self, base_length: int, tail: Int32Array, prefix_hash: int) -> bool:
        """Whether the known tokens begin with what `rebase` would make of them. Changes nothing."""
        start = base_length - len(tail)
        if base_length > self.straight or _common(self._buffer[start:base_length], tail) < len(tail):
            return False
        return start == 0 or self._hash_at(start) == prefix_hash

    def recompute(self, start: int) -> None:
        """Leaves the tokens from `start` on to be computed again."""
        self._truncate_state(start)

    def cut(self, length: int) -> None:
        """Forgets everything after the first `length` tokens, of which there are at least so many; the last is left to
        compute."""
        self._forget_from(length)
        self._truncate_state(length - 1)

    def extend(self, tokens: Int32Array, parents: npt.NDArray[np.integer] | None = None) -> None:
        """Appends tokens whose state is still to be computed. Amortised O(len(tokens)).

        Args:
            parents: [n] the places of the tokens that they follow; None where each follows the one before it.
        """
        if parents is None and self.branches is not None:
            parents = np.arange(self._length - 1, self._length + len(tokens) - 1)
        if parents is not None:
            self.branches = grown(self.branches, self._length, parents)
        end = self._length + len(tokens)
        if end > len(self._buffer):
            larger = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            larger[: self._length] = self.tokens
            self._buffer = larger
        self._buffer[self._length : end] = tokens
        self._length = end

    def parents(self, start: int, stop: int) -> npt.NDArray[np.int64] | None:
        """[stop - start] the places of the tokens that those at these places follow; None where they are a chain."""
        if self.branches is None or stop <= self.branches.trunk:
            return None
        return np.array([self.branches.parent_of(place) for place in range(start, stop)])

    def text(self, place: int) -> Int32Array:
        """The tokens up to the one at a place: of a tree its path alone."""
        if self.branches is None or place < self.branches.trunk:
            return self.tokens[: place + 1]
        path: list[int] = []
        while place >= self.branches.trunk:
            path.append(place)
            place = self.branches.parent_of(place)
        text: Int32Array = self.tokens[np.concatenate([np.arange(place + 1), np.array(path[::-1])])]
        return text

    def free_state(self) -> None:
        """Gives the cached state back; the tokens stay, so that it can be computed again."""
        if self.sequence is not None:
            self.sequence.free()
            self.sequence = None

    def _follow(self, tail: Int32Array) -> None:
        """Leaves of a tree the path that begins as `tail` does, which goes on from its trunk."""
        branches = self.branches
        if branches is None:
            return
        path = branches.path(self._buffer[branches.trunk : self._length], tail)
        if self.sequence is not None and self.cached > branches.trunk:
            _keep(self.sequence, branches, [place for place in path if place < self.cached])
        kept = self._buffer[path]
        self._length, self.branches = branches.trunk, None
        self.extend(kept)

    def _forget_from(self, length: int) -> None:
        self._length = length
        self.branches = self.branches.cut(length) if self.branches is not None else None
        self.unchanged = min(self.unchanged, length)
        if self._hash.length > length:
            self._hash = PrefixHash()
        self._truncate_state(length)

    def _truncate_state(self, length: int) -> None:
        if self.sequence is not None and self.sequence.length > length:
            self.sequence.truncate(length)

    def _hash_at(self, length: int) -> int:
        """Hash of the first `length` tokens; O(new tokens) as long as `length` grows, which committed prefixes do."""
        if self._hash.length > length:
            self._hash = PrefixHash()
        self._hash.extend(self._buffer[self._hash.length : length])
        return self._hash.value()


def _keep(sequence: SequenceState, branches: Branches, path: list[int]) -> None:
    """Leaves of a sequence the path, as far as it is cached. What is cached of the tree may be a chain, or begin as
    one: only where the path leaves that is there anything to move."""
    left = branches.cut(sequence.length)
    fork = sequence.length if left is None else left.trunk
    straight = branches.trunk + sum(place < fork for place in path)
    if straight < fork or left is None:
        sequence.truncate(straight)
    else:
        sequence.keep([place for place in path if place >= fork])


def _common(known: Int32Array, tail: Int32Array) -> int:
    """How many leading tokens two arrays share."""
    shared = min(len(known), len(tail))
    differing = np.flatnonzero(known[:shared] != tail[:shared])
    return int(differing[0]) if len(differing) else shared


class SessionCache(Generic[Key]):
    """The sessions of one engine in order of use, with a time-to-live. Used by the engine thread alone.

    Args:
        ttl: seconds without use after which a session is freed.
        in_use: whether a session has work queued or running; such a session is never evicted.
        evicted: called with the key of every session that is freed without having been asked for.
        max_sessions: beyond these the least recently used session goes.
    """

    def __init__(
        self,
        ttl: float,
        in_use: Callable[[Key], bool],
        evicted: Callable[[Key], None],
        *,
        max_sessions: int = _MAX_SESSIONS,
    ) -> None:
        self._ttl, self._in_use, self._evicted, self._max_sessions = ttl, in_use, evicted, max_sessions
        self._sessions: OrderedDict[Key, Session[Key]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session[Key]]:
        return iter(self._sessions.values())

    def find(self, key: Key) -> Session[Key] | None:
        """The session, marked as used now; None when it is unknown."""
        session = self._sessions.get(key)
        if session is not None:
            self.touch(session)
        return session

    def open(self, key: Key) -> Session[Key]:
        """The session, new when it is unknown. Evicts the least recently used one above the limit."""
        session = self.find(key)
        if session is None:
            if len(self._sessions) >= self._max_sessions:
                self.evict_idle()
            session = self._sessions[key] = Session(key)
        return session

    def touch(self, session: Session[Key]) -> None:
        """Marks a session as used now."""
        session.used_at = time.monotonic()
        if session.key in self._sessions:
            self._sessions.move_to_end(session.key)

    def drop(self, session: Session[Key]) -> None:
        """Frees a session. Idempotent."""
        session.free_state()
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]

    def evict_idle(self) -> bool:
        """Frees the least recently used session that is not in use; False when there is none."""
        for session in self._sessions.values():
            if not self._in_use(session.key):
                self._evict(session)
                return True
        return False

    def sweep(self) -> None:
        """Frees sessions without work that were not used for the time-to-live."""
        deadline = time.monotonic() - self._ttl
        expired = []
        for session in self._sessions.values():
            if session.used_at > deadline:
                break
            if not self._in_use(session.key):
                expired.append(session)
        for session in expired:
            self._evict(session)

    def _evict(self, session: Session[Key]) -> None:
        self.drop(session)
        self._evicted(session.key)
