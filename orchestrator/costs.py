"""What rounds cost, as measured: the pass of a target worker, the wait for a draft worker. Times in seconds."""

import math
from dataclasses import dataclass

from orchestrator.fit import LinearFit
from orchestrator.stats import RoundStats
from outrider.v1.target_pb2 import VerifyTiming

# Positions of a pass with a block of the longest kind; what computes more has a prompt in it.
_DECODE = 65
# Rounds of every session after which a mean forgets.
_ROUNDS = 8.0
# A call is held for at most this part of a pass longer than sessions need on average.
_PATIENCE = 0.25
# To hold or not changes only when that is better by this factor.
_STEADY = 1.05
# Seconds; a fit of few passes must not come to nothing.
_SHORTEST_PASS = 1e-5
# A round that takes so many times as long as others was stalled, unless the next one does as well.
_STALLED = 8.0
# Blocks of many sessions tell much the same: one in (1 + sessions / so many) is fitted.
_BLOCKS_PER_FIT = 8
# Parts by which the time between two passes of a session varies.
_JITTER = 0.3


@dataclass(frozen=True)
class RoundCost:
    """One round of one session.

    Attributes:
        seconds: since the round before was decided.
        draft_wait: of it, waiting for the block.
        queue: of it, waiting for the passes of others, here and at the target.
        passes: of it, the target's passes that held the session.
        tokens: that it gave.
    """

    seconds: float
    draft_wait: float
    queue: float
    passes: float
    tokens: int


def round_cost(stats: RoundStats, since: float, tokens: int) -> RoundCost:
    """The cost of a round that was decided `since` seconds after the one before and gave so many tokens.

    Between rounds the store writes and a client reads what it was sent; one that takes its time is not the workers'
    affair.
    """
    micros = stats.draft_wait_micros + stats.verify_micros + stats.accept_micros
    passes = stats.verify_forward_micros * 1e-6
    between = min(max(0.0, since - micros * 1e-6), passes)
    return RoundCost(
        micros * 1e-6 + between, stats.draft_wait_micros * 1e-6, stats.verify_queue_micros * 1e-6, passes, tokens
    )


class Mean:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0.0

    def observe(self, value: float, memory: float) -> None:
        """One more value, weighing 1/memory once there are enough."""
        self._count = min(self._count + 1.0, memory)
        self.value += (value - self.value) / self._count


