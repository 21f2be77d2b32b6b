"""Target, draft and many sessions in virtual time: what the lookahead control does, without a clock and its noise.

The target takes everything that waits into its next pass; the draft moves all its chains on by one token a step; the
orchestrator works on one thing at a time.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from orchestrator.costs import RoundCost, TargetCosts
from orchestrator.lookahead import DraftHistory, SessionLookahead
from outrider.v1.target_pb2 import VerifyTiming


@dataclass(frozen=True)
class Scene:
    """Latencies in seconds, and how often a draft token is right."""

    clients: int
    acceptance: float
    target_pass: float = 0.040
    target_position: float = 0.0002
    target_item: float = 0.0
    draft_pass: float = 0.004
    draft_item: float = 0.00005
    network: float = 0.0005
    python: float = 0.0004


@dataclass
class SimSession:
    number: int
    lookahead: SessionLookahead | None
    fixed: int
    asked: int = 0
    committed_at: float = 0.0
    ready_at: float = 0.0
    queued: float = 0.0
    steps: int = 0
    tokens: int = 0
    rounds: int = 0


@dataclass
class Pool:
    """Runs sessions; a fixed lookahead, or the control with longest blocks of 16."""

    scene: Scene
    fixed: int | None = None
    seed: int = 1
    longest: int = 16
    now: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    target: TargetCosts = field(default_factory=TargetCosts)
    draft: DraftHistory = field(default_factory=DraftHistory)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._waiting: list[SimSession] = []
        self._chains: list[SimSession] = []
        self._in_pass = self._in_step = False
        self._expected: set[int] = set()
        self._held_until = 0.0
        self._python_free = 0.0
        self.sessions = [
            SimSession(
                number,
                None if self.fixed is not None else SessionLookahead(self.longest, lambda: self.target),
                self.fixed or 0,
            )
            for number in range(self.scene.clients)
        ]
        for session in self.sessions:
            self._at(self._dice.random() * 0.01, lambda session=session: self._to_target(session))  # type: ignore[misc]

    def run(self, seconds: float) -> float:
        """Runs so long; the tokens a second meanwhile."""
        before, end = self.tokens, self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = end
        return (self.tokens - before) / seconds

    @property
    def tokens(self) -> int:
        return sum(session.tokens for session in self.sessions)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self.now + seconds, action)

    def _python(self, action: Callable[[], None]) -> None:
        """Work of the orchestrator's one thread."""
        self._python_free = max(self.now, self._python_free) + self.scene.python
        self._at(self._python_free, action)

    # The target.

    def _to_target(self, session: SimSession) -> None:
        session.ready_at = self.now

        def arrive() -> None:
            session.queued = -self.now
            self._waiting.append(session)
            self._begin_pass()

        self._later(self.scene.network, arrive)

    def _begin_pass(self) -> None:
        if self._in_pass or not self._waiting:
            return
        held = self._expected - {session.number for session in self._waiting}
        if held and self.now < self._held_until:
            return
        batch, self._waiting, self._in_pass = self._waiting, [], True
        for session in batch:
            session.queued += self.now
        scene, positions = self.scene, sum(session.asked + 1 for session in batch)
        seconds = scene.target_pass + scene.target_item * len(batch) + scene.target_position * positions

        def end() -> None:
            self._in_pass = False
            hold = self.target.hold()
            self._expected, self._held_until = {session.number for session in batch} if hold else set(), self.now + hold
            self._at(self._held_until, self._begin_pass)
            timing = VerifyTiming(
                passes=1, batch_items=len(batch), batch_positions=positions, forward_micros=int(seconds * 1e6)
            )
            self.target.observe_pass(timing, scene.clients)
            for session in batch:
                self._later(scene.network, lambda session=session: self._python(lambda: self._commit(session, seconds)))  # type: ignore[misc]
            self._begin_pass()

        self._later(seconds, end)

    def _commit(self, session: SimSession, in_pass: float) -> None:
        accepted = 0
        while accepted < session.asked and self._dice.random() < self.acceptance(session):
            accepted += 1
        session.tokens += accepted + 1
        session.rounds += 1
        start = session.committed_at
        session.committed_at = self.now
        cost = RoundCost(
            self.now - start,
            draft_wait=session.ready_at - start if session.asked else 0.0,
            queue=session.queued,
            passes=in_pass,
            tokens=accepted + 1,
        )
        if session.rounds > 1:
            if session.lookahead is None:
                self.target.observe_round(cost)
            else:
                session.lookahead.learn(cost, accepted)
        session.asked = session.fixed
        if session.lookahead is not None:
            session.asked = session.lookahead.choose(self.draft, 1000)
            if session.lookahead.alone or session.lookahead.probing:
                self._expected.discard(session.number)
        probing = session.lookahead is not None and session.lookahead.probing
        self.kinds["plain" if not session.asked else "probe" if probing else "block"] += 1
        if session.asked:
            self._later(self.scene.network, lambda: self._to_draft(session))
        else:
            self._to_target(session)

    def acceptance(self, session: SimSession) -> float:
        return self.scene.acceptance

    # The draft.

    def _to_draft(self, session: SimSession) -> None:
        session.steps = session.asked
        self._chains.append(session)
        self._begin_step()

    def _begin_step(self) -> None:
        if self._in_step or not self._chains:
            return
        self._in_step = True
        batch = list(self._chains)

        def end() -> None:
            self._in_step = False
            for session in batch:
                session.steps -= 1
                if not session.steps:
                    self._chains.remove(session)
                    self._later(self.scene.network, lambda session=session: self._to_target(session))  # type: ignore[misc]
            self._begin_step()

        self._later(self.scene.draft_pass + self.scene.draft_item * len(batch), end)
