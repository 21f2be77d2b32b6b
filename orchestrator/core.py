"""The orchestrator without its server: pools of workers, the store, and the life of a session."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from orchestrator.admission import Admission
from orchestrator.choices import plan_choices
from orchestrator.config import OrchestratorConfig
from orchestrator.discovery import Resolve, parse_sources, resolve
from orchestrator.drafting import Drafting
from orchestrator.ending import finish_reason
from orchestrator.gauges import watch
from orchestrator.judge import Judge
from orchestrator.links.draft import DraftLink
from orchestrator.links.target import TargetLink
from orchestrator.lookahead import SessionLookahead
from orchestrator.metrics import Metrics
from orchestrator.names import drafts_for
from orchestrator.pool import DraftPool, TargetPool
from orchestrator.records import FIRST_EPOCH, name_at_targets, new_record, repeats, request_of
from orchestrator.replay import Replay, replay
from orchestrator.request import GenerationPlan, ServingLimits
from orchestrator.round import Services
from orchestrator.session import Session
from orchestrator.shortfalls import Shortfalls
from orchestrator.store import fence
from orchestrator.store.base import RUNNING, SessionRecord, SessionStore, StoreError, StoreUnavailable
from orchestrator.store.metered import MeteredStore
from orchestrator.tenants import ANYONE, Caller, Tenants
from orchestrator.text.detokenizer import Spelling
from orchestrator.text.output import Output
from orchestrator.tracing import RequestTrace
from orchestrator.turn import Turn
from orchestrator.verifying import Verifying
from outrider.law.audit import audit_each
from outrider.law.batch import ENTRIES_PER_CALL
from outrider.lm.grammars import SessionGrammars
from outrider.lm.tokenizer import vocabulary_of
from outrider.net.arrays import int32s
from outrider.net.errors import invalid_field
from outrider.net.tokens import tenant
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import FinishReason, GenerateRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

# Ending a session takes one write to the store and one call to a target, each with a deadline of its own.
CLOSE_SECONDS = 10.0


class Orchestrator:
    """Everything that sessions share. Lives on one event loop."""

    def __init__(
        self,
        config: OrchestratorConfig,
        tokenizer: PreTrainedTokenizerBase,
        store: SessionStore,
        metrics: Metrics,
        resolve: Resolve = resolve,
        tenants: Tenants | None = None,
    ) -> None:
        self.config = config
        self._resolve = resolve
        self.tenants = tenants or Tenants()
        self.admission = Admission(config, self.tenants, metrics)
        self.store = store = MeteredStore(store, metrics.stored)
        self.targets = TargetPool()
        self.drafts = DraftPool(config.draft_hedge)
        self.shortfalls = Shortfalls(self.targets, self.drafts, config.max_lookahead)
        self.services = Services(Judge(), store, metrics)
        self._audits = Turn(audit_each, lambda claim: len(claim.law.token_ids), ENTRIES_PER_CALL)
        self._target_tls = config.worker_tls(config.target_tls_name)
        self._draft_tls = config.worker_tls(config.draft_tls_name)
        self._tokenizer = tokenizer
        self._spelling = Spelling(tokenizer)
        self._vocabulary = vocabulary_of(tokenizer)
        self._grammars = SessionGrammars(tokenizer, self._vocabulary.size)
        # One thread: fast tokenizers keep truncation and padding as mutable state.
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._endings: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Starts connecting to the workers."""
        config, vocabulary, changed = self.config, self._vocabulary, self._links_changed
        metrics = self.services.metrics
        watch(metrics.instruments, self.admission, self.targets, self.drafts, self.store)

        def target(address: str) -> TargetLink:
            return TargetLink(
                *(address, vocabulary, config.verify_timeout, changed, self._target_tls, metrics.batched),
                model=config.target_model,
            )

        def draft(address: str) -> DraftLink:
            return DraftLink(address, vocabulary, changed, metrics.discarded, self._draft_tls)

        self.targets.follow(parse_sources(config.targets), target, self._resolve)
        self.drafts.follow(parse_sources(config.drafts), draft, self._resolve)

    async def close(self) -> None:
        """Waits for sessions that are ending, but not for long, then disconnects."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.admission.wait_idle()
                await asyncio.gather(*self._endings, return_exceptions=True)
        except TimeoutError:
            log.warning("%d sessions were still running or ending", self.sessions + len(self._endings))
        await asyncio.gather(self.targets.close(), self.drafts.close())
        self._audits.close()
        self.services.judge.close()
        self._planner.shutdown(wait=False, cancel_futures=True)
        await self.store.close()

    @property
    def sessions(self) -> int:
        """Generations that were let in and have not ended."""
        return self.admission.sessions

    async def plan(self, request: GenerateRequest) -> list[GenerationPlan]:
        """The plan of each choice. Raises OutriderError: INVALID_FIELD, NO_WORKER."""
        return await self._off_loop(plan_choices, request, self._tokenizer, self._limits(), self._grammars)

    async def repeats(self, request: GenerateRequest) -> bool:
        """Whether a request is one that was sent before, for a session that outlives its stream."""
        record = await self.store.load(request.session_id) if request.resumable else None
        return record is not None and repeats(record, request)

    async def take_over(self, session_id: str, offset: int) -> Replay:
        """The session as it was left; when it runs, this process is its owner from now on.

        Raises OutriderError: SESSION_NOT_FOUND, INVALID_FIELD, NO_WORKER, STORE_UNAVAILABLE.
        """
        record = await self.store.load(session_id)
        if record is None:
            raise fence.gone(session_id)
        generated = len(record.tokens) - record.prompt_length
        if offset > generated:
            raise invalid_field(f"offset is {offset}, must be in [0, {generated}]")
        # Before the take-over: a replica that cannot serve a session leaves it to whoever has it.
        (plan,) = await self.plan(request_of(record, self._vocabulary.size))
        if record.state == RUNNING:
            record = await self.store.take_over(session_id)
            self.services.metrics.resumed()
        return await self._off_loop(self._as_left, plan, record)

    @asynccontextmanager
    async def session(
        self, plan: GenerationPlan, request: GenerateRequest, caller: Caller = ANYONE
    ) -> AsyncIterator[Session]:
        """A new session, stored; then as `resumed`.

        Raises OutriderError: SESSION_EXISTS, STORE_UNAVAILABLE, ...
        """
        record = new_record(plan, request)
        await self._create(record, plan)
        async with self.resumed(self._as_left(plan, record), caller) as session:
            yield session

    @asynccontextmanager
    async def resumed(self, left: Replay, caller: Caller = ANYONE) -> AsyncIterator[Session]:
        """A session of this process, as it was left; freed at the workers and ended in the store afterwards, unless it
        is to be resumed.
        """
        session, resumable = self._open(left, caller), left.plan.resumable
        try:
            session.begin()
            yield session
        except (asyncio.CancelledError, GeneratorExit) as error:
            self._end(session, finish_reason(error, resumable=resumable))
            raise
        except Exception as error:
            reason = finish_reason(error, resumable=resumable)
            if reason == orchestrator_pb2.FINISH_REASON_ERROR:
                session_id = left.plan.session_id
                log.warning("session %s has failed: %s", session_id, error, extra={"session_id": session_id})
            ending = self._end(session, reason)
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
            default_nodes=self.config.tree_nodes,
            eos_token_ids=tuple(int32s(models[0].eos_token_ids, "eos_token_ids").tolist()),
        )

    async def _create(self, record: SessionRecord, plan: GenerationPlan) -> None:
        creating = asyncio.ensure_future(self.store.create(record))
        try:
            await asyncio.shield(creating)
        except asyncio.CancelledError:
            self._in_background(self._undo(creating, plan))
            raise

    async def _undo(self, creating: Awaitable[None], plan: GenerationPlan) -> None:
        """Ends a session whose client went while it was stored; it must not look as if it were running."""
        try:
            await creating
            if not plan.resumable:
                await self.store.finish(plan.session_id, FIRST_EPOCH, orchestrator_pb2.FINISH_REASON_CANCELLED)
        except StoreError as error:
            name = plan.session_id
            log.info("session %s was not stored or could not be ended: %s", name, error, extra={"session_id": name})

    def _as_left(self, plan: GenerationPlan, record: SessionRecord) -> Replay:
        output = Output(plan.stop, self._spelling, plan.prompt)
        return replay(plan, record, output, self._grammars.open(plan.law))

    def _open(self, left: Replay, caller: Caller) -> Session:
        metrics, config = self.services.metrics, self.config
        plan, epoch, grammar = left.plan, left.record.epoch, left.grammar
        name, vocab_size = name_at_targets(left.record), self._vocabulary.size
        verifying = Verifying(plan, name, epoch, self.targets, metrics, config.failover_timeout, vocab_size, caller)
        lookahead = SessionLookahead(plan.lookahead, verifying.costs, adaptive=plan.adaptive)
        drafting = Drafting(
            plan,
            epoch,
            self.drafts,
            lookahead,
            metrics,
            self._audits,
            config.draft_timeout,
            grammar,
            drafts_for(tenant(), caller.tenant),
        )
        request = RequestTrace.current()
        trace = request.session(plan) if request is not None else None
        return Session(plan, epoch, left.record.tokens, left.output, drafting, verifying, lookahead, grammar, trace)

    def _end(self, session: Session, reason: "FinishReason.ValueType") -> "asyncio.Task[None]":
        """Frees the workers and ends the session in the store, which may be what failed: neither waits for the other.

        Returns the second as a task.
        """
        self.services.metrics.session_ended(session.drafted, session.accepted)
        self._in_background(session.close())
        return self._in_background(self._finish(session, reason))

    async def _finish(self, session: Session, reason: "FinishReason.ValueType") -> None:
        if not reason or session.output.finish is not None:
            return
        try:
            await self.store.finish(session.plan.session_id, session.epoch, reason)
        except StoreError as error:
            # The session's time-to-live ends it.
            name = session.plan.session_id
            log.warning("session %s could not be ended in the store: %s", name, error, extra={"session_id": name})

    async def _off_loop(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._planner, work, *arguments)

    def _in_background(self, ending: Awaitable[None]) -> "asyncio.Task[None]":
        """A client that is gone must not cut the ending short."""
        task: asyncio.Task[None] = asyncio.ensure_future(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task
