"""What one round cost and gave; becomes the Round message."""

import time
from dataclasses import dataclass, field

from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import PlainReason, Round


def micros_since(start: float) -> int:
    """Microseconds since a time.perf_counter() value."""
    return int((time.perf_counter() - start) * 1e6)


@dataclass(slots=True)
class Moments:
    """When the parts of a round began, in time.perf_counter()'s seconds; 0 for what did not. For its spans.

    Attributes:
        queued, sent: when the item of the last attempt began to wait for a call, and when that left.
        lookahead: tokens that were asked for.
        failures: (when, reason, worker) of attempts at verifying that came to nothing.
    """

    draft_wait: float = 0.0
    verify: float = 0.0
    queued: float = 0.0
    sent: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    lookahead: int = 0
    failures: tuple[tuple[float, str, str], ...] = ()


@dataclass
class RoundStats:
    """Raw counters of one round; ratios are the reader's work. Fields as in the Round message, but for `moments`."""

    base_length: int
    drafted: int = 0
    accepted: int = 0
    plain_reason: "PlainReason.ValueType" = orchestrator_pb2.PLAIN_REASON_UNSPECIFIED
    draft_wait_micros: int = 0
    draft_forward_micros: int = 0
    verify_micros: int = 0
    verify_forward_micros: int = 0
    accept_micros: int = 0
    commit_micros: int = 0
    wire_bytes: int = 0
    target_passes: int = 0
    drafted_ahead: int = 0
    block_ready: bool = False
    verify_queue_micros: int = 0
    moments: Moments = field(default_factory=Moments)

    def message(self) -> Round:
        """The wire's view."""
        fields = vars(self).copy()
        del fields["moments"]
        return Round(**fields)
