"""Which worker a session goes to. Policy over numbers; nothing here knows a connection.

A worker keeps what it has read, also of sessions that have ended. So a prompt goes where a prompt with the same first
tokens went last, the more tokens the better, as long as that worker is not much more loaded than the others; any
other goes to the worker with the least load.
"""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b

from outrider.law.sparse import Int32Array

# Prefixes are known by their first 64, 128, 256, ... tokens. Fewer are read again in one short pass.
SHORTEST_PREFIX = 64
# A worker takes sessions for its cache's sake up to this multiple of the mean load, and so many more.
BOUND, SLACK = 1.25, 2.0
# So many items that wait for a worker's model weigh as one session.
ITEMS_PER_SESSION = 16
# A running session changes workers when its own has at least this multiple of the other's sessions, and so many more.
UNEVEN, UNEVEN_BY = 2, 4
_REMEMBERED = 16_384


class Placement:
    """Places sessions, and remembers where their prefixes are."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._holders: OrderedDict[bytes, str] = OrderedDict()

    def place(self, tokens: Int32Array, loads: Mapping[str, float]) -> str:
        """The worker for a session with these tokens (int32), by name; among equals the first of those to choose from,
        or, for a longer prompt, the same one at every orchestrator.

        Args:
            loads: sessions of each worker that may be chosen; at least one.
        """
        keys = prefix_keys(tokens)
        holders = (self._holders.get(key) for key in reversed(keys))
        held = next((name for name in holders if name is not None and _has_room(name, loads)), None)
        name = held or min(loads, key=lambda each: (loads[each], _score(keys[0], each) if keys else b""))
        for key in keys:
            self._holders[key] = name
            self._holders.move_to_end(key)
        while len(self._holders) > self._remembered:
            self._holders.popitem(last=False)
        return name


def load_of(sessions: int, others: int, queued_items: int) -> int:
    """A worker's load in sessions.

    Args:
        sessions: bound to it here.
        others: of other orchestrators.
        queued_items: that wait for its model.
    """
    return sessions + others + queued_items // ITEMS_PER_SESSION


def uneven(sessions: int, fewest: int) -> bool:
    """Whether one of a worker's sessions should go to the worker that has the fewest."""
    return sessions >= UNEVEN * fewest + UNEVEN_BY


def prefix_keys(tokens: Int32Array) -> list[bytes]:
    """Digests of the first 64, 128, 256, ... tokens, as far as there are so many."""
    keys, digest, start, end = [], blake2b(digest_size=16), 0, SHORTEST_PREFIX
    while end <= len(tokens):
        digest.update(tokens[start:end].tobytes())
        keys.append(digest.digest())
        start, end = end, 2 * end
    return keys


def _has_room(name: str, loads: Mapping[str, float]) -> bool:
    """Whether a worker that may be chosen stays within the bound with one session more."""
    return name in loads and loads[name] + 1 <= BOUND * (sum(loads.values()) + 1) / len(loads) + SLACK


def _score(key: bytes, name: str) -> bytes:
    """Rendezvous hashing: whoever knows the same names finds the same worker for a key, also when others come or go."""
    return blake2b(key + name.encode(), digest_size=8).digest()
