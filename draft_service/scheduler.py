"""What the draft's engine thread does: sessions, the newest command of each, steps of all chains together."""

from collections.abc import Mapping
from itertools import count

from draft_service.commands import Ask, CloseSession, CloseStream, Command, Key, SessionLaw
from draft_service.config import DraftConfig
from draft_service.job import Answer, Job
from draft_service.proposers import prediction, prompt_lookup
from draft_service.proposers.base import BlockProposer
from draft_service.proposers.copying import CopyingProposer
from draft_service.proposers.model import ModelProposer
from outrider.lm.engine import Engine
from outrider.lm.engine_load import EngineLoad
from outrider.lm.epoch_fence import EpochFence
from outrider.lm.grammars import SessionGrammars
from outrider.lm.session_cache import Session, SessionCache
from outrider.net.errors import OutriderError
from outrider.observe.metrics import DraftMetrics
from outrider.v1 import draft_pb2, types_pb2
from outrider.v1.draft_pb2 import Proposer

# What a proposer without a model holds at most when no context length is configured.
_LOOKUP_CONTEXT = 1 << 20

_COPIED = {
    draft_pb2.PROPOSER_PROMPT_LOOKUP: prompt_lookup.proposal,
    draft_pb2.PROPOSER_PREDICTION: prediction.proposal,
}


class DraftScheduler:
    """Runs in the engine thread. A session has at most one job: that of its newest command.

    Args:
        engines: the model behind each proposer that has one.
        grammars: makes the grammar states of sessions.
    """

    def __init__(
        self,
        engines: Mapping[Proposer.ValueType, Engine],
        grammars: SessionGrammars,
        config: DraftConfig,
        metrics: DraftMetrics,
    ) -> None:
        self._grammars, self._metrics, self._config = grammars, metrics, config
        self._jobs: dict[Key, Job] = {}
        self._laws: dict[Key, SessionLaw] = {}
        self._fence: EpochFence[Key] = EpochFence()
        self._proposers = {kind: self._proposer(kind, engines) for kind in config.kinds}
        self._numbers = count()
        self._answers: list[Answer] = []
        self.load = EngineLoad()

    @property
    def busy(self) -> bool:
        """Whether a block is in the making."""
        return bool(self._jobs)

    def handle(self, commands: list[Command]) -> list[Answer]:
        """Takes commands in. Returns the answers of those that failed at once and of those that were overtaken."""
        for command in commands:
            match command:
                case Ask():
                    self._take(command)
                case CloseSession(key, epoch):
                    self._close(key, epoch)
                case CloseStream(stream):
                    self._close_stream(stream)
        return self._hand_over()

    def step(self) -> list[Answer]:
        """Moves every chain on by one token, in one pass per engine. Returns the answers that became ready."""
        for kind, proposer in self._proposers.items():
            jobs = [job for job in self._jobs.values() if job.law.kind == kind]
            if jobs:
                proposer.step(jobs)
        for job in list(self._jobs.values()):
            if job.failed is not None:
                self._answer(Answer(job.ask, error=job.failed))
            elif job.done:
                self._answer(Answer(job.ask, job))
        return self._hand_over()

    def sweep(self) -> None:
        """Frees sessions past their time-to-live."""
        for proposer in self._proposers.values():
            proposer.cache.sweep()
        self._measure()

    def _proposer(self, kind: Proposer.ValueType, engines: Mapping[Proposer.ValueType, Engine]) -> BlockProposer:
        cache: SessionCache[Key] = SessionCache(self._config.session_ttl, self._jobs.__contains__, self._evicted)
        if kind in _COPIED:
            return CopyingProposer(cache, self._config.context_length or _LOOKUP_CONTEXT, _COPIED[kind])
        return ModelProposer(engines[kind], cache, self._config.token_budget, self._metrics)

    def _take(self, ask: Ask) -> None:
        try:
            self._fence.raise_to(ask.key, ask.epoch)
            self._overtake(ask.key)
            self._jobs[ask.key] = self._begin(ask)
        except OutriderError as error:
            self._answers.append(Answer(ask, error=error))

    def _begin(self, ask: Ask) -> Job:
        """Moves the session to its new base length. Raises OutriderError."""
        law = ask.law or self._laws.get(ask.key)
        if law is None:
            raise _unknown_session()
        context = self._proposers[law.kind].context_length
        room = context - ask.base_length
        if room < 0 or (room == 0 and ask.lookahead):
            message = f"{ask.base_length} tokens leave no room in a context of {context}"
            raise OutriderError(types_pb2.ERROR_REASON_CONTEXT_EXCEEDED, message)
        session = self._open(ask.key, law) if ask.law is not None else self._proposers[law.kind].cache.find(ask.key)
        if session is None:
            raise _unknown_session()
        session.rebase(ask.base_length, ask.tokens, ask.prefix_hash)
        return Job(ask, law, session, min(ask.lookahead, room), next(self._numbers))

    def _open(self, key: Key, law: SessionLaw) -> Session[Key]:
        grammar = self._grammars.open(law.params)
        before = self._laws.get(key)
        if before is not None and before.kind != law.kind:
            self._drop(key)
        self._laws[key] = law
        session = self._proposers[law.kind].cache.open(key)
        session.grammar = grammar
        return session

    def _close(self, key: Key, epoch: int) -> None:
        try:
            self._fence.raise_to(key, epoch)
        except OutriderError:
            return  # a former owner's; Close is not answered
        self._overtake(key)
        self._drop(key)

    def _close_stream(self, stream: int) -> None:
        for key in [key for key in self._laws if key[0] == stream]:
            self._overtake(key)
            self._drop(key)
            self._fence.forget(key)

    def _overtake(self, key: Key) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            self._metrics.superseded()
            self._answers.append(Answer(job.ask))

    def _drop(self, key: Key) -> None:
        law = self._laws.pop(key, None)
        session = self._proposers[law.kind].cache.find(key) if law is not None else None
        if law is not None and session is not None:
            self._proposers[law.kind].cache.drop(session)

    def _evicted(self, key: Key) -> None:
        self._laws.pop(key, None)
        self._metrics.evicted()

    def _answer(self, answer: Answer) -> None:
        del self._jobs[answer.ask.key]
        self._answers.append(answer)

    def _hand_over(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        self._measure()
        return answers

    def _measure(self) -> None:
        pages = [proposer.pages() for proposer in self._proposers.values()]
        sessions = sum(len(proposer.cache) for proposer in self._proposers.values())
        self.load = EngineLoad(sessions, sum(used for used, _ in pages), sum(total for _, total in pages))


def _unknown_session() -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, "session is unknown to this worker")
