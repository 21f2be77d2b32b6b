"""Drafting ahead: blocks for what the orchestrator will most likely commit, made while nobody waits for one.

After a block was answered, the likeliest outcome of its round is that it is accepted whole and that the target draws
the token after it as the draft would. The block for that outcome is made as if the outcome had been committed: its
noise is that of the base length that it would have, so it is, bit for bit, what an Advance would get.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from draft_service.commands import Ask, Key
from draft_service.job import Answer, Job
from outrider.lm.session_cache import Session
from outrider.observe.metrics import DraftMetrics


@dataclass(eq=False)
class Course:
    """How far a session is ahead. Its session holds the committed tokens and those of all blocks and guesses here.

    Attributes:
        answered: the newest block that a command asked for.
        chain: finished blocks; each goes on from the one before, accepted whole, and a guess of the token after it.
        running: the guess or the block in the making; None when there is nothing more to do.
    """

    answered: Job
    chain: list[Job] = field(default_factory=list)
    running: Job | None = None

    @property
    def tip(self) -> Job:
        """The last finished block."""
        return self.chain[-1] if self.chain else self.answered

    def find(self, base_length: int) -> Job | None:
        """The block for a base length, finished or begun."""
        begun = [self.running] if self.running is not None and not self.running.guess else []
        return next((job for job in (*self.chain, *begun) if job.ask.base_length == base_length), None)


class Ahead:
    """The courses of all sessions. Used by the engine thread alone.

    Args:
        blocks: most finished blocks that a course holds.
        context_length: of what makes a job's blocks.
        numbers: of jobs, in order of arrival.
    """

    def __init__(
        self, blocks: int, context_length: Callable[[Job], int], numbers: Iterator[int], metrics: DraftMetrics
    ) -> None:
        self._blocks, self._context_length = blocks, context_length
        self._numbers, self._metrics = numbers, metrics
        self._courses: dict[Key, Course] = {}

    @property
    def running(self) -> list[Job]:
        """What is in the making."""
        return [course.running for course in self._courses.values() if course.running is not None]

    def begin(self, answered: Job) -> None:
        """Goes on from a block that was answered, or from where the course that it belongs to has got to."""
        course = self._courses.get(answered.ask.key, Course(answered))
        if course.running is None:
            course.running = self._next_guess(course)
        if course.running is not None or course.chain:
            self._courses[answered.ask.key] = course

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
        job = course.find(ask.base_length) if session.holds(ask.base_length, ask.tokens, ask.prefix_hash) else None
        if job is None:
            self._give_up(course)
            self._metrics.reached("missed")
            return None
        job.pushed = job.pushed and job.ask.epoch == ask.epoch
        whole = job.done
        cut = job.asked(ask, limit)
        self._metrics.reached("ready" if whole else "begun")
        self._metrics.wasted(cut)
        if not whole:
            self._metrics.ahead(job.ahead_tokens + cut)
        passed = course.chain.index(job) if whole else len(course.chain)
        self._waste(course.chain[:passed])
        rest = Course(job, course.chain[passed + 1 :], course.running if whole else None)
        if cut:
            self._give_up(rest)
            session.cut(ask.base_length + limit)
        elif whole:
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

    def _settle(self, course: Course) -> Iterator[Answer]:
        job = course.running
        if job is None:
            return
        if job.failed is not None:
            # Whoever asks for it will see why.
            course.running = None
            _cut_back(course.tip)
        elif job.done and job.guess:
            course.running = self._next_block(course, job)
        elif job.done:
            course.chain.append(job)
            job.pushed = True
            self._metrics.ahead(len(job.tokens))
            # A copy: the job may become that of a command before the event loop reads it.
            yield Answer(job.ask, replace(job, tokens=job.tokens[:], rows=job.rows[:]), ahead=True)
            course.running = self._next_guess(course)

    def _next_guess(self, course: Course) -> Job | None:
        tip = course.tip
        # The guess takes a place, and so does a first token after it.
        room = self._context_length(tip) - tip.session.length - 1
        if len(course.chain) >= self._blocks or not tip.tokens or tip.ended or room < 1:
            return None
        return Job(tip.ask, tip.law, tip.session, 1, next(self._numbers), ahead=True, guess=True)

    def _next_block(self, course: Course, guess: Job) -> Job | None:
        if not guess.tokens or guess.ended:
            return None
        last, session = course.answered.ask, guess.session
        expected = Ask(
            key=last.key,
            epoch=last.epoch,
            base_length=session.length,
            tokens=session.tokens[last.base_length :].copy(),
            prefix_hash=0,
            lookahead=last.lookahead,
            law=None,
        )
        limit = min(last.lookahead, self._context_length(guess) - session.length)
        return Job(expected, guess.law, session, limit, next(self._numbers), ahead=True)

    def _give_up(self, course: Course) -> None:
        self._waste(course.chain)
        if course.running is not None and not course.running.guess:
            self._metrics.ahead(len(course.running.tokens))
            self._waste([course.running])

    def _waste(self, jobs: list[Job]) -> None:
        self._metrics.wasted(sum(len(job.tokens) for job in jobs))


def _cut_back(tip: Job) -> None:
    """Leaves the session with a finished block at its end."""
    tip.session.cut(tip.ask.base_length + len(tip.tokens))
