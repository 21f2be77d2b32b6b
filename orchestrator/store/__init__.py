"""Session stores: `memory://` inside one process, `redis://` between many.

Commit before emit: what a client has seen is in the store, so it is never lost and never repeated.
"""

from orchestrator.store.base import (
    FINISHED,
    RUNNING,
    LengthMismatch,
    SessionCancelled,
    SessionCorrupt,
    SessionExists,
    SessionFinished,
    SessionGone,
    SessionRecord,
    SessionStore,
    StaleEpoch,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from orchestrator.store.opening import open_store

__all__ = [
    "FINISHED",
    "RUNNING",
    "LengthMismatch",
    "SessionCancelled",
    "SessionCorrupt",
    "SessionExists",
    "SessionFinished",
    "SessionGone",
    "SessionRecord",
    "SessionStore",
    "StaleEpoch",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "open_store",
]
