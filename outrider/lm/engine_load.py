"""How the engines of a worker stand: made by the engine thread, read by the event loop."""

from dataclasses import dataclass

from outrider.v1.types_pb2 import WorkerLoad


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot.

    Attributes:
        open_sessions: sessions with state.
        kv_pages_used: pages of the KV caches in use.
        kv_pages_total: pages in all; 0 without a KV cache.
        kv_pages_shared: of those in use, what more than one session holds.
    """

    open_sessions: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    kv_pages_shared: int = 0

    def message(self, queued_items: int) -> WorkerLoad:
        """The wire's view, with the items that wait on the event loop's side."""
        return WorkerLoad(
            queued_items=queued_items,
            open_sessions=self.open_sessions,
            kv_pages_used=self.kv_pages_used,
            kv_pages_total=self.kv_pages_total,
        )
