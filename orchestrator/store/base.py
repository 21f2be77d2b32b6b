"""Session state that outlives its owner: committed tokens behind a fence of epoch and length."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from outrider.law.sparse import Int32Array
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2
from outrider.v1.types_pb2 import ErrorReason

# Lua numbers are float64: from here on two epochs or lengths could compare equal without being so.
MAX_EPOCH = (1 << 53) - 1

RUNNING: Literal["running"] = "running"
FINISHED: Literal["finished"] = "finished"


@dataclass(frozen=True)
class SessionRecord:
    """What the store holds of one session.

    Attributes:
        tokens: [n] int32, the prompt and all committed tokens.
        prompt_length: how many of them are the prompt.
        epoch: counter of the session's owner, in [1, MAX_EPOCH].
        state: "running" or "finished".
        finish_reason: a FinishReason; 0 while running.
        meta: the serialised request, set once at creation; opaque to the store.
        progress: what a resume needs beside the tokens, set at each commit; opaque to the store.
        cancelled: whether somebody asked for it to stop.
        expires_at: unix seconds after which the store forgets the session; set by the store, ignored by `create`.
    """

    session_id: str
    tokens: Int32Array
    prompt_length: int
    epoch: int = 1
    state: Literal["running", "finished"] = RUNNING
    finish_reason: int = 0
    meta: bytes = field(default=b"", repr=False)
    progress: bytes = field(default=b"", repr=False)
    cancelled: bool = False
    expires_at: float = 0.0


class StoreError(OutriderError):
    """A store refused or failed. Every subclass has its reason, so that it can end a call as it is."""

    REASON: ErrorReason.ValueType = types_pb2.ERROR_REASON_STORE_UNAVAILABLE

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(self.REASON, message, retry_after=retry_after)


class SessionExists(StoreError):
    """A session with this id exists already."""

    REASON = types_pb2.ERROR_REASON_SESSION_EXISTS


class SessionGone(StoreError):
    """The store does not hold the session: never created, or past its time-to-live."""

    REASON = types_pb2.ERROR_REASON_SESSION_NOT_FOUND


class SessionCancelled(StoreError):
    """Somebody asked for the session to stop; nothing was written."""

    REASON = types_pb2.ERROR_REASON_SESSION_CANCELLED


class StaleEpoch(StoreError):
    """The session has a newer owner; nothing was written."""

    REASON = types_pb2.ERROR_REASON_STALE_EPOCH


class LengthMismatch(StoreError):
    """The session is not where the writer believes: other tokens, another length, or an epoch that the store never
    gave out. Another process writes as the same owner, or the store lost writes. Nothing was written."""


class SessionFinished(StoreError):
    """The session has ended already; nothing was written."""


class SessionCorrupt(StoreError):
    """What the store holds under the session's keys is no session, or of a version that this process cannot read."""

    REASON = types_pb2.ERROR_REASON_SESSION_CORRUPT


class StoreFull(StoreError):
    """The store is at its limit of sessions; nothing was written."""

    REASON = types_pb2.ERROR_REASON_QUEUE_FULL


class StoreUnavailable(StoreError):
    """The store did not answer in time or could not be reached. Whether the write took effect is unknown; repeating
    it is safe."""


class SessionStore(Protocol):
    """Where sessions live. Every method but `close` is safe to repeat after StoreUnavailable.

    All methods raise StoreUnavailable when the store cannot be reached within its deadline, SessionCorrupt when it
    holds something else under the session's keys.
    """

    async def create(self, record: SessionRecord) -> None:
        """Stores a new session and starts its time-to-live. Raises SessionExists, StoreFull."""

    async def commit(
        self,
        session_id: str,
        epoch: int,
        base_length: int,
        tokens: Int32Array,
        progress: bytes = b"",
        *,
        finish_reason: int = 0,
    ) -> None:
        """Appends tokens [n], n >= 1, after the first `base_length`, and starts the time-to-live anew.

        One atomic step: tokens, progress and, with a finish_reason above 0, the end of the session. Idempotent:
        tokens that the same epoch already committed at this place are not appended again.
        Raises SessionGone, StaleEpoch, SessionCancelled, SessionFinished, LengthMismatch; then nothing was written.
        """

    async def finish(self, session_id: str, epoch: int, finish_reason: int) -> None:
        """Ends the session without further tokens (finish_reason above 0). Idempotent for the same reason.

        Raises SessionGone, StaleEpoch, LengthMismatch (unknown epoch), SessionFinished (for another reason).
        """

    async def load(self, session_id: str) -> SessionRecord | None:
        """The session as committed, or None when the store does not hold it."""

    async def take_over(self, session_id: str) -> SessionRecord:
        """Makes the caller the owner: the session at an epoch one higher; every earlier owner's writes are refused
        from now on. Raises SessionGone."""

    async def request_cancel(self, session_id: str) -> bool:
        """Ends the session with FINISH_REASON_CANCELLED unless it has ended, whether or not anybody owns it: an owner's
        next commit raises SessionCancelled. Whether the session is known. Idempotent."""

    async def ping(self) -> None:
        """Returns when the store answers. Raises StoreUnavailable."""

    async def fullness(self) -> float | None:
        """What is taken of what the store may hold, a part of 1; of its fullest server. None where it has no limit, or
        does not say. Raises StoreUnavailable."""

    async def close(self) -> None:
        """Gives connections back. Idempotent."""
