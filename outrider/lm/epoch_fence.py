"""The epoch fence: a message of a session's former owner is refused, also after the session itself was freed."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2

Key = TypeVar("Key", bound=Hashable)

# Sessions remembered at most, about 100 bytes each; the one not heard of for longest is forgotten first.
_MAX_FENCES = 65_536


class EpochFence(Generic[Key]):
    """The highest epoch seen of each session."""

    def __init__(self, max_fences: int = _MAX_FENCES) -> None:
        self._epochs: OrderedDict[Key, int] = OrderedDict()
        self._max_fences = max_fences

    def raise_to(self, key: Key, epoch: int) -> None:
        """Remembers the epoch. Raises OutriderError STALE_EPOCH when a higher one was seen before."""
        seen = self._epochs.get(key, 0)
        if epoch < seen:
            raise OutriderError(types_pb2.ERROR_REASON_STALE_EPOCH, f"epoch is {epoch}, {seen} was seen before")
        self._epochs[key] = epoch
        self._epochs.move_to_end(key)
        if len(self._epochs) > self._max_fences:
            self._epochs.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forgets a session."""
        self._epochs.pop(key, None)
