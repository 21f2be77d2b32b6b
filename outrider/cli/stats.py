"""Statistics of a generation from its Round messages: raw counts add up, ratios are taken at the end."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.v1.draft_pb2 import Proposer
from outrider.v1.orchestrator_pb2 import PlainReason, Round

_MICROS = 1e-6


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None where there is no whole."""
    return part / whole if whole else None


@dataclass
class RunStats:
    """Counts of one or more generations.

    Attributes:
        tokens: delivered tokens.
        seconds: wall time of the calls, from the request to the last message.
        rounds, target_passes: as the rounds report them; a round without a message of its own is not counted.
        drafted, accepted: draft tokens that were verified, and those kept; dropped blocks count in neither.
        drafted_at, accepted_at: the same for each position in the block, the first being 0.
        rejections: rounds in which a draft token was rejected.
        draft_seconds: what waiting for blocks took.
        draft_forward_seconds: what the draft's passes took, waited for or not.
        verify_seconds: from handing over the block to its rows.
        verify_forward_seconds: what the target's passes took of that.
        accept_seconds, commit_seconds: from rows to outcome, and for the write to the session store.
        wire_bytes: serialised bytes of the draft and verify messages.
        plain: rounds without a block, by reason.
        made_by: blocks, by what made them.
        choices: why proposers were chosen, in the orchestrator's words.
    """

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    rejections: int = 0
    draft_seconds: float = 0.0
    draft_forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    verify_forward_seconds: float = 0.0
    accept_seconds: float = 0.0
    commit_seconds: float = 0.0
    wire_bytes: int = 0
    plain: "Counter[PlainReason.ValueType]" = field(default_factory=Counter)
    made_by: "Counter[Proposer.ValueType]" = field(default_factory=Counter)
    choices: list[str] = field(default_factory=list)

    def add_round(self, round_: Round) -> None:
        """Counts one round."""
        self.rounds += 1
        self.target_passes += round_.target_passes
        self.drafted += round_.drafted
        self.accepted += round_.accepted
        self.drafted_at.update(range(round_.drafted))
        self.accepted_at.update(range(round_.accepted))
        self.rejections += round_.accepted < round_.drafted
        self.draft_seconds += round_.draft_wait_micros * _MICROS
        self.draft_forward_seconds += round_.draft_forward_micros * _MICROS
        self.verify_seconds += round_.verify_micros * _MICROS
        self.verify_forward_seconds += round_.verify_forward_micros * _MICROS
        self.accept_seconds += round_.accept_micros * _MICROS
        self.commit_seconds += round_.commit_micros * _MICROS
        self.wire_bytes += round_.wire_bytes
        if round_.drafted and round_.proposer:
            self.made_by[round_.proposer] += 1
        if round_.proposer_choice:
            self.choices.append(round_.proposer_choice)
        if round_.plain_reason:
            self.plain[round_.plain_reason] += 1

    @property
    def tokens_per_second(self) -> float | None:
        """Delivered tokens over wall time, the prompt's time included."""
        return ratio(self.tokens, self.seconds)

    @property
    def tokens_per_pass(self) -> float | None:
        """Delivered tokens for each forward pass of the target."""
        return ratio(self.tokens, self.target_passes)

    @property
    def acceptance(self) -> float | None:
        """Share of the verified draft tokens that were kept."""
        return ratio(self.accepted, self.drafted)

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position, the share of the blocks reaching it that were kept up to and including it."""
        return [self.accepted_at[index] / count for index, count in sorted(self.drafted_at.items())]

    @property
    def bytes_per_token(self) -> float | None:
        """Wire bytes for each delivered token."""
        return ratio(self.wire_bytes, self.tokens)

    @property
    def draft_ms(self) -> float | None:
        """Milliseconds of waiting for the draft, for each round."""
        return ratio(self.draft_seconds * 1e3, self.rounds)

    @property
    def verify_ms(self) -> float | None:
        """Milliseconds of verifying, for each round."""
        return ratio(self.verify_seconds * 1e3, self.rounds)


def total(parts: Iterable[RunStats]) -> RunStats:
    """The sum of several."""
    whole = RunStats()
    for part in parts:
        for name, value in vars(part).items():
            setattr(whole, name, getattr(whole, name) + value)
    return whole
