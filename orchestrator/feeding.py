"""The target's features of one session on their way to the draft worker that is fed with them."""

from dataclasses import dataclass

import numpy as np
import torch

from orchestrator.acceptance.outcome import Outcome
from outrider.lm.features import FeatureWindow, Feeding
from outrider.net.arrays import ArrayError, features_from_message, features_message
from outrider.v1.target_pb2 import VerifyResult
from outrider.v1.types_pb2 import Features

# (position of the first, [n, width] bfloat16)
States = tuple[int, torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    """What a Verify is asked for.

    Attributes:
        feeding: of the proposer.
        start: position of the first token whose features are wanted.
    """

    feeding: Feeding
    start: int


def features_of(result: VerifyResult, wanted: Wanted | None) -> States | None:
    """What a Verify brought of what was wanted. Raises ArrayError where that is something else."""
    if wanted is None:
        return None
    if not result.HasField("features") or result.features.start != wanted.start:
        raise ArrayError(f"features from position {result.features.start}, asked for those from {wanted.start}")
    return wanted.start, features_from_message(result.features, wanted.feeding.width)


def committed(features: States | None, base_length: int, outcome: Outcome) -> States | None:
    """Those of the tokens that a round at this base length has committed but for the last one, which the target has not
    seen; None where they did not come."""
    if features is None:
        return None
    start, states = features
    kept = np.concatenate([np.arange(base_length - start), base_length - start + outcome.rows[1:] - 1])
    return (start, states[torch.from_numpy(kept)]) if kept[-1] < len(states) else None


class FeatureFeed:
    """What of the features was seen, and what of it the worker has.

    Attributes:
        starved: the target does not bring what is wanted.
    """

    def __init__(self) -> None:
        self._feeding: Feeding | None = None
        self._window = FeatureWindow(1)
        self._sent = 0
        self._asleep = self._waits = self.starved = False

    def bind(self, feeding: Feeding | None) -> None:
        """Another worker, which wants these."""
        if feeding != self._feeding:
            self._feeding, self._window = feeding, FeatureWindow(feeding.window if feeding is not None else 1)
        self._asleep = False

    def asleep(self) -> None:
        """No block is wanted at present, and no feature either."""
        self._asleep = True

    def wanted(self, base_length: int) -> Wanted | None:
        """What the next Verify is to bring; where some are missing, computed again as far back as the worker looks."""
        if self._feeding is None or self._asleep:
            return None
        self._waits = True
        # What is known already is not computed again.
        known = self._window.end if len(self._window.states) and self._window.end < base_length else 0
        return Wanted(self._feeding, max(known, base_length - self._feeding.window, 0))

    def take(self, states: States | None) -> None:
        """Those of the tokens that were committed in a round; None where the target has brought none."""
        self.starved, self._waits = self._waits and states is None, False
        if self._feeding is not None and states is not None:
            self._window.take(*states)

    def complete(self, base_length: int) -> bool:
        """Whether a block can be asked for: there is nothing to be fed with, or all of it is there."""
        self._asleep = False
        return self._feeding is None or (self._window.end == base_length - 1 and len(self._window.states) > 0)

    def untold(self) -> None:
        """The worker begins anew, without any."""
        self._sent = 0

    def told(self) -> None:
        """The worker has taken the message."""
        self._sent = self._window.end

    def message(self) -> Features | None:
        """What the worker lacks."""
        if self._feeding is None:
            return None
        start, states = self._window.after(self._sent)
        return features_message(states, start)
