"""The output of one generation: which tokens of a round to keep, and the text that they add."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.text.detokenizer import Detokenizer
from orchestrator.text.stopping import Finish, StopRules
from outrider.law.sparse import Int32Array
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import TokenOrigin


class RoundToken(NamedTuple):
    """A token that a round made, in the order of the round."""

    id: int
    origin: "TokenOrigin.ValueType"


@dataclass(frozen=True)
class EmittedToken:
    """A committed token with the text that it adds."""

    id: int
    text: str
    origin: "TokenOrigin.ValueType"


@dataclass(frozen=True)
class Emission:
    """What to send to the client after a commit. No tokens at all while their text may begin a stop string."""

    tokens: tuple[EmittedToken, ...]
    finish: Finish | None


@dataclass(frozen=True)
class Kept:
    """The part of a round to commit. Made by `Output.keep`, spent by `Output.emit`.

    Attributes:
        tokens: [n] int32, n >= 1, up to and including the token that finishes the generation.
        finish: why the generation ends with these tokens, or None.
    """

    tokens: Int32Array
    finish: Finish | None


class Output:
    """One generation's output.

    Usage, once a round:
        kept = output.keep(tokens)                 # changes nothing: a failed commit can be repeated or dropped
        await store.commit(..., kept.tokens, ...)
        emission = output.emit(kept)               # what keep computed, word for word

    State depends on the committed tokens alone, not on how rounds cut them: `emit(keep(all))` on a new Output resumes.
    """

    def __init__(self, rules: StopRules, detokenizer: Detokenizer) -> None:
        raise NotImplementedError

    def keep(self, tokens: Sequence[RoundToken]) -> Kept:
        """Decides how much of a round becomes output. Raises ValueError on an empty round or after the end."""
        raise NotImplementedError

    def emit(self, kept: Kept) -> Emission:
        """The emission of tokens now committed. Raises ValueError unless `kept` is of the output's present state."""
        raise NotImplementedError

    @property
    def generated(self) -> int:
        """Number of generated tokens that were emitted or are held back: committed ones, once `emit` was called."""
        raise NotImplementedError

    def usage(self, rounds: int) -> orchestrator_pb2.Usage:
        """What was delivered so far, by origin."""
        raise NotImplementedError
