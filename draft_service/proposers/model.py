"""Blocks drawn from a model: the worker's draft model, or the first layers of the target (early exit).

One pass moves all chains on by one token: each session feeds what it has not computed yet (the tokens that the
orchestrator committed since, or the token drawn in the step before) and gets one row.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from draft_service.commands import Key
from draft_service.job import Job
from draft_service.proposers.trees import draw_trees
from outrider.law.draft import point_mass, propose_each, truncate
from outrider.law.noise import Purpose
from outrider.law.rows import bonus_tokens
from outrider.law.sparse import Float32Array, Int32Array
from outrider.law.transforms import NonFiniteLogits, RowContext, greedy_tokens, law_probs
from outrider.lm.engine import Engine
from outrider.lm.features import Feeding
from outrider.lm.passes import PassRunner, Work
from outrider.lm.session_cache import SessionCache
from outrider.net.bounds import MAX_LOOKAHEAD
from outrider.net.errors import OutriderError
from outrider.observe.metrics import DraftMetrics
from outrider.v1 import types_pb2

Row = tuple[Int32Array, Float32Array]
Made = TypeVar("Made")

_PAGE_RETRY_SECONDS = 1.0


class ModelProposer:
    """Chains from an engine; all sessions' next steps in one pass.

    Args:
        cache: the engine's sessions.
        budget: positions of one pass.
        spare: drops the work ahead, which gives KV pages back; False when there is none.
        runners_up: whether greedy jobs note the next best token of each row.
    """

    def __init__(
        self,
        engine: Engine,
        cache: SessionCache[Key],
        budget: int,
        metrics: DraftMetrics,
        *,
        spare: Callable[[], bool],
        runners_up: bool,
    ) -> None:
        self._engine, self._cache, self._metrics = engine, cache, metrics
        self._runners_up = runners_up
        # A step of a running chain is one token; after a round it also catches up on what was committed meanwhile.
        self._runner = PassRunner(engine, cache, budget=budget, short=MAX_LOOKAHEAD + 1, spare=spare, counts=metrics)

    @property
    def cache(self) -> SessionCache[Key]:
        """The engine's sessions."""
        return self._cache

    @property
    def context_length(self) -> int:
        """The model's."""
        return self._engine.info.context_length

    @property
    def feeding(self) -> Feeding | None:
        """The engine's."""
        return self._engine.info.feeding

    def pages(self) -> tuple[int, int]:
        """The engine's."""
        return self._engine.pages()

    def shared_pages(self) -> int:
        """The engine's."""
        return self._engine.shared_pages()

    def step(self, jobs: Sequence[Job]) -> None:
        """One pass; every chain whose row came gets its next token, every tree its next level. Work ahead takes no KV
        page from a session."""
        steps = [(job, self._work(job)) for job in jobs]
        waiting = [work for _, work in steps if work.remaining]
        displace = not any(job.ahead for job in jobs)
        refused = self._runner.run(waiting, displace=displace) if waiting else None
        for job, work in steps:
            if work is refused:
                job.failed = _no_page(job)
                if not job.ahead:
                    self._cache.drop(job.session)
        self._draw([self._finish_step(job, work) for job, work in steps if work is not refused and not work.remaining])

    def _work(self, job: Job) -> Work:
        """The positions of the job's present step; without a token wanted, those that are not cached yet, where they
        can be computed before the features for a block come."""
        if job.work is None:
            goal = job.session.length if job.limit or self.feeding is None else job.session.cached
            rows = 0 if not job.limit else 1 if job.growth is None else len(job.growth.level)
            job.work = Work(job.session, goal, goal - rows, job.number, traceparent=job.ask.traceparent)
        return job.work

    def _finish_step(self, job: Job, work: Work) -> tuple[Job, list[torch.Tensor]]:
        job.forward_micros += work.forward_micros
        job.passes += work.passes
        job.traced += work.traced
        job.first_pass_at = job.first_pass_at if job.first_pass_at is not None else work.first_pass_at
        job.work = None
        job.done = job.limit == 0
        return job, work.rows

    def _draw(self, steps: list[tuple[Job, list[torch.Tensor]]]) -> None:
        trees = [(job, torch.cat(rows)) for job, rows in steps if rows and job.growth is not None]
        if trees:
            draw_trees(trees, self._engine.info.vocab_size, self._fail_non_finite)
        drawing = [(job, rows[0]) for job, rows in steps if rows and job.growth is None and _masked(job)]
        for draw, greedy in ((self._draw_likeliest, True), (self._draw_sampled, False)):
            of_kind = [(job, row) for job, row in drawing if job.law.params.greedy is greedy]
            if of_kind:
                draw([job for job, _ in of_kind], torch.cat([row for _, row in of_kind]))

    def _draw_likeliest(self, jobs: list[Job], logits: torch.Tensor) -> None:
        """Greedy laws have one token: nothing is to be truncated, and no noise changes who wins."""
        jobs, logits, tokens = self._of_good_rows(greedy_tokens, jobs, logits)
        if self._runners_up:
            _note_runners_up(jobs, logits)
        add_all(jobs, tokens.tolist(), [point_mass(int(token)) for token in tokens])

    def _draw_sampled(self, jobs: list[Job], logits: torch.Tensor) -> None:
        jobs, _, probs = self._of_good_rows(law_probs, jobs, logits)
        guessing = [index for index, job in enumerate(jobs) if job.guess and not job.law.coupled]
        if guessing:
            self._guess([jobs[index] for index in guessing], probs[guessing])
        laws = self._truncated(jobs, probs, sorted(set(range(len(jobs))) - set(guessing)))
        for purpose in {job.law.purpose for job, _ in laws}:
            self._propose([(job, row) for job, row in laws if job.law.purpose is purpose], purpose)

    def _guess(self, jobs: list[Job], probs: torch.Tensor) -> None:
        """With the noise that the target draws a bonus token with."""
        tokens = bonus_tokens(probs, [job.noise for job in jobs], [job.position for job in jobs])
        add_all(jobs, tokens, [point_mass(token) for token in tokens])

    def _propose(self, laws: list[tuple[Job, Row]], purpose: Purpose) -> None:
        rows, jobs = [row for _, row in laws], [job for job, _ in laws]
        tokens = propose_each(rows, [job.noise for job in jobs], [job.position for job in jobs], purpose)
        add_all(jobs, tokens, rows)

    def _of_good_rows(
        self, law: Callable[[torch.Tensor, Sequence[RowContext], int], Made], jobs: list[Job], logits: torch.Tensor
    ) -> tuple[list[Job], torch.Tensor, Made]:
        """(jobs, their logits, what `law` makes of these); jobs whose row is no law fail, and are left out."""
        contexts = [RowContext(job.law.params, job.session.tokens, job.mask) for job in jobs]
        try:
            return jobs, logits, law(logits, contexts, self._engine.info.vocab_size)
        except NonFiniteLogits as error:
            bad = set(error.rows)
            for index in bad:
                self._fail_non_finite(jobs[index])
            good = [index for index in range(len(jobs)) if index not in bad]
            return self._of_good_rows(law, [jobs[index] for index in good], logits[good])

    def _truncated(self, jobs: list[Job], probs: torch.Tensor, wanted: Sequence[int]) -> list[tuple[Job, Row]]:
        """What is left of some of the laws on the wire."""
        by_top: dict[int, list[int]] = defaultdict(list)
        for index in wanted:
            by_top[jobs[index].law.top].append(index)
        laws: list[tuple[Job, Row]] = []
        for top, indices in by_top.items():
            chosen = probs if len(indices) == len(jobs) else probs[indices]
            laws += zip((jobs[index] for index in indices), truncate(chosen, top), strict=True)
        return laws

    def _fail_non_finite(self, job: Job) -> None:
        if job.ahead:
            # The state may be no better than the logits; whoever asks for this block will see.
            job.session.free_state()
        else:
            self._metrics.non_finite()
            self._cache.drop(job.session)
        message = f"the draft model returned NaN or infinite logits at position {job.position}"
        job.failed = OutriderError(types_pb2.ERROR_REASON_NON_FINITE_LOGITS, message)


