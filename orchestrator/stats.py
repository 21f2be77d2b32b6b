"""What one round cost and gave; becomes the Round message."""

import time
from dataclasses import dataclass
from typing import Literal

from outrider.v1 import draft_pb2, orchestrator_pb2
from outrider.v1.draft_pb2 import Proposer, Translation
from outrider.v1.orchestrator_pb2 import PlainReason, Round

# What a round waits for, in its order.
Part = Literal["draft wait", "verify", "accept", "commit"]

_TOLD = tuple(Round.DESCRIPTOR.fields_by_name)


def micros_since(start: float) -> int:
    """Microseconds since a time.perf_counter() value."""
    return int((time.perf_counter() - start) * 1e6)


@dataclass
class RoundStats:
    """Raw counters of one round; ratios are the reader's work. Fields as in the Round message, but for `asked`.

    The methods tell it how the round goes on. It keeps nothing of that; the statistics of a traced round do.

    Attributes:
        asked: tokens that its block was to have.
    """

    base_length: int
    asked: int = 0
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
    tree_depth: int = 0
    proposer: "Proposer.ValueType" = draft_pb2.PROPOSER_UNSPECIFIED
    proposer_choice: str = ""
    translation: "Translation.ValueType" = draft_pb2.TRANSLATION_UNSPECIFIED

    def begins(self, part: Part) -> float:
        """A part of the round begins: when, in time.perf_counter()'s seconds."""
        return time.perf_counter()

    def queued(self, moment: float) -> None:
        """Its item waits for a call from this moment on; again with each attempt at verifying."""

    def left(self, moment: float) -> None:
        """The call with its item left."""

    def attempt_failed(self, reason: str, worker: str) -> None:
        """An attempt at verifying came to nothing."""

    @property
    def longest_path(self) -> int:
        """Draft tokens that the round could have kept at most."""
        return self.tree_depth or self.drafted

    def message(self) -> Round:
        """The wire's view."""
        fields = vars(self)
        return Round(**{name: fields[name] for name in _TOLD})
