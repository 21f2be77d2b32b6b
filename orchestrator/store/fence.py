"""The one wording of refusals, so that every store says the same."""

from orchestrator.store.base import (
    MAX_EPOCH,
    LengthMismatch,
    SessionCancelled,
    SessionExists,
    SessionFinished,
    SessionGone,
    StaleEpoch,
)
from outrider.law.sparse import Int32Array
from outrider.v1.orchestrator_pb2 import FinishReason


def exists(session_id: str) -> SessionExists:
    """The id is taken."""
    return SessionExists(f"session {session_id} exists already")


def gone(session_id: str) -> SessionGone:
    """The id is unknown."""
    return SessionGone(f"session {session_id} is unknown or past its time-to-live")


def stale(session_id: str, epoch: int, held: int) -> StaleEpoch:
    """The writer's epoch is lower than the store's."""
    return StaleEpoch(f"session {session_id} has a newer owner: epoch {held}, the writer's is {epoch}")


def ahead(session_id: str, epoch: int, held: int) -> LengthMismatch:
    """The writer's epoch is higher than the store's."""
    return LengthMismatch(
        f"session {session_id} is at epoch {held} in the store, the writer's is {epoch}: the store lost a take-over"
    )


def length(session_id: str, base_length: int, held: int) -> LengthMismatch:
    """The tokens of the store are not those that the writer builds on."""
    return LengthMismatch(f"session {session_id} holds {held} tokens, and the commit was made for {base_length}")


def cancelled(session_id: str) -> SessionCancelled:
    """The cancel flag is set."""
    return SessionCancelled(f"session {session_id} was cancelled")


def finished(session_id: str, reason: int) -> SessionFinished:
    """The session has ended."""
    known = reason in FinishReason.values()
    name = FinishReason.Name(FinishReason.ValueType(reason)).removeprefix("FINISH_REASON_") if known else str(reason)
    return SessionFinished(f"session {session_id} has ended already ({name})")


def check_commit(epoch: int, base_length: int, tokens: Int32Array, finish_reason: int) -> None:
    """What no caller may pass. Raises ValueError."""
    check_epoch(epoch)
    if base_length < 0 or not len(tokens) or finish_reason < 0:
        raise ValueError(f"commit of {len(tokens)} tokens at {base_length} with finish reason {finish_reason}")


def check_epoch(epoch: int) -> None:
    """Epochs outside [1, MAX_EPOCH] cannot be compared exactly. Raises ValueError."""
    if not 1 <= epoch <= MAX_EPOCH:
        raise ValueError(f"epoch {epoch} is outside [1, {MAX_EPOCH}]")
