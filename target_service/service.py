"""The target service's gRPC side: parses, admits, waits, answers. Nothing here runs the model."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from outrider import __version__
from outrider.lm.engine import Engine
from outrider.lm.engine_load import EngineLoad
from outrider.lm.model_info import model_info
from outrider.lm.warm_up import warm_up
from outrider.net.answers import MAX_ROWS_BYTES, row_bytes
from outrider.net.errors import OutriderError, abort, invalid_field, queue_full, reason_name
from outrider.observe.metrics import WorkerMetrics
from outrider.observe.tracing import Spans, kept
from outrider.observe.worker_spans import WorkerSpans
from outrider.v1 import target_pb2, target_pb2_grpc, types_pb2
from outrider.worker import WorkerHost, loading_error
from target_service.call import Call, Rejected
from target_service.config import TargetConfig
from target_service.job import Job, feature_bytes, parse_item
from target_service.scheduler import Cancel, Release, Submit, TargetCommand, TargetScheduler
from target_service.traced import verified

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
MAX_ITEMS = 1024

Context = grpc.aio.ServicerContext[Any, Any]


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """The servicer together with its host. Lives on the event loop.

    Args:
        config: settings.
        load_engine: loads the model; runs in the engine thread.
        metrics: where the numbers go.
        spans: of what is traced; None traces nothing.
    """

    def __init__(
        self,
        config: TargetConfig,
        load_engine: Callable[[], Engine],
        metrics: WorkerMetrics | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._config, self._load_engine = config, load_engine
        self._metrics = metrics or WorkerMetrics("target")
        self._spans = WorkerSpans(spans) if spans is not None else None
        self._calls: set[Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.host: WorkerHost[TargetCommand, Job] = WorkerHost(
            SERVICE_NAME,
            config,
            build=self._build,
            deliver=self._deliver,
            fail_pending=self._fail_pending,
            drained=self._drained,
        )
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, self.host.server.grpc)
        self.host.watch(self._metrics, self.engine_load, lambda: self.queued)

    async def Verify(self, request: target_pb2.VerifyRequest, context: Context) -> target_pb2.VerifyResponse:
        """Scores a batch; see target.proto."""
        try:
            return await self._verify(request)
        except OutriderError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            if context.cancelled():
                raise
            # Cancelled from inside: without a status the caller would wait for ever (grpc/grpc#29248).
            await abort(context, OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, "the worker ended the call"))

    async def Release(self, request: target_pb2.ReleaseRequest, context: Context) -> target_pb2.ReleaseResponse:
        """Frees sessions; see target.proto."""
        if len(request.sessions) > MAX_ITEMS:
            await abort(context, invalid_field(f"sessions has {len(request.sessions)} entries, limit {MAX_ITEMS}"))
        if self.host.loaded:
            self.host.thread.post(Release([(session.session_id, session.epoch) for session in request.sessions]))
        return target_pb2.ReleaseResponse()

    async def GetInfo(
        self, request: target_pb2.TargetServiceGetInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetInfoResponse:
        """Says what is served; see target.proto."""
        if not self.host.loaded:
            await abort(context, loading_error())
        return target_pb2.TargetServiceGetInfoResponse(
            model=model_info(self._engine.info, include_token_hashes=request.include_token_hashes),
            load=self.load(),
            max_lookahead=self._config.max_lookahead,
            token_budget=self._config.token_budget,
            instance_id=self.host.instance_id,
            max_tree_nodes=self._config.max_lookahead,
            version=__version__,
            hidden_size=self._engine.info.hidden_size,
            layers=self._engine.info.layers if self._engine.info.hidden_size else 0,
        )

    async def _verify(self, request: target_pb2.VerifyRequest) -> target_pb2.VerifyResponse:
        self._admit_call(request)
        call = self._parse(request)
        self._calls.add(call)
        self._idle.clear()
        try:
            if call.unfinished:
                self.host.thread.post(Submit(call.jobs))
                await call.done
            return self._response(call)
        finally:
            self._close(call)

    @property
    def queued(self) -> int:
        """Items that wait for the engine thread. May be asked for in any thread."""
        return sum(call.unfinished for call in self._calls.copy())

    def _admit_call(self, request: target_pb2.VerifyRequest) -> None:
        """Raises OutriderError when no item of the call can be served."""
        refusal = self.host.refusal()
        if refusal is not None:
            raise refusal
        if len(request.items) > MAX_ITEMS:
            raise invalid_field(f"items has {len(request.items)} entries, limit {MAX_ITEMS}")
        if request.items and self.queued >= self._config.max_queue_items:
            raise self._queue_full()

    def _parse(self, request: target_pb2.VerifyRequest) -> Call:
        """Every item becomes a job or a rejection of its own."""
        call = Call()
        seen: set[str] = set()
        items_left = self._config.max_queue_items - self.queued
        bytes_left = MAX_ROWS_BYTES
        for item in request.items:
            try:
                job = self._parse_item(item, call, seen)
                bytes_left -= self._bytes_of(job)
                if call.unfinished >= items_left:
                    raise self._queue_full()
                if bytes_left < 0:
                    raise _answer_full()
            except OutriderError as error:
                call.entries.append(Rejected(item, error))
            else:
                call.entries.append(job)
                call.unfinished += 1
        return call

    def _bytes_of(self, job: Job) -> int:
        """Of its answer, where they are many."""
        rows = 0 if job.needs_law else (len(job.draft_tokens) + 1) * self._row_bytes
        if job.tap is None:
            return rows
        tokens = job.base_length + len(job.draft_tokens) - job.tap.first
        return rows + feature_bytes(tokens, len(job.tap.layers), self._engine.info.hidden_size)

    def _parse_item(self, item: target_pb2.VerifyItem, call: Call, seen: set[str]) -> Job:
        job = parse_item(item, self._engine.info, self._config.max_lookahead, call.finish_one)
        if item.session_id in seen:
            raise invalid_field(f"session_id {item.session_id!r} stands twice in one call")
        seen.add(item.session_id)
        if self._spans is not None:
            job.traceparent = kept(item.traceparent)
        return job

    def _response(self, call: Call) -> target_pb2.VerifyResponse:
        self._metrics.answered(_reason(entry) for entry in call.entries)
        for job in call.jobs:
            if job.work is not None and job.work.first_pass_at is not None:
                self._metrics.waited(job.work.first_pass_at - job.arrived_at)
        return target_pb2.VerifyResponse(results=call.results(), load=self.load())

    def _close(self, call: Call) -> None:
        """Forgets a call; jobs that nobody waits for any more leave the queue."""
        self._calls.discard(call)
        if call.unfinished:
            self.host.thread.post(Cancel(call.jobs))
        if not self._calls:
            self._idle.set()

    def _queue_full(self) -> OutriderError:
        return queue_full("items", self._config.max_queue_items)

    def load(self) -> types_pb2.WorkerLoad:
        """How the worker stands at this moment."""
        return self.engine_load().message(self.queued)

    def engine_load(self) -> EngineLoad:
        """How the engine stands; all 0 while it is not there. May be asked for in any thread."""
        return self._scheduler.load if self.host.loaded else EngineLoad()

    # What the host calls.

    def _build(self) -> TargetScheduler:
        self._engine = self._load_engine()
        self._row_bytes = row_bytes(self._engine.info.vocab_size, self._engine.info.dtype)
        warm_up(self._engine)
        self._scheduler = TargetScheduler(self._engine, self._config, self._metrics)
        return self._scheduler

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.on_done()
            if job.traceparent and self._spans is not None:
                self._spans.item(verified(job))

    def _fail_pending(self, error: OutriderError) -> None:
        for call in self._calls:
            call.fail(error)

    async def _drained(self) -> None:
        await self._idle.wait()


def _answer_full() -> OutriderError:
    message = f"the answer to the items before has {MAX_ROWS_BYTES} bytes already: send fewer items in one call"
    return OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=0.0)


def _reason(entry: Job | Rejected) -> str:
    outcome = entry.error if isinstance(entry, Rejected) else entry.outcome
    return reason_name(outcome.reason) if isinstance(outcome, OutriderError) else "OK"
