"""Arithmetic of pool sizes: what acceptance, draft, target and network give, and how many of each that takes.

The model of a round is that of docs/performance.md (Lookahead control), with numbers that are given instead of measured
while it runs. Times in seconds.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# So many passes at most are thought of as taking turns.
_TURNS = 8
# By which part sharing a draft worker may slow its sessions down.
_SHARING = 0.1


@dataclass(frozen=True)
class Curve:
    """A time by an amount: linear between points, along the last line beyond them, constant before the first.

    Attributes:
        points: (amount, seconds), amounts rising; at least one.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        times = [seconds for _, seconds in self.points]
        if not amounts or sorted(set(amounts)) != amounts or not 0 <= amounts[0] <= amounts[-1] < math.inf:
            raise ValueError("a curve needs points of rising amounts that are not negative")
        # NaN is not in order, whatever it is compared with.
        if not all(0 <= one <= later < math.inf for one, later in zip(times, [*times[1:], times[-1]], strict=True)):
            raise ValueError("a curve needs times that are not negative and do not fall with the amount")

    def __call__(self, amount: float) -> float:
        """Seconds."""
        if amount <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        following = min(bisect_left(self.points, (amount,)), len(self.points) - 1)
        (left, low), (right, high) = self.points[following - 1 : following + 1]
        return low + (high - low) * (amount - left) / (right - left)


@dataclass(frozen=True)
class Costs:
    """What rounds are made of.

    Attributes:
        kept: chance that a block's first 1, 2, ... tokens are all kept.
        target_pass: by positions in it.
        draft_step: one token for each session of a draft worker, by sessions.
        rest: of a round beside the two: network, acceptance, services.
        ahead: share of the blocks that are there when their round begins, having been drafted ahead.
    """

    kept: tuple[float, ...]
    target_pass: Curve
    draft_step: Curve
    rest: float = 0.0
    ahead: float = 0.0

    def __post_init__(self) -> None:
        if not self.target_pass(1):
            raise ValueError("a target pass over one position takes some time")
        if not 0 <= self.rest < math.inf:
            raise ValueError("the rest of a round takes a time that is finite and not negative")


@dataclass(frozen=True)
class Point:
    """A target with so many sessions.

    Attributes:
        lookahead: the best; 0 where speculation does not pay.
        tokens: expected of a round, for a pass of the target.
        round: seconds.
        plain_round: seconds of one without a block.
        draft_sessions: that share a draft worker; 0 without one.
    """

    sessions: int
    lookahead: int
    tokens: float
    round: float
    plain_round: float
    draft_sessions: int

    @property
    def speed(self) -> float:
        """Tokens a second of one session."""
        return self.tokens / self.round

    @property
    def speed_up(self) -> float:
        """Over plain decoding of as many sessions."""
        return self.speed * self.plain_round


def kept_evenly(rate: float, longest: int) -> tuple[float, ...]:
    """`kept` where every draft token is kept with the same probability."""
    return tuple(rate**position for position in range(1, longest + 1))


def continued(kept: Sequence[float], longest: int) -> tuple[float, ...]:
    """`kept` for longer blocks: further positions are kept as often as the last one was, given those before it."""
    last = kept[-1] / (kept[-2] if len(kept) > 1 else 1.0) if kept and kept[-1] else 0.0
    more = [kept[-1] * last**position for position in range(1, longest - len(kept) + 1)] if kept else []
    return (*kept, *more)[:longest]


def expected_tokens(kept: Sequence[float], lookahead: int) -> float:
    """Of a round: the kept draft tokens, and one."""
    return 1.0 + sum(kept[:lookahead])


def round_seconds(costs: Costs, sessions: int, lookahead: int, draft_sessions: int) -> float:
    """A round of one of the sessions: all in one pass, or in turns that hide what is no pass; whichever is shorter."""
    between = costs.rest
    if lookahead:
        between += (1.0 - costs.ahead) * lookahead * costs.draft_step(draft_sessions)
    passes = [costs.target_pass(sessions / turns * (1 + lookahead)) for turns in range(1, min(sessions, _TURNS) + 1)]
    return min(max(one + between, turns * one) for turns, one in enumerate(passes, 1))


def at(costs: Costs, sessions: int, most_shared: int) -> Point:
    """The best lookahead for so many sessions on a target, at most `most_shared` of which share a draft worker."""

    def speed(lookahead: int, shared: int) -> float:
        return expected_tokens(costs.kept, lookahead) / round_seconds(costs, sessions, lookahead, shared)

    def shared(lookahead: int) -> int:
        least = (1.0 - _SHARING) * speed(lookahead, 1)
        return max(count for count in range(1, most_shared + 1) if speed(lookahead, count) >= least)

    best = max(range(len(costs.kept) + 1), key=lambda lookahead: speed(lookahead, 1))
    draft_sessions = shared(best) if best else 0
    if best and speed(best, draft_sessions) <= speed(0, 0):
        best, draft_sessions = 0, 0
    return Point(
        sessions,
        best,
        expected_tokens(costs.kept, best),
        round_seconds(costs, sessions, best, draft_sessions),
        round_seconds(costs, sessions, 0, 0),
        draft_sessions,
    )


@dataclass(frozen=True)
class Pools:
    """How many of each.

    Attributes:
        full: a target with as many sessions as it carries.
        sessions: on all targets.
    """

    full: Point
    sessions: int
    targets: int
    drafts: int

    @property
    def tokens_per_second(self) -> float:
        """Of all sessions; slower when the last target is fuller than it need be."""
        return self.sessions * self.full.speed


def carried(costs: Costs, least_speed: float, most: int) -> Point | None:
    """A target with the most sessions that still have that speed, up to `most`; None when one alone has not."""
    # Powers of two and the numbers between the last that is fast enough and the next: speed falls with sessions.
    low, high = 0, 1
    while high <= most and at(costs, high, most).speed >= least_speed:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(costs, middle, most).speed >= least_speed else (low, middle)
    return at(costs, low, most) if low else None


def pools(full: Point, *, sessions: int = 0, tokens_per_second: float = 0.0) -> Pools:
    """For so many sessions, or for as many as give those tokens a second."""
    wanted = max(sessions, math.ceil(tokens_per_second / full.speed))
    drafts = math.ceil(wanted / full.draft_sessions) if full.draft_sessions else 0
    return Pools(full, wanted, math.ceil(wanted / full.sessions), drafts)
