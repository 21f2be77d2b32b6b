"""What rounds cost, as measured: the pass of a target worker, the wait for a draft worker. Times in seconds."""

from dataclasses import dataclass

from orchestrator.fit import LinearFit
from orchestrator.stats import RoundStats
from outrider.v1.orchestrator_pb2 import PLAIN_REASON_DRAFT_PREFILL
from outrider.v1.target_pb2 import VerifyTiming

# Positions of a pass with a block of the longest kind; what computes more has a prompt in it.
_DECODE = 65
# Rounds of every session after which a mean forgets.
_ROUNDS = 8.0
# Seconds; a fit of few passes must not come to nothing.
_SHORTEST_PASS = 1e-5
_SHORTEST_GAP = 1e-5
# A round that takes so many times as long as others was stalled, unless the next one does as well.
_STALLED = 8.0
# Blocks after which the share that was drafted ahead forgets; and what it is no less than, where it is hoped for.
_BLOCKS, _RARE = 64.0, 0.01
# Blocks of many sessions tell much the same: one in (1 + sessions / so many) is fitted.
_BLOCKS_PER_FIT = 8
# So many passes at most are thought of as taking turns.
_TURNS = 8


@dataclass(frozen=True)
class RoundCost:
    """One round of one session.

    Attributes:
        seconds: since the round before was decided.
        draft_wait: of it, waiting for the block.
        queue: of it, waiting for the passes of others, here and at the target.
        passes: of it, the target's passes that held the session.
        tokens: that it gave.
        drafted: tokens of its block; 0 without one.
        reach: how many of them could have been kept at most.
        catching_up: whether it had none because the draft was reading what was committed before.
    """

    seconds: float
    draft_wait: float
    queue: float
    passes: float
    tokens: int
    drafted: int = 0
    reach: int = 0
    catching_up: bool = False

    @property
    def block(self) -> bool:
        """Whether it had one."""
        return self.drafted > 0


@dataclass(frozen=True)
class Wait:
    """What rounds are expected to wait for their blocks.

    Attributes:
        missed: for one that nothing was ahead of.
        ahead: the share that was drafted ahead.
        late: how long the rest of those takes.
    """

    missed: float
    ahead: float = 0.0
    late: float = 0.0

    @property
    def mean(self) -> float:
        """Of all."""
        return (1.0 - self.ahead) * self.missed + self.ahead * self.late


def round_cost(stats: RoundStats, since: float, tokens: int) -> RoundCost:
    """The cost of a round that was decided `since` seconds after the one before and gave so many tokens.

    Between rounds the store writes and a client reads what it was sent; one that takes its time is not the workers'
    affair.
    """
    micros = stats.draft_wait_micros + stats.verify_micros + stats.accept_micros
    passes = stats.verify_forward_micros * 1e-6
    between = min(max(0.0, since - micros * 1e-6), passes)
    wait, queue = stats.draft_wait_micros * 1e-6, stats.verify_queue_micros * 1e-6
    catching_up = stats.plain_reason == PLAIN_REASON_DRAFT_PREFILL
    seconds, reach = micros * 1e-6 + between, stats.longest_path
    return RoundCost(seconds, wait, queue, passes, tokens, stats.drafted, reach, catching_up)


class Mean:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0.0

    def observe(self, value: float, memory: float) -> None:
        """One more value, weighing 1/memory once there are enough."""
        self._count = min(self._count + 1.0, memory)
        self.value += (value - self.value) / self._count

    @property
    def known(self) -> bool:
        """Whether there was one."""
        return self._count > 0.0


