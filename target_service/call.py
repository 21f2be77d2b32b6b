"""One Verify call while it waits for the engine thread."""

import asyncio
from dataclasses import dataclass, field

from outrider.net.errors import OutriderError, to_status
from outrider.v1 import target_pb2
from target_service.job import Job
from target_service.scoring import result_message


@dataclass(frozen=True)
class Rejected:
    """An item that never reached the engine thread."""

    item: target_pb2.VerifyItem
    error: OutriderError


@dataclass(eq=False)
class Call:
    """The entries of a call in the order of its items. Lives on the event loop."""

    entries: list[Job | Rejected] = field(default_factory=list)
    unfinished: int = 0
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def jobs(self) -> list[Job]:
        """The entries that went to the engine thread."""
        return [entry for entry in self.entries if isinstance(entry, Job)]

    def finish_one(self) -> None:
        """One more job has its outcome; no effect when nobody waits any more."""
        if self.done.done():
            return
        self.unfinished -= 1
        if self.unfinished == 0:
            self.done.set_result(None)

    def fail(self, error: OutriderError) -> None:
        """No job will get an outcome any more."""
        if not self.done.done():
            self.done.set_exception(error)

    def results(self) -> list[target_pb2.VerifyResult]:
        """The answer, once every job has its outcome."""
        return [_rejection(entry) if isinstance(entry, Rejected) else result_message(entry) for entry in self.entries]


def _rejection(entry: Rejected) -> target_pb2.VerifyResult:
    return target_pb2.VerifyResult(
        session_id=entry.item.session_id, base_length=entry.item.base_length, status=to_status(entry.error)
    )
