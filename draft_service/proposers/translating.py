"""Blocks of a draft model whose vocabulary is not its target's.

Two ways, both exact, for whatever is drawn is shipped with the law that it was drawn from, or to a rule that looks at
tokens alone. *Intersection*: the draft law on the tokens that both vocabularies have, drawn in the target's tokens: the
only one with a law for `ratio` and `block`. *String*: drawn in the draft model's own tokens, and their text encoded as
the target would (string-level exact match, Timor et al. 2025).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from draft_service.commands import Key, SessionLaw
from draft_service.config import TranslationWay
from draft_service.job import Job
from draft_service.proposers.model import ModelProposer, Row, add_all
from draft_service.translation.engine import TranslatedEngine
from draft_service.translation.reading import Reading
from draft_service.translation.retelling import retell
from draft_service.translation.vocabularies import Vocabularies
from outrider.law.draft import point_mass, propose_each
from outrider.law.noise import Purpose
from outrider.law.params import LawParams
from outrider.law.sparse import Int32Array
from outrider.lm.engine import Engine
from outrider.lm.session_cache import Session, SessionCache
from outrider.v1.draft_pb2 import TRANSLATION_INTERSECTION, TRANSLATION_STRING

# Own tokens that a token of the target may take, and some for text that is not settled.
_OWN_PER_TOKEN, _OWN_MORE = 8, 16


class TranslatingProposer:
    """Chains of a translated engine.

    Args:
        engine: the draft model in the target's tokens.
        cache: the sessions, in the target's tokens.
        chains: makes a proposer of blocks in an engine's own tokens.
        way: which sessions draw in own tokens.
    """

    def __init__(
        self,
        engine: TranslatedEngine,
        cache: SessionCache[Key],
        chains: "Callable[[type[ModelProposer], Engine], ModelProposer]",
        way: TranslationWay,
    ) -> None:
        self._engine, self._cache, self._way = engine, cache, way
        self._shared = chains(ModelProposer, engine)
        self._own = chains(_OwnChains, engine.inner)
        assert isinstance(self._own, _OwnChains)
        self._own.vocabularies = engine.vocabularies

    @property
    def cache(self) -> SessionCache[Key]:
        """The sessions."""
        return self._cache

    @property
    def context_length(self) -> int:
        """The draft model's. What is longer in its own tokens is read from a later point on."""
        return self._engine.info.context_length

    @property
    def feeding(self) -> None:
        """Nothing."""

    def pages(self) -> tuple[int, int]:
        """The engine's."""
        return self._engine.pages()

    def shared_pages(self) -> int:
        """The engine's."""
        return self._engine.shared_pages()

    def step(self, jobs: Sequence[Job]) -> None:
        """One pass for the jobs of each way."""
        for job in jobs:
            job.translation = TRANSLATION_STRING if _by_string(job.law, self._way) else TRANSLATION_INTERSECTION
        by_string = [job for job in jobs if job.translation == TRANSLATION_STRING]
        shared = [job for job in jobs if job.translation == TRANSLATION_INTERSECTION]
        for job in shared:
            if isinstance(job.session.sequence, _OwnText):
                job.session.free_state()  # of a session that was opened anew with another law
        if shared:
            self._shared.step(shared)
        if by_string:
            self._step_strings(by_string)

    def _step_strings(self, jobs: list[Job]) -> None:
        inner = [self._inner(job) for job in jobs]
        self._own.step(inner)
        for job, drawn in zip(jobs, inner, strict=True):
            job.first_pass_at, job.forward_micros = drawn.first_pass_at, drawn.forward_micros
            job.passes, job.traced = drawn.passes, drawn.traced
            if drawn.failed is not None:
                job.failed = drawn.failed
                if not job.ahead:
                    self._cache.drop(job.session)
            else:
                self._settle(job, drawn)

    def _inner(self, job: Job) -> Job:
        """The job's block in own tokens, begun where it is not."""
        if job.inner is None:
            text = self._text(job.session)
            own = text.read(job.session.tokens, self._engine.vocabularies.lonely)
            room = self._engine.inner.info.context_length - len(own)
            limit = min(job.limit * _OWN_PER_TOKEN + _OWN_MORE, room) if job.limit else 0
            ask = replace(job.ask, base_length=len(own))
            law = replace(job.law, params=text.params(job.law.params, self._engine.vocabularies))
            job.inner = Job(ask, law, text.own, limit, job.number, place=job.session.length)
        job.inner.ahead = job.ahead
        return job.inner

    def _text(self, session: Session[Key]) -> "_OwnText":
        if not isinstance(session.sequence, _OwnText):
            session.free_state()
            session.sequence = _OwnText(self._engine.vocabularies.reading(), Session(session.key))
        return session.sequence

    def _settle(self, job: Job, drawn: Job) -> None:
        """Ends the job's block once enough of the text is sure to be encoded so."""
        text = self._text(job.session)
        retold = retell(self._engine.vocabularies, text.reading, drawn.tokens)
        drawn.place = job.session.length + retold.settled
        if not (drawn.done or retold.ended) and retold.settled < job.limit:
            return
        for token in retold.tokens[: job.limit]:
            if not job.done:
                job.add(token, point_mass(token))
        job.session.extend(np.array(job.tokens, np.int32))
        job.done, job.inner = True, None


