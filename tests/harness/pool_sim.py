"""Sessions, the lookahead control and the batcher as they are, over workers in virtual time: without a machine's noise.

The target takes all calls that wait into its next pass. The draft moves all its chains on by one token a step; while
none is asked for it drafts ahead, for the outcome that all is accepted. The orchestrator works on one thing at a time.
Whatever takes time varies.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator.batcher import Batcher
from orchestrator.costs import RoundCost, TargetCosts
from orchestrator.lookahead import DraftHistory, SessionLookahead
from outrider.v1.target_pb2 import VerifyItem, VerifyResponse, VerifyResult, VerifyTiming
from tests.harness.virtual_time import VirtualLoop

# As Scene.jitter.
PYTHON_JITTER = 0.3


@dataclass(frozen=True)
class Scene:
    """Latencies in seconds, and how often a draft token is right.

    Attributes:
        python: what a round takes of the orchestrator.
        overhead: of each pass and step, at the worker.
        jitter: by which part passes and steps take longer on average, exponentially.
        ahead: whether the draft drafts ahead.
        interference: what a pass takes longer when the draft worked since the one before.
    """

    clients: int
    acceptance: float
    target_pass: float = 0.025
    target_position: float = 0.0004
    target_item: float = 0.0
    draft_pass: float = 0.0025
    draft_item: float = 0.00005
    network: float = 0.0005
    python: float = 0.0005
    jitter: float = 0.02
    overhead: float = 0.0003
    ahead: bool = True
    interference: float = 0.0


class Worker:
    """One thing at a time."""

    def __init__(self, dice: random.Random, scene: Scene) -> None:
        self._dice, self._scene = dice, scene
        self._free = 0.0

    async def work(self, seconds: float) -> float:
        """Takes so long and somewhat longer, after what came before. Returns how long."""
        took = seconds * (1.0 + self._scene.jitter * self._dice.expovariate(1.0))
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + took
        await asyncio.sleep(self._free - now)
        return took


@dataclass
class Chain:
    """A block in the making.

    Attributes:
        wanted: how long the next one is to be.
        left: steps.
        ahead: whether it was begun before it was asked for.
    """

    tokens: int
    wanted: int
    left: int
    ahead: bool
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Draft:
    """The draft worker.

    Attributes:
        worked: whether it did since that was last asked.
    """

    def __init__(self, scene: Scene, dice: random.Random) -> None:
        self._scene, self._worker = scene, Worker(dice, scene)
        self._asked: dict[int, Chain] = {}
        self._ahead: dict[int, Chain] = {}
        self._wanted = asyncio.Event()
        self.worked = False

    def ask(self, session: int, tokens: int, *, hit: bool) -> Chain:
        """A block; on a hit what was drafted ahead, which may be shorter than what is asked for."""
        chain = self._ahead.pop(session, None)
        if not hit or chain is None or chain.left > chain.tokens:
            chain = Chain(tokens, tokens, tokens, ahead=False)
        chain.tokens, chain.wanted = min(chain.tokens, tokens), tokens
        self._go_on(session, chain)
        return chain

    def _go_on(self, session: int, chain: Chain) -> None:
        if chain.left > 0:
            self._asked[session] = chain
            self._wanted.set()
            return
        chain.done.set()
        if self._scene.ahead:
            self._ahead[session] = Chain(chain.wanted, chain.wanted, chain.wanted + 1, ahead=True)
            self._wanted.set()

    async def run(self) -> None:
        """Steps without end."""
        while True:
            chains = self._asked or {each: chain for each, chain in self._ahead.items() if chain.left > 0}
            if not chains:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            moved, self.worked = dict(chains), True
            await self._worker.work(self._scene.overhead + self._scene.draft_pass + self._scene.draft_item * len(moved))
            for session, chain in moved.items():
                chain.left -= 1
                if self._asked.get(session) is chain and chain.left <= 0:
                    del self._asked[session]
                    self._go_on(session, chain)


class Target:
    """The target worker."""

    def __init__(self, scene: Scene, dice: random.Random, draft: Draft) -> None:
        self._scene, self._worker, self._draft = scene, Worker(dice, scene), draft
        self._waiting: list[tuple[Sequence[VerifyItem], float, asyncio.Future[tuple[VerifyTiming, float]]]] = []
        self._came = asyncio.Event()

    async def verify(self, items: Sequence[VerifyItem], _within: float) -> VerifyResponse:
        """Once a pass has held the items."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._scene.network)
        future: asyncio.Future[tuple[VerifyTiming, float]] = loop.create_future()
        came = loop.time()
        self._waiting.append((items, came, future))
        self._came.set()
        timing, began = await future
        await asyncio.sleep(self._scene.network)
        results = []
        for item in items:
            result = VerifyResult(session_id=item.session_id, base_length=item.base_length, timing=timing)
            result.timing.queue_micros = int((began - came) * 1e6)
            results.append(result)
        return VerifyResponse(results=results)

    async def run(self) -> None:
        """Passes without end."""
        loop = asyncio.get_running_loop()
        while True:
            await self._came.wait()
            self._came.clear()
            calls, self._waiting = self._waiting, []
            items = [item for batch, _, _ in calls for item in batch]
            positions = sum(len(item.draft_tokens) // 4 + 1 for item in items)
            scene, began = self._scene, loop.time()
            seconds = scene.target_pass + scene.target_item * len(items) + scene.target_position * positions
            if self._draft.worked:
                seconds += scene.interference
                self._draft.worked = False
            took = await self._worker.work(scene.overhead + seconds)
            timing = VerifyTiming(
                passes=1, batch_items=len(items), batch_positions=positions, forward_micros=int(took * 1e6)
            )
            for _, _, future in calls:
                future.set_result((timing, began))


@dataclass
class SimSession:
    """One session.

    Attributes:
        asked: length of its next block.
        history: (time, tokens so far) after each round.
    """

    number: int
    lookahead: SessionLookahead
    luck: random.Random
    asked: int = 0
    tokens: int = 0
    history: list[tuple[float, int]] = field(default_factory=list)
    _draws: list[float] = field(default_factory=list)

    def draw(self, position: int) -> float:
        """Uniform in [0, 1): a draft token there is right when this is less than the acceptance."""
        while len(self._draws) <= position:
            self._draws.append(self.luck.random())
        return self._draws[position]

    def rate(self, first: int, last: int) -> float:
        """Tokens a second, from the round that brings the first of these tokens to the one that brings the last."""
        (start, before), (end, after) = (
            next(mark for mark in self.history if mark[1] >= each) for each in (first, last)
        )
        return (after - before) / (end - start)


@dataclass
class Pool:
    """Runs sessions with a fixed lookahead, or with the control.

    Attributes:
        seed: of what is random; where draft tokens are right does not depend on when they are asked for.
        longest: block of the control.
    """

    scene: Scene
    fixed: int | None = None
    seed: int = 1
    longest: int = 16
    kinds: Counter[str] = field(default_factory=Counter)
    target: TargetCosts = field(default_factory=TargetCosts)
    draft: DraftHistory = field(default_factory=DraftHistory)

    def __post_init__(self) -> None:
        self._dice, self._loop = random.Random(self.seed), VirtualLoop()
        self.sessions = [self._new_session(number) for number in range(self.scene.clients)]
        self._loop.run_until_complete(self._begin())

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._end())
        self._loop.close()

    def run(self, seconds: float) -> float:
        """Runs so long; the tokens a second meanwhile."""
        before = sum(session.tokens for session in self.sessions)
        self._loop.run_until_complete(asyncio.sleep(seconds))
        self._check()
        return (sum(session.tokens for session in self.sessions) - before) / seconds

    def rate(self, first: int, last: int) -> float:
        """Runs until every session has so many tokens; tokens a second, between those two of each session."""
        while min(session.tokens for session in self.sessions) < last:
            self._loop.run_until_complete(asyncio.sleep(0.1))
            self._check()
        return sum(session.rate(first, last) for session in self.sessions)

    def acceptance(self, session: SimSession) -> float:
        """How often a draft token of the session is right."""
        return self.scene.acceptance

    def _new_session(self, number: int) -> SimSession:
        lookahead = SessionLookahead(self.longest, lambda: self.target, adaptive=self.fixed is None)
        return SimSession(number, lookahead, random.Random(1000 * self.seed + number))

    async def _begin(self) -> None:
        self._drafter = Draft(self.scene, self._dice)
        target = Target(self.scene, self._dice, self._drafter)
        self._python = Worker(self._dice, replace(self.scene, jitter=PYTHON_JITTER))
        self._batcher = Batcher(target.verify, self.target, clock=asyncio.get_running_loop().time)
        work = [target.run(), self._drafter.run(), *map(self._session, self.sessions)]
        self._tasks = [asyncio.create_task(each) for each in work]

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._batcher.close()

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _session(self, session: SimSession) -> None:
        loop, name, python = asyncio.get_running_loop(), str(session.number), self.scene.python
        await asyncio.sleep(self._dice.random() * 0.01)
        since, block = loop.time(), None
        while True:
            start = loop.time()
            if block is not None:
                await block.done.wait()
                await self._python.work(0.2 * python)
            wait = loop.time() - start
            item = VerifyItem(session_id=name, base_length=session.tokens, draft_tokens=bytes(4 * session.asked))
            result = await self._batcher.verify(item)
            await self._python.work(0.5 * python)
            hit = self._commit(session, result, block, loop.time() - since, wait)
            since = loop.time()
            session.history.append((since, session.tokens))
            block = self._drafter.ask(session.number, session.asked, hit=hit) if session.asked else None
            session.asked = block.tokens if block is not None else 0
            if session.lookahead.alone or session.lookahead.probing:
                self._batcher.away(name)
            await self._python.work(0.5 * python)

    def _commit(
        self, session: SimSession, result: VerifyResult, block: Chain | None, seconds: float, wait: float
    ) -> bool:
        """Whether all was accepted and the draft would have guessed the token after it."""
        accepted, chance = 0, self.acceptance(session)
        while accepted < session.asked and session.draw(session.tokens + accepted) < chance:
            accepted += 1
        hit = accepted == session.asked and session.draw(session.tokens + accepted) < chance
        session.tokens += accepted + 1
        timing = result.timing
        self.target.observe_pass(timing, self.scene.clients)
        queue, passes = timing.queue_micros * 1e-6, timing.forward_micros * 1e-6
        cost = RoundCost(
            seconds, draft_wait=wait, queue=queue, passes=passes, tokens=accepted + 1, drafted=session.asked
        )
        if session.history:
            session.lookahead.learn(cost, accepted, block.tokens if block is not None and block.ahead else None)
        if self.fixed != 0:
            session.asked = session.lookahead.choose(self.draft, self.fixed or 1000)
        self.kinds["plain" if not session.asked else "probe" if session.lookahead.probing else "block"] += 1
        return hit