class TargetCosts:
    """One target worker, as the rounds of all sessions bound to it see it.

    A pass is fitted as a + b·items + c·positions.

    Attributes:
        sessions: bound to the worker.
    """

    def __init__(self) -> None:
        # What items and positions cannot be told apart by goes to the positions, and what is constant to a.
        self._pass = LinearFit((1.0, 512.0, 32.0))
        self._last: tuple[int, int, int] = (0, 0, 0)
        self._lookahead, self._seconds, self._tokens, self._passes, self._wait, self._rest = (Mean() for _ in range(6))
        self._holding = True
        self._stalled = False
        self.sessions = 1

    def observe_pass(self, timing: VerifyTiming, sessions: int) -> None:
        """An item's pass, while so many sessions are bound to the worker. Other items of the pass tell the same."""
        seen = (timing.batch_items, timing.batch_positions, timing.forward_micros)
        if timing.passes != 1 or timing.computed_tokens > _DECODE or seen == self._last:
            return
        self._last, self.sessions = seen, max(1, sessions)
        self._pass.observe((1.0, timing.batch_items, timing.batch_positions), seen[2] * 1e-6)
        self._lookahead.observe(timing.batch_positions / timing.batch_items - 1.0, _ROUNDS)

    def observe_round(self, cost: RoundCost) -> None:
        """A round of one of the sessions; one that was held up by something else is not like those to come."""
        stalled = self.known and cost.seconds > _STALLED * self._seconds.value and not self._stalled
        self._stalled = stalled
        if stalled:
            return
        memory = _ROUNDS * self.sessions
        self._seconds.observe(cost.seconds, memory)
        self._tokens.observe(cost.tokens, memory)
        self._passes.observe(cost.passes, memory)
        self._wait.observe(cost.draft_wait, memory)
        self._rest.observe(max(0.0, cost.seconds - cost.passes - cost.draft_wait - cost.queue), memory)

    @property
    def known(self) -> bool:
        """Whether there was a round."""
        return self._seconds.value > 0.0 and self._passes.value > 0.0

    @property
    def goodput(self) -> float:
        """Tokens in a second of one session; 0 before the first round."""
        return self._tokens.value / self._seconds.value if self._seconds.value else 0.0

    @property
    def round_seconds(self) -> float:
        """Of one session."""
        return self._seconds.value

    @property
    def position_seconds(self) -> float:
        """What one more position adds to a pass."""
        return max(0.0, self._pass.coefficients[2])

    @property
    def rest(self) -> float:
        """From the end of a session's pass until it is ready for the next one, when there is no block to wait for."""
        return self._rest.value

    def pass_seconds(self, items: float, lookahead: float) -> float:
        """A pass over so many blocks of this length."""
        first, item, position = self._pass.coefficients
        return max(_SHORTEST_PASS, first + items * (max(0.0, item) + max(0.0, position) * (1.0 + lookahead)))

    def cycle(self, wait: float, lookahead: float) -> float:
        """Seconds of a round when every session waits so long for a block of this length."""
        if self.sessions == 1:
            return self.pass_seconds(1.0, lookahead) + self.rest + wait
        return min(self._together(wait, lookahead), self.apart(wait, lookahead))

    def _together(self, wait: float, lookahead: float) -> float:
        """... and the worker waits for the last of them, which comes later than the mean by the mean."""
        return self.pass_seconds(self.sessions, lookahead) + 2.0 * self.rest + wait

    def apart(self, wait: float, lookahead: float) -> float:
        """... and the worker never waits: whoever comes while passes of others run waits for the next one to begin. A
        block that is there before then costs nothing, one that comes just after it a whole pass."""
        gap, others = self.rest + wait, 1.0
        for _ in range(2):
            each = self.pass_seconds(self.sessions / (1.0 + others), lookahead)
            others = min(_passes_begun(gap / each), self.sessions - 1.0)
        return each + max(gap, others * each)

    def hold(self) -> float:
        """How long a call is worth holding for sessions that are between two passes; 0 where they take too long."""
        if not self.known or self.sessions == 1:
            return 0.0
        wait, lookahead = self._wait.value, self._lookahead.value
        bias = _STEADY if self._holding else 1.0 / _STEADY
        self._holding = self._together(wait, lookahead) < bias * self.apart(wait, lookahead)
        if not self._holding:
            return 0.0
        gap = self.rest + wait
        return min(2.0 * gap, gap + _PATIENCE * self._passes.value)


def _passes_begun(gap: float) -> float:
    """How many passes of others have begun after a gap, in passes, that varies evenly by _JITTER; at least 1."""
    low, high = (max(gap, 0.01) * (1.0 + sign * _JITTER) for sign in (-1, 1))
    return (_ceiling_integral(high) - _ceiling_integral(low)) / (high - low)


def _ceiling_integral(end: float) -> float:
    whole = math.floor(end)
    return whole * (whole + 1) / 2 + (whole + 1) * (end - whole)


class DraftCosts:
    """One kind of proposer of one draft worker.

    The wait for a block of k tokens while s other sessions are given blocks is fitted as a + (b + c·s)·k.

    Attributes:
        speculating: sessions of this orchestrator that are given blocks at present.
    """

    def __init__(self) -> None:
        self._wait = LinearFit((1.0, 4.0, 64.0))
        self._blocks = 0
        self.speculating = 0

    @property
    def young(self) -> bool:
        """Whether too little was measured to tell short blocks from long ones."""
        return self._wait.count < 8

    @property
    def asked(self) -> int:
        """Blocks measured."""
        return self._wait.count

    def observe(self, lookahead: int, others: int, wait: float) -> None:
        """A round waited so long for its block."""
        self._blocks += 1
        if self.young or self._blocks % (1 + others // _BLOCKS_PER_FIT) == 0:
            self._wait.observe((1.0, lookahead, lookahead * others), wait)

    def wait(self, lookahead: int, others: int) -> float:
        """How long a round would wait for a block."""
        if not lookahead:
            return 0.0
        first, step, shared = self._wait.coefficients
        return max(0.0, first) + max(0.0, step + shared * others) * lookahead
