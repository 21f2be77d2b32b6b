"""What the draft's engine thread does: sessions, the newest command of each, steps of all chains together."""

from collections.abc import Mapping
from itertools import count

from draft_service.ahead import Ahead
from draft_service.commands import Ask, CloseSession, CloseStream, Command, Key, SessionLaw
from draft_service.config import DraftConfig
from draft_service.growth import Growth
from draft_service.job import Answer, Job
from draft_service.proposers import combined, prediction, prompt_lookup
from draft_service.proposers.base import BlockProposer
from draft_service.proposers.copying import CopyingProposer
from draft_service.proposers.model import ModelProposer
from draft_service.proposers.suffix import SuffixProposer
from draft_service.proposers.translating import TranslatingProposer
from draft_service.suffix.history import Histories
from draft_service.translation.engine import TranslatedEngine
from outrider.lm.engine import Engine
from outrider.lm.engine_load import EngineLoad
from outrider.lm.epoch_fence import EpochFence
from outrider.lm.features import FeatureWindow, Feeding
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
    """Runs in the engine thread. A session has at most one job: that of its newest command. While no session has one,
    the worker drafts ahead.

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
        # Committed tokens of each session, as its newest command says.
        self._lengths: dict[Key, int] = {}
        self.histories = Histories(config.suffix_history, config.suffix_history_tenants, config.suffix_history_ttl)
        self._fence: EpochFence[Key] = EpochFence()
        self._numbers = count()
        self._ahead = Ahead(config.ahead_blocks, config.ahead_others, self._context_length, self._numbers, metrics)
        self._suffix: SuffixProposer | None = None
        self._proposers: dict[Proposer.ValueType, BlockProposer] = {}
        for kind in config.kinds:
            if kind == draft_pb2.PROPOSER_SUFFIX_OR_MODEL:
                self._copier()
            else:
                self._proposers[kind] = self._proposer(kind, engines)
        # Two names of one proposer, whose sessions then share its passes: what is copied is decided before.
        self._each = list(self._proposers.values())
        if draft_pb2.PROPOSER_SUFFIX_OR_MODEL in config.kinds:
            self._proposers[draft_pb2.PROPOSER_SUFFIX_OR_MODEL] = self._proposers[draft_pb2.PROPOSER_MODEL]
        self._answers: list[Answer] = []
        self.load = EngineLoad()

    @property
    def busy(self) -> bool:
        """Whether a block is in the making."""
        return bool(self._jobs or self._ahead.running)

    @property
    def indexed_tokens(self) -> int:
        """Tokens of sessions that are indexed. May be asked for in any thread."""
        return self._suffix.indexes.tokens if self._suffix is not None else 0

    def handle(self, commands: list[Command]) -> list[Answer]:
        """Takes commands in.

        Returns the answers that need no pass: of commands that failed, were overtaken, or ask for what is there.
        """
        for command in commands:
            match command:
                case Ask():
                    self._take(command)
                case CloseSession():
                    self._close(command)
                case CloseStream(stream):
                    self._close_stream(stream)
        self._answer_finished()
        return self._hand_over()

    def step(self) -> list[Answer]:
        """Moves every chain on by one token, in one pass per engine; chains ahead only when nothing was asked for.

        Returns the answers that became ready.
        """
        if self._jobs:
            self._pass(list(self._jobs.values()))
            self._answer_finished()
        else:
            self._pass(self._ahead.running)
            self._answers += self._ahead.settle()
        return self._hand_over()

    def _pass(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.law.kind == draft_pb2.PROPOSER_SUFFIX_OR_MODEL and job.source is None:
                combined.decide(job, self._copier())
        for proposer in self._each:
            its_own = [job for job in jobs if self._proposers[job.law.kind] is proposer and not job.done]
            if its_own:
                proposer.step(its_own)

    def _copier(self) -> SuffixProposer:
        """The one that copies: one index for each session."""
        if self._suffix is None:
            context = self._config.context_length or _LOOKUP_CONTEXT
            cache = self._new_cache()
            self._suffix = SuffixProposer(cache, context, self.histories, self._config.suffix_tokens, self._metrics)
        return self._suffix

    def _new_cache(self) -> SessionCache[Key]:
        return SessionCache(self._config.session_ttl, self._jobs.__contains__, self._evicted)

    def _answer_finished(self) -> None:
        for job in list(self._jobs.values()):
            if job.failed is None and not job.done:
                continue
            del self._jobs[job.ask.key]
            if job.failed is not None:
                self._answers.append(Answer(job.ask, error=job.failed))
                continue
            told = job.pushed or job.ask.held
            self._answers.append(Answer(job.ask) if told else Answer(job.ask, job))
            # What is fed by the target waits for it.
            if self._proposers[job.law.kind].feeding is None:
                self._ahead.begin(job)

    def sweep(self) -> None:
        """Frees sessions past their time-to-live."""
        for proposer in self._each:
            proposer.cache.sweep()
        self.histories.sweep()
        self._measure()

    def _proposer(self, kind: Proposer.ValueType, engines: Mapping[Proposer.ValueType, Engine]) -> BlockProposer:
        if kind == draft_pb2.PROPOSER_SUFFIX:
            return self._copier()
        cache = self._new_cache()
        if kind in _COPIED:
            return CopyingProposer(cache, self._config.context_length or _LOOKUP_CONTEXT, _COPIED[kind])

        def chains(of: type[ModelProposer], engine: Engine) -> ModelProposer:
            return of(
                engine,
                cache,
                self._config.token_budget,
                self._metrics,
                spare=self._ahead.drop_all,
                runners_up=self._config.ahead_blocks > 0 and self._config.ahead_others > 0,
            )

        engine = engines[kind]
        if isinstance(engine, TranslatedEngine):
            return TranslatingProposer(engine, cache, chains, self._config.translation)
        return chains(ModelProposer, engine)

    def _context_length(self, job: Job) -> int:
        return self._proposers[job.law.kind].context_length

    def _take(self, ask: Ask) -> None:
        try:
            self._fence.raise_to(ask.key, ask.epoch)
            self._overtake(ask.key)
            self._jobs[ask.key] = self._begin(ask)
            self._lengths[ask.key] = ask.base_length
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
        limit = min(ask.lookahead, room)
        if ask.law is not None or not limit or ask.nodes:
            self._ahead.drop(ask.key)
        prepared = self._ahead.reach(ask, session, limit)
        if prepared is not None:
            return prepared
        session.rebase(ask.base_length, ask.tokens, ask.prefix_hash)
        feeding = self._proposers[law.kind].feeding
        if feeding is not None:
            limit = min(limit, feeding.longest or limit)
            _feed(session, ask, feeding, needed=limit > 0)
        job = Job(ask, law, session, limit, next(self._numbers))
        if limit and ask.nodes and not isinstance(self._proposers[law.kind], TranslatingProposer):
            job.growth = Growth(job.noise, ask.nodes, limit)
        return job

    def _open(self, key: Key, law: SessionLaw) -> Session[Key]:
        grammar = self._grammars.open(law.params)
        before = self._laws.get(key)
        if before is not None and self._proposers[before.kind] is not self._proposers[law.kind]:
            self._drop(key)
        self._laws[key] = law
        session = self._proposers[law.kind].cache.open(key)
        session.grammar = grammar
        return session

    def _close(self, command: CloseSession) -> None:
        key = command.key
        try:
            self._fence.raise_to(key, command.epoch)
        except OutriderError:
            return  # a former owner's; Close is not answered
        self._overtake(key)
        if command.ended:
            self._keep_output(command)
        self._drop(key)

    def _keep_output(self, command: CloseSession) -> None:
        """Keeps the session's output for others of its tenant, where outputs are kept."""
        law, length = self._laws.get(command.key), self._lengths.get(command.key, 0)
        session = self._proposers[law.kind].cache.find(command.key) if law is not None else None
        if law is None or session is None:
            return
        self._ahead.drop(command.key)
        if len(command.tokens):
            try:
                session.rebase(command.base_length, command.tokens, command.prefix_hash)
            except OutriderError:
                return  # what it holds is not what was committed
            length = command.base_length
        self.histories.add(law.tenant, session.tokens[law.params.prompt_length : length], law.seed)

    def _close_stream(self, stream: int) -> None:
        for key in [key for key in self._laws if key[0] == stream]:
            self._overtake(key)
            self._drop(key)
            self._fence.forget(key)

    def _overtake(self, key: Key) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            self._metrics.superseded()
            self._answers.append(Answer(job.ask, superseded=True))

    def _drop(self, key: Key) -> None:
        self._ahead.drop(key)
        self._lengths.pop(key, None)
        law = self._laws.pop(key, None)
        session = self._proposers[law.kind].cache.find(key) if law is not None else None
        if law is not None and session is not None:
            self._proposers[law.kind].cache.drop(session)
        self._forget_index(key)

    def _forget_index(self, key: Key) -> None:
        if self._suffix is not None:
            self._suffix.forget(key)

    def _evicted(self, key: Key) -> None:
        self._ahead.drop(key)
        self._lengths.pop(key, None)
        self._laws.pop(key, None)
        self._forget_index(key)
        self._metrics.evicted()

    def _hand_over(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        self._measure()
        return answers

    def _measure(self) -> None:
        pages = [proposer.pages() for proposer in self._each]
        sessions = sum(len(proposer.cache) for proposer in self._each)
        used, total = (sum(numbers) for numbers in zip(*pages, strict=True))
        shared = sum(proposer.shared_pages() for proposer in self._each)
        self.load = EngineLoad(sessions, used, total, shared)


def _feed(session: Session[Key], ask: Ask, feeding: Feeding, *, needed: bool) -> None:
    """Takes in the target's features. What was made without them is to be computed again; all of it, where they leave a
    gap.

    Raises OutriderError SESSION_NOT_FOUND when they are needed and do not reach up to the last token but one.
    """
    before = session.features
    session.recompute(1 + before.end if before is not None else 0)
    features = FeatureWindow(feeding.window) if ask.law is not None or before is None else before
    session.features = features
    if ask.features is not None:
        features.take(*ask.features)
    if features.start >= session.cached:
        session.recompute(0)
    if needed and (features.end != ask.base_length - 1 or not len(features.states)):
        message = f"the target's features end before position {features.end}, not {ask.base_length - 1}"
        raise OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, message)


def _unknown_session() -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, "session is unknown to this worker")