class TargetCosts:
    """One target worker, as the rounds of all sessions bound to it see it.

    A pass is fitted as a + b·items + c·positions, and d more where it holds blocks: a draft on the same machine takes
    of its caches and cores. What a round takes besides is not the same with a block either. The Pace of departures
    to the worker.

    Attributes:
        sessions: bound to the worker.
        plain_passes: passes without a block, after another one without, so far.
    """

    def __init__(self) -> None:
        # What items and positions cannot be told apart by goes to the positions, and what is constant to a.
        self._pass = LinearFit((1.0, 512.0, 32.0, 8.0))
        self._last: tuple[int, int, int] = (0, 0, 0)
        self._blocks = False
        self._lookahead, self._seconds, self._tokens, self._passes = (Mean() for _ in range(4))
        # Without a block, and with one.
        self._rests = (Mean(), Mean())
        self._gap, self._gap_error, self._straggling = (Mean() for _ in range(3))
        self._stalled = False
        self.sessions = 1
        self.plain_passes = 0

    def observe_pass(self, timing: VerifyTiming, sessions: int) -> None:
        """An item's pass, while so many sessions are bound to the worker. Other items of the pass tell the same."""
        seen = (timing.batch_items, timing.batch_positions, timing.forward_micros)
        if timing.passes != 1 or not timing.batch_items or timing.computed_tokens > _DECODE or seen == self._last:
            return
        self._last, self.sessions = seen, max(1, sessions)
        blocks, before = timing.batch_positions > timing.batch_items, self._blocks
        self._blocks = blocks
        # After one with blocks the draft may be at work ahead still.
        if blocks or not before:
            self.plain_passes += not blocks
            self._pass.observe((1.0, timing.batch_items, timing.batch_positions, blocks), seen[2] * 1e-6)
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
        rest = max(0.0, cost.seconds - cost.passes - cost.draft_wait - cost.queue)
        self._rests[cost.block].observe(rest, memory)

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
    def plain_seconds(self) -> float:
        """A pass over all sessions without blocks."""
        return self.pass_seconds(self.sessions, 0.0)

    @property
    def position_seconds(self) -> float:
        """What one more position adds to a pass."""
        return max(0.0, self._pass.coefficients[2])

    def block_seconds(self, lookahead: int) -> float:
        """What one block in it adds to a pass of plain rounds."""
        return max(0.0, self._pass.coefficients[3]) + lookahead * self.position_seconds

    def pass_seconds(self, items: float, lookahead: float, came: float = 1.0) -> float:
        """A pass over so many blocks of this length, of whose tokens this share is there."""
        first, item, position, blocks = self._pass.coefficients
        first += came * blocks if lookahead else 0.0
        return max(_SHORTEST_PASS, first + items * (max(0.0, item) + max(0.0, position) * (1.0 + came * lookahead)))

    def rest_seconds(self, lookahead: float, came: float = 1.0) -> float:
        """What a round in a pass with all others takes beside waiting for its block."""
        return self.pass_seconds(self.sessions, lookahead, came) + self._rest(lookahead, came)

    def cycle(self, wait: Wait, lookahead: float, came: float = 1.0) -> float:
        """Seconds of a round when every session waits so for a block of this length, of which this share comes.

        All go on together, and the next pass begins when the last is back; or they take turns, and passes of others
        run while one is between two of its own; then the worker may still wait for those whose block was drafted ahead.
        """
        rest, n = self._rest(lookahead, came), self.sessions
        best = self.pass_seconds(n, lookahead, came) + (rest + wait.mean) * max(1.0, self._straggling.value)
        for turns in range(2, 1 + min(n, _TURNS)):
            apart = self.pass_seconds(n / turns, lookahead, came)
            joined = self.pass_seconds(n / (wait.ahead + (1.0 - wait.ahead) * turns), lookahead, came) + rest
            missed = max(joined + wait.missed, turns * joined)
            best = min(
                best,
                max(apart + rest + wait.missed, turns * apart),
                wait.ahead * joined + (1.0 - wait.ahead) * missed,
            )
        return best

    def _rest(self, lookahead: float, came: float) -> float:
        """Where one kind of round was never seen, it is believed to be like the other."""
        plain, block = self._rests
        if not (plain.known and block.known):
            return block.value if block.known else plain.value
        share = came if lookahead else 0.0
        return (1.0 - share) * plain.value + share * block.value

    def call_seconds(self, items: int) -> float:
        """See Pace."""
        return self.pass_seconds(items, self._lookahead.value) if self.known else 0.0

    def gap_seconds(self) -> float:
        """See Pace; and what it is usually wrong by, so that few are late."""
        return self._gap.value + self._gap_error.value

    def observe_gap(self, mean: float, last: float) -> None:
        """See Pace."""
        if self._gap.value:
            self._gap_error.observe(abs(last - self._gap.value), _ROUNDS)
        self._gap.observe(last, _ROUNDS)
        self._straggling.observe(last / max(mean, _SHORTEST_GAP), _ROUNDS)


class DraftCosts:
    """One kind of proposer of one draft worker.

    A block of k tokens that nothing was ahead of, while s other sessions are given blocks, is waited for
    a + (b + c·s)·k seconds: a fit. One that was drafted ahead had the round before to be made in.

    Attributes:
        speculating: sessions of this orchestrator that are given blocks at present.
        asked: blocks measured.
    """

    def __init__(self) -> None:
        self._came = Mean()
        # A wait is made of steps: what lengths do not tell apart is not constant.
        self._wait = LinearFit((4.0, 4.0, 64.0), memory=64.0)
        self._ahead, self._reach = Mean(), Mean()
        self.speculating = self.asked = 0

    @property
    def young(self) -> bool:
        """Whether too little was measured to tell short blocks from long ones."""
        return self.asked < 8

    @property
    def came(self) -> float:
        """The share of the tokens asked for that there are. Copies come where there is something to copy, and cost no
        position elsewhere."""
        return self._came.value if self._came.known else 1.0

    def observe(
        self, lookahead: int, others: int, wait: float, reach: float, *, ahead: bool, came: float = 1.0
    ) -> None:
        """A round waited so long for its block, which had been drafted ahead or not. `reach`: how often a block is
        accepted whole, and the token after it guessed; `came`: the share of it that there was."""
        self.asked += 1
        self._came.observe(came, _BLOCKS)
        self._ahead.observe(float(ahead), _BLOCKS)
        self._reach.observe(reach, _BLOCKS)
        if not ahead and (self.young or self.asked % (1 + others // _BLOCKS_PER_FIT) == 0):
            self._wait.observe((1.0, lookahead, lookahead * others), wait)

    def wait(self, lookahead: int, others: int, reach: float, rest: float) -> Wait:
        """How long a round would wait for a block; `rest`: what it takes beside that."""
        if not lookahead:
            return Wait(0.0)
        ahead = reach * min(1.0, self._ahead.value / max(self._reach.value, _RARE))
        late = max(0.0, self._missed(lookahead + 1, others) - rest)
        return Wait(self._missed(lookahead, others), ahead, late)

    def _missed(self, lookahead: int, others: int) -> float:
        first, step, shared = self._wait.coefficients
        return max(0.0, first + (step + shared * others) * lookahead)
