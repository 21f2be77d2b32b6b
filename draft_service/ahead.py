"""Drafting ahead: blocks for what the orchestrator will most likely commit, made while nobody waits for one.

After a block was answered, the likeliest outcome of its round is that it is accepted whole and that the target draws
the token after it as the draft would. The block for that outcome is made as if the outcome had been committed: its
noise is that of the base length that it would have, so it is, bit for bit, what an Advance would get. It is pushed, and
the worker goes on from it in the same way. What else it has time for are blocks for other outcomes of the round; they
are kept for the Advance that names one. Of a tree there is no likeliest outcome worth a block: it ends where it ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from draft_service.commands import Ask, Key
from draft_service.job import Answer, Job
from draft_service.outcomes import other_outcomes
from outrider.law.sparse import Int32Array
from outrider.lm.session_cache import Session
from outrider.observe.metrics import DraftMetrics


@dataclass(eq=False)
class Course:
    """How far a session is ahead. Its session holds the committed tokens and those of the chain's blocks and guesses.

    Attributes:
        answered: the newest block that a command asked for.
        chain: finished blocks; each goes on from the one before, accepted whole, and a guess of the token after it.
        others: finished blocks for other outcomes of the answered block's round.
        untried: the outcomes that are still to be prepared for, likeliest first; None before the chain is done.
        running: the guess or the block in the making; None when there is nothing more to do.
        aside: while a block for another outcome is made, the session's own tokens from where that branches off.
    """

    answered: Job
    chain: list[Job] = field(default_factory=list)
    others: list[Job] = field(default_factory=list)
    untried: list[tuple[int, int]] | None = None
    running: Job | None = None
    aside: tuple[int, Int32Array] | None = None

    @property
    def tip(self) -> Job:
        """The last finished block of the chain."""
        return self.chain[-1] if self.chain else self.answered

    @property
    def blocks(self) -> list[Job]:
        """All blocks, finished and begun."""
        begun = [self.running] if self.running is not None and not self.running.guess else []
        return [*self.chain, *self.others, *begun]

    def branch(self, outcome: Ask) -> None:
        """Moves the session to another outcome, which differs in its last token."""
        session, length = self.answered.session, outcome.base_length - 1
        self.aside = length, session.tokens[length:].copy()
        session.cut(length)
        session.extend(outcome.tokens[-1:])

    def rejoin(self) -> None:
        """Moves the session back to its chain."""
        if self.aside is not None:
            length, tokens = self.aside
            self.aside = None
            self.answered.session.cut(length)
            self.answered.session.extend(tokens)


class Ahead:
    """The courses of all sessions. Used by the engine thread alone.

    Args:
        blocks: most finished blocks that a chain holds.
        others: most other outcomes of a round that are prepared for.
        context_length: of what makes a job's blocks.
        numbers: of jobs, in order of arrival.
    """

    def __init__(
        self,
        blocks: int,
        others: int,
        context_length: Callable[[Job], int],
        numbers: Iterator[int],
        metrics: DraftMetrics,
    ) -> None:
        self._blocks, self._others, self._context_length = blocks, others, context_length
        self._numbers, self._metrics = numbers, metrics
        self._courses: dict[Key, Course] = {}

    @property
    def running(self) -> list[Job]:
        """What is in the making."""
        return [course.running for course in self._courses.values() if course.running is not None]

    def begin(self, answered: Job) -> None:
        """Goes on from a block that was answered, or from where the course that it belongs to has got to."""
        if not self._blocks or not answered.tokens or answered.growth is not None:
            return
        course = self._courses.setdefault(answered.ask.key, Course(answered))
        course.running = course.running or self._next(course)

    def settle(self) -> list[Answer]:
        """Takes what a step has finished, and prepares the next one. Returns the blocks to be pushed."""
        return [answer for course in self._courses.values() for answer in self._settle(course)]

    def reach(self, ask: Ask, session: Session[Key], limit: int) -> Job | None:
        """The look-up: what was drafted ahead for exactly this command, whole or begun, as the command's own job.

        None, and nothing left of the course, where that is nothing.
        """
        course = self._courses.pop(ask.key, None)
        if course is None:
            return None
        job = self._find(course, ask, session)
        self._metrics.reached("missed" if job is None else "ready" if job.done else "begun")
        if job is None:
            self._give_up(course)
            return None
        rest = Course(job)
        if job in course.chain:
            rest.chain, rest.running = course.chain[course.chain.index(job) + 1 :], course.running
        whole = job.done
        job.pushed = job.pushed and job.ask.epoch == ask.epoch
        cut = job.asked(ask, limit)
        if cut:
            rest.chain, rest.running = [], None
        self._give_up(course, kept=[job, *rest.blocks])
        if not whole:
            self._metrics.ahead(len(job.tokens) + cut)
        self._metrics.wasted(cut)
        if cut:
            session.cut(ask.base_length + limit)
        if whole:
            self._courses[ask.key] = rest
        return job

    def drop(self, key: Key) -> None:
        """Gives up a session's course; idempotent."""
        course = self._courses.pop(key, None)
        if course is not None:
            self._give_up(course)

    def drop_all(self) -> bool:
        """Gives up every course, and the state that is cached for it; False when there is none."""
        courses, self._courses = self._courses, {}
        for course in courses.values():
            self._give_up(course)
            _cut_back(course.answered)
        return bool(courses)

    def _find(self, course: Course, ask: Ask, session: Session[Key]) -> Job | None:
        """The block for a command, with the session at its end. Without one the session is where its chain is."""

        def committed() -> bool:
            return session.holds(ask.base_length, ask.tokens, ask.prefix_hash)

        job = course.running
        if course.aside is not None and job is not None:
            if job.ask.base_length == ask.base_length and committed():
                course.aside = None
                return job
            self._give_up_running(course)
        candidates = [one for one in course.blocks if one.ask.base_length == ask.base_length]
        if committed():
            return next((one for one in candidates if one not in course.others), None)
        for one in candidates:
            if one in course.others and one.ask.tokens[-1] == ask.tokens[-1]:
                course.branch(one.ask)
                if committed():
                    course.aside = None
                    session.extend(np.array(one.tokens, np.int32))
                    return one
                course.rejoin()
        return None

    def _settle(self, course: Course) -> Iterator[Answer]:
        job = course.running
        if job is None or not (job.done or job.failed is not None):
            return
        if job.failed is not None:
            # Whoever asks for it will see why.
            self._give_up_running(course)
            _cut_back(course.tip)
            course.untried = []
        elif job.guess:
            course.tip.bonus = job
            course.running = self._next_block(course, job) or self._next_other(course)
        elif course.aside is not None:
            self._metrics.ahead(len(job.tokens))
            course.others.append(job)
            course.rejoin()
            course.running = self._next_other(course)
        else:
            self._metrics.ahead(len(job.tokens))
            course.chain.append(job)
            job.pushed = True
            # A copy: the job may become that of a command before the event loop reads it.
            yield Answer(job.ask, replace(job, tokens=job.tokens[:], rows=job.rows[:]), ahead=True)
            course.running = self._next(course)

    def _next(self, course: Course) -> Job | None:
        return self._next_guess(course) or self._next_other(course)

    def _next_guess(self, course: Course) -> Job | None:
        tip = course.tip
        # The guess takes a place, and so does a first token after it.
        room = self._context_length(tip) - tip.session.length - 1
        if len(course.chain) >= self._blocks or tip.bonus is not None or not tip.tokens or tip.ended or room < 1:
            return None
        return Job(tip.ask, tip.law, tip.session, 1, next(self._numbers), ahead=True, guess=True)

    def _next_block(self, course: Course, guess: Job) -> Job | None:
        return None if not guess.tokens or guess.ended else self._block(course)

    def _next_other(self, course: Course) -> Job | None:
        """Moves the session to the next of the other outcomes."""
        if course.untried is None:
            course.untried = other_outcomes(course.answered)[: self._others]
        if not course.untried:
            return None
        last = course.answered.ask
        accepted, token = course.untried.pop(0)
        outcome = np.array([*course.answered.tokens[:accepted], token], np.int32)
        course.branch(replace(last, base_length=last.base_length + accepted + 1, tokens=outcome))
        return self._block(course)

    def _block(self, course: Course) -> Job:
        """The job of the block that follows the session as it is."""
        answered, last = course.answered, course.answered.ask
        session = answered.session
        expected = Ask(
            key=last.key,
            epoch=last.epoch,
            base_length=session.length,
            tokens=session.tokens[last.base_length :].copy(),
            prefix_hash=0,
            lookahead=last.lookahead,
            law=None,
            traceparent=last.traceparent,
        )
        limit = min(last.lookahead, self._context_length(answered) - session.length)
        return Job(expected, answered.law, session, limit, next(self._numbers), ahead=True)

    def _give_up_running(self, course: Course) -> None:
        """Gives up what is in the making, and leaves the session where its chain is."""
        job, course.running = course.running, None
        if job is not None and not job.guess:
            self._metrics.ahead(len(job.tokens))
            self._metrics.wasted(len(job.tokens))
        course.rejoin()

    def _give_up(self, course: Course, kept: Sequence[Job] = ()) -> None:
        """Counts as wasted what is not kept."""
        if course.running not in kept:
            self._give_up_running(course)
        finished = [*course.chain, *course.others]
        self._metrics.wasted(sum(len(job.tokens) for job in finished if job not in kept))


def _cut_back(tip: Job) -> None:
    """Leaves the session with a finished block at its end."""
    tip.session.cut(tip.ask.base_length + len(tip.tokens))