@dataclass
class _OwnText:
    """The state of a session whose blocks are drawn in own tokens, as SequenceState.

    Attributes:
        own: the draft model's session; it may end in own tokens that were drawn.
    """

    reading: Reading
    own: Session[Key]
    _law: LawParams | None = None
    _own_law: LawParams | None = None

    @property
    def length(self) -> int:
        """In the target's tokens."""
        return len(self.reading.tokens)

    def truncate(self, length: int) -> None:
        """As SequenceState. The draft model's state follows with the next block."""
        self.reading.truncate(length)

    def keep(self, path: Sequence[int]) -> None:
        """Raises ValueError: what is translated are chains."""
        raise ValueError("a translated sequence holds no tree")

    def free(self) -> None:
        """As SequenceState."""
        self.own.free_state()

    def read(self, tokens: Int32Array, lonely: int) -> Int32Array:
        """Moves to the session's tokens, of which the reading holds some. Returns them in own tokens."""
        self.reading.extend(tokens[self.length :].tolist())
        own = np.array(self.reading.ids or [lonely], np.int32)
        self.own.rebase(len(own), own, 0)
        return own

    def params(self, law: LawParams, vocabularies: Vocabularies) -> LawParams:
        """The session's law in own tokens, as far as there are some: it decides what is accepted, not what is said."""
        if self._law is not law or self._own_law is None:
            self._law, self._own_law = law, _own_law(law, vocabularies)
        return replace(self._own_law, prompt_length=self.reading.own_length(law.prompt_length))


class _OwnChains(ModelProposer):
    """Chains in own tokens that race, where the target does, with the noise of the target's tokens."""

    vocabularies: Vocabularies

    def _propose(self, laws: list[tuple[Job, Row]], purpose: Purpose) -> None:
        if purpose is not Purpose.COUPLE:
            super()._propose(laws, purpose)
            return
        jobs, shared = [job for job, _ in laws], self.vocabularies.shared
        raced = [(_noise_ids(shared.targets_of(ids), ids, shared.size), probs) for _, (ids, probs) in laws]
        winners = propose_each(raced, [job.noise for job in jobs], [job.position for job in jobs], purpose)
        tokens = [
            int(ids[np.flatnonzero(noise_ids == winner)[0]])
            for (_, (ids, _)), (noise_ids, _), winner in zip(laws, raced, winners, strict=True)
        ]
        add_all(jobs, tokens, [row for _, row in laws])


def _noise_ids(targets: npt.NDArray[np.int64], own: Int32Array, size: int) -> Int32Array:
    """The target's tokens, and beyond them for own tokens that it does not have."""
    return np.where(targets >= 0, targets, size + own).astype(np.int32)


def _by_string(law: SessionLaw, way: TranslationWay) -> bool:
    """A law is needed where it is shipped; masks are in the target's tokens."""
    masked = law.params.grammar is not None or bool(law.params.allowed_token_ids)
    return way is not TranslationWay.INTERSECTION and law.omit_law and not masked


def _own_law(law: LawParams, vocabularies: Vocabularies) -> LawParams:
    own_of, bias = vocabularies.shared.own_of, dict(law.logit_bias)
    return replace(
        law,
        logit_bias=tuple((own, bias[token]) for token, own in own_of(tuple(bias)).items()),
        banned_token_ids=tuple(own_of(law.banned_token_ids).values()),
        stop_token_ids=tuple(own_of(law.stop_token_ids).values()),
    )