def add_all(jobs: Sequence[Job], tokens: Sequence[int], rows: Sequence[Row]) -> None:
    """The next token of each chain, and the law that it was drawn from."""
    for job, token, row in zip(jobs, tokens, rows, strict=True):
        job.add(token, row)
        job.session.extend(np.array([token], np.int32))


def _masked(job: Job) -> bool:
    """Finds what the session's language allows next. False where that fails: the block ends there, if it has begun."""
    grammar = job.session.grammar
    if grammar is None:
        return True
    try:
        (job.mask,) = grammar.masks(job.session.tokens, job.session.length)
    except OutriderError as error:
        job.done = bool(job.tokens)
        job.failed = None if job.done else error
        return False
    return True


def _note_runners_up(jobs: list[Job], logits: torch.Tensor) -> None:
    values, tokens = logits.float().topk(2, dim=1)
    nearness = (values[:, 1] - values[:, 0]).exp()
    # The best two tokens: penalties and masks, which may have chosen otherwise, are not looked at.
    for job, token, near in zip(jobs, tokens[:, 1].tolist(), nearness.tolist(), strict=True):
        job.runners_up.append((token, near))


def _no_page(job: Job) -> OutriderError:
    message = f"no KV page for a sequence of {job.session.length} tokens"
    return OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=_PAGE_RETRY_SECONDS)
