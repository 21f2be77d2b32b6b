"""What the target's engine thread does: sessions, queues, passes. outrider/lm/passes.py has the order of work."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from outrider.lm.engine import Engine
from outrider.lm.engine_load import EngineLoad
from outrider.lm.epoch_fence import EpochFence
from outrider.lm.grammars import SessionGrammars
from outrider.lm.passes import PassRunner, Work
from outrider.lm.session_cache import SessionCache
from outrider.net.errors import OutriderError
from outrider.observe.metrics import WorkerMetrics
from outrider.v1 import types_pb2
from target_service.config import TargetConfig
from target_service.job import Job, Scored
from target_service.scoring import score

# When a caller whose sequence found no KV page may try again.
_PAGE_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Submit:
    """Score these, answer each when it is done."""

    jobs: Sequence[Job]


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for these any more."""

    jobs: Sequence[Job]


@dataclass(frozen=True)
class Release:
    """Free these sessions: (session id, epoch)."""

    sessions: Sequence[tuple[str, int]]


TargetCommand = Submit | Cancel | Release


class TargetScheduler:
    """Runs in the engine thread. Jobs of one session run one after another, in order of arrival."""

    def __init__(self, engine: Engine, config: TargetConfig, metrics: WorkerMetrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._grammars = SessionGrammars(engine.info.tokenizer, engine.info.vocab_size)
        self._grammars.prepare()
        self._queues: dict[str, deque[Job]] = {}
        self._fence: EpochFence[str] = EpochFence()
        self._cache: SessionCache[str] = SessionCache(
            config.session_ttl, self._queues.__contains__, lambda _: metrics.evicted()
        )
        # Steady-state decoding feeds the last committed token and the block.
        short = config.max_lookahead + 1
        self._runner = PassRunner(engine, self._cache, budget=config.token_budget, short=short, counts=metrics)
        self._numbers = count()
        self._finished: list[Job] = []
        self.load = EngineLoad()

    @property
    def busy(self) -> bool:
        """Whether a job waits for a pass."""
        return bool(self._queues)

    def handle(self, commands: list[TargetCommand]) -> list[Job]:
        """Takes jobs in, cancels, releases. Returns jobs that failed at once."""
        for command in commands:
            match command:
                case Submit(jobs):
                    for job in jobs:
                        self._take(job)
                case Cancel(jobs):
                    for job in jobs:
                        self._remove(job)
                case Release(sessions):
                    for session_id, epoch in sessions:
                        self._release(session_id, epoch)
        return self._hand_over()

    def step(self) -> list[Job]:
        """One pass over the first job of every session. Returns the jobs that it finished."""
        running = [(job, job.work) for job in (queue[0] for queue in self._queues.values()) if job.work is not None]
        refused = self._runner.run([work for _, work in running])
        if refused is not None:
            self._refuse(next(job for job, work in running if work is refused))
        self._score([(job, work) for job, work in running if work is not refused and work.remaining == 0])
        return self._hand_over()

    def sweep(self) -> None:
        """Frees sessions past their time-to-live."""
        self._cache.sweep()
        self._measure()

    def _take(self, job: Job) -> None:
        job.number = next(self._numbers)
        try:
            self._fence.raise_to(job.session_id, job.epoch)
        except OutriderError as error:
            self._finish(job, error)
            return
        queue = self._queues.setdefault(job.session_id, deque())
        # Whatever waits has one epoch: a higher one ends it, a lower one was refused above.
        if queue and queue[0].epoch < job.epoch:
            message = f"epoch is {queue[0].epoch}, {job.epoch} has come"
            self._finish_all(queue, OutriderError(types_pb2.ERROR_REASON_STALE_EPOCH, message))
        queue.append(job)
        if len(queue) == 1:
            self._begin_next(job.session_id)

    def _begin_next(self, session_id: str) -> None:
        """Begins the first job of a session's queue that can begin, and fails those before it."""
        queue = self._queues[session_id]
        while queue:
            try:
                queue[0].work = self._begin(queue[0])
                return
            except OutriderError as error:
                self._finish(queue.popleft(), error)
        del self._queues[session_id]

    def _begin(self, job: Job) -> Work:
        """Moves the session to the job's base length, adds its block, and says what is to compute."""
        grammar = self._grammars.open(job.law.params) if job.law is not None else None
        session = self._cache.open(job.session_id) if job.opens else self._cache.find(job.session_id)
        if session is None:
            raise OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, "session is unknown to this worker")
        if job.opens:
            session.law, session.grammar = job.law, grammar
        elif job.needs_law and session.law is None:
            raise OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, "session was opened without a law")
        session.rebase(job.base_length, job.prefix_tokens, job.prefix_hash)
        if job.tap is not None:
            session.recompute(job.tap.first)
        session.extend(job.draft_tokens, job.parents)
        if job.needs_law and session.grammar is not None:
            job.masks = session.grammar.masks(session.tokens, job.base_length, job.tree)
        first_row, traced = job.base_length - 1, job.traceparent
        return Work(session, session.length, first_row, job.number, traceparent=traced, tap=job.tap)

    def _remove(self, job: Job) -> None:
        """Takes a job out of its queue and lets the next one begin; no effect when it is not queued."""
        queue = self._queues.get(job.session_id, deque())
        if job not in queue:
            return
        first = queue[0] is job
        queue.remove(job)
        if first:
            self._begin_next(job.session_id)

    def _release(self, session_id: str, epoch: int) -> None:
        try:
            self._fence.raise_to(session_id, epoch)
        except OutriderError:
            return  # a former owner's: documented to be ignored
        error = OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, "session was released")
        self._finish_all(self._queues.pop(session_id, deque()), error)
        self._drop(session_id)

    def _refuse(self, job: Job) -> None:
        message = f"no KV page for a sequence of {job.base_length + len(job.draft_tokens)} tokens"
        self._fail(job, OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=_PAGE_RETRY_SECONDS))

    def _score(self, done: list[tuple[Job, Work]]) -> None:
        blocks = [(job, torch.cat(work.rows) if len(work.rows) > 1 else work.rows[0]) for job, work in done]
        for (job, work), scored in zip(done, score(blocks, self._engine.info.vocab_size), strict=True):
            work.rows.clear()
            if scored is not None:
                self._finish(job, scored)
                self._remove(job)
                continue
            self._metrics.non_finite()
            message = f"after {job.base_length} tokens the logits are no law: NaN, infinite, or nothing left to draw"
            self._fail(job, OutriderError(types_pb2.ERROR_REASON_NON_FINITE_LOGITS, message))

    def _fail(self, job: Job, error: OutriderError) -> None:
        """Ends a job together with its session's state, which cannot be trusted or kept."""
        self._finish(job, error)
        self._drop(job.session_id)
        self._remove(job)

    def _drop(self, session_id: str) -> None:
        session = self._cache.find(session_id)
        if session is not None:
            self._cache.drop(session)

    def _finish_all(self, queue: deque[Job], error: OutriderError) -> None:
        while queue:
            self._finish(queue.popleft(), error)

    def _finish(self, job: Job, outcome: Scored | OutriderError) -> None:
        job.outcome = outcome
        self._finished.append(job)

    def _hand_over(self) -> list[Job]:
        finished, self._finished = self._finished, []
        self._measure()
        return finished

    def _measure(self) -> None:
        self.load = EngineLoad(len(self._cache), *self._engine.pages(), self._engine.shared_pages())
