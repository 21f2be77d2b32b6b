"""The orchestrator without its server: pools of workers, the store, and the life of a session."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

from transformers import PreTrainedTokenizerBase

from orchestrator.choices import plan_choices
from orchestrator.config import OrchestratorConfig
from orchestrator.drafting import Drafting
from orchestrator.judge import Judge
from orchestrator.links.draft import DraftLink
from orchestrator.links.target import TargetLink
from orchestrator.lookahead import SessionLookahead
from orchestrator.metrics import Metrics
from orchestrator.pool import DraftPool, TargetPool
from orchestrator.request import GenerationPlan, ServingLimits
from orchestrator.round import Services
from orchestrator.session import Session
from orchestrator.shortfalls import Shortfalls
from orchestrator.store.base import SessionRecord, SessionStore, StoreError, StoreUnavailable
from orchestrator.text.detokenizer import Spelling
from orchestrator.text.output import Output
from orchestrator.turn import Turn
from orchestrator.verifying import Verifying
from outrider.law.audit import audit_each
from outrider.law.batch import ENTRIES_PER_CALL
from outrider.lm.grammars import SessionGrammars
from outrider.lm.tokenizer import vocabulary_of
from outrider.net.address import parse_addresses
from outrider.net.arrays import int32s
from outrider.net.errors import OutriderError
from outrider.v1 import orchestrator_pb2, types_pb2
from outrider.v1.orchestrator_pb2 import FinishReason, GenerateRequest

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
# Ending a session takes one write to the store and one call to a target, each with a deadline of its own.
CLOSE_SECONDS = 10.0


class Orchestrator:
    """Everything that sessions share. Lives on one event loop."""

    def __init__(
        self, config: OrchestratorConfig, tokenizer: PreTrainedTokenizerBase, store: SessionStore, metrics: Metrics
    ) -> None:
        self.config = config
        self.store = store
        self.targets = TargetPool()
        self.drafts = DraftPool()
        self.shortfalls = Shortfalls(self.targets, self.drafts, config.max_lookahead)
        self.services = Services(Judge(), store, metrics)
        self._audits = Turn(audit_each, lambda claim: len(claim.law.token_ids), ENTRIES_PER_CALL)
        self.sessions = 0
        self._tokenizer = tokenizer
        self._spelling = Spelling(tokenizer)
        self._vocabulary = vocabulary_of(tokenizer)
        self._grammars = SessionGrammars(tokenizer, self._vocabulary.size)
        # One thread: fast tokenizers keep truncation and padding as mutable state.
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._idle = asyncio.Event()
        self._idle.set()
        self._endings: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Starts connecting to the workers."""
        config, changed = self.config, self._links_changed
        self.targets.links = [
            TargetLink(address, self._vocabulary, config.verify_timeout, changed)
            for address in parse_addresses(config.targets)
        ]
        self.drafts.links = [
            DraftLink(address, self._vocabulary, changed, self.services.metrics.discarded)
            for address in parse_addresses(config.drafts)
        ]
        for link in (*self.targets.links, *self.drafts.links):
            link.start()

    async def close(self) -> None:
        """Waits for sessions that are ending, but not for long, then disconnects."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._idle.wait()
                await asyncio.gather(*self._endings, return_exceptions=True)
        except TimeoutError:
            log.warning("%d sessions were still running or ending", self.sessions + len(self._endings))
        links = (*self.targets.links, *self.drafts.links)
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)
        self._audits.close()
        self.services.judge.close()
        self._planner.shutdown(wait=False, cancel_futures=True)
        await self.store.close()

    @contextmanager
    def admitted(self, sessions: int) -> Iterator[None]:
        """Room for so many sessions. Raises OutriderError(QUEUE_FULL)."""
        limit = self.config.max_sessions
        if self.sessions + sessions > limit:
            message = f"{self.sessions} generations are running, the limit of this orchestrator is {limit}"
            raise OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=1.0)
        self.sessions += sessions
        self._idle.clear()
        try:
            yield
        finally:
            self.sessions -= sessions
            if not self.sessions:
                self._idle.set()

    async def plan(self, request: GenerateRequest) -> list[GenerationPlan]:
        """The plan of each choice. Raises OutriderError: INVALID_FIELD, NO_WORKER."""
        limits = self._limits()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._planner, plan_choices, request, self._tokenizer, limits, self._grammars)

    @asynccontextmanager
    async def session(self, plan: GenerationPlan, request: GenerateRequest) -> AsyncIterator[Session]:
        """A new session, stored; ended in the store and freed at the workers afterwards.

        Raises OutriderError: SESSION_EXISTS, STORE_UNAVAILABLE, ...
        """
        await self._create(plan, request)
        session = self._open(plan)
        try:
            session.begin()
            yield session
        except (asyncio.CancelledError, GeneratorExit):
            self._end(session, orchestrator_pb2.FINISH_REASON_CANCELLED)
            raise
        except Exception as error:
            ending = self._end(session, _finish_reason(error))
            if not isinstance(error, StoreUnavailable):
                # Once the client has its status, GetSession says the same.
                await asyncio.wait({ending})
            raise
        else:
            self._end(session, orchestrator_pb2.FINISH_REASON_UNSPECIFIED)

    def _links_changed(self) -> None:
        self.targets.changed()
        self.shortfalls.changed()

    def _limits(self) -> ServingLimits:
        models = [link.model for link in self.targets.usable if link.model is not None]
        if not models:
            raise self.targets.nobody()
        longest = min(link.max_lookahead for link in self.targets.usable)
        chosen = self.config.fixed_lookahead
        return ServingLimits(
            vocab_size=self._vocabulary.size,
            context_length=min(model.context_length for model in models),
            max_lookahead=min(self.config.max_lookahead, longest),
            default_lookahead=None if chosen is None else min(chosen, self.config.max_lookahead, longest),
            eos_token_ids=tuple(int32s(models[0].eos_token_ids, "eos_token_ids").tolist()),
        )

    async def _create(self, plan: GenerationPlan, request: GenerateRequest) -> None:
        stored = GenerateRequest()
        stored.CopyFrom(request)
        # A record of this choice alone, which says what the request left open.
        stored.ClearField("n")
        stored.session_id, stored.seed, stored.speculation.acceptance = plan.session_id, plan.seed, plan.acceptance
        record = SessionRecord(
            session_id=plan.session_id,
            tokens=plan.prompt,
            prompt_length=len(plan.prompt),
            epoch=FIRST_EPOCH,
            meta=stored.SerializeToString(),
        )
        creating = asyncio.ensure_future(self.store.create(record))
        try:
            await asyncio.shield(creating)
        except asyncio.CancelledError:
            self._in_background(self._undo(creating, plan.session_id))
            raise

    async def _undo(self, creating: Awaitable[None], session_id: str) -> None:
        """Ends a session whose client went while it was stored; it must not look as if it were running."""
        try:
            await creating
            await self.store.finish(session_id, FIRST_EPOCH, orchestrator_pb2.FINISH_REASON_CANCELLED)
        except StoreError as error:
            log.info("session %s was not stored or could not be ended: %s", session_id, error)

    def _open(self, plan: GenerationPlan) -> Session:
        metrics, config = self.services.metrics, self.config
        output = Output(plan.stop, self._spelling, plan.prompt)
        grammar = self._grammars.open(plan.law)
        verifying = Verifying(plan, FIRST_EPOCH, self.targets, metrics, config.failover_timeout, self._vocabulary.size)
        lookahead = SessionLookahead(plan.lookahead, verifying.costs, adaptive=plan.adaptive)
        drafting = Drafting(
            plan, FIRST_EPOCH, self.drafts, lookahead, metrics, self._audits, config.draft_timeout, grammar
        )
        return Session(plan, FIRST_EPOCH, output, drafting, verifying, lookahead, grammar)

    def _end(self, session: Session, reason: "FinishReason.ValueType") -> "asyncio.Task[None]":
        """Frees the workers and ends the session in the store, which may be what failed: neither waits for the other.

        Returns the second as a task.
        """
        self._in_background(session.close())
        return self._in_background(self._finish(session, reason))

    async def _finish(self, session: Session, reason: "FinishReason.ValueType") -> None:
        if not reason or session.output.finish is not None:
            return
        try:
            await self.store.finish(session.plan.session_id, session.epoch, reason)
        except StoreError as error:
            # The session's time-to-live ends it.
            log.warning("session %s could not be ended in the store: %s", session.plan.session_id, error)

    def _in_background(self, ending: Awaitable[None]) -> "asyncio.Task[None]":
        """A client that is gone must not cut the ending short."""
        task: asyncio.Task[None] = asyncio.ensure_future(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task


def _finish_reason(error: Exception) -> "FinishReason.ValueType":
    cancelled = isinstance(error, OutriderError) and error.reason == types_pb2.ERROR_REASON_SESSION_CANCELLED
    return orchestrator_pb2.FINISH_REASON_CANCELLED if cancelled else orchestrator_pb2.FINISH_REASON_ERROR
