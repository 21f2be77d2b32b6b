"""The public gRPC service: what each call answers, and how it ends, whichever way that comes."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from orchestrator.core import Orchestrator
from orchestrator.ending import answer
from orchestrator.generation import GenerationCall
from orchestrator.latency import CHAT, COMPLETION, RESUME, RequestTimes
from orchestrator.names import owned, told
from orchestrator.running import Running
from orchestrator.store.base import FINISHED
from orchestrator.tenants import Caller, TenantOf, by_token
from orchestrator.tracing import traced
from outrider import __version__
from outrider.net.arrays import to_bytes
from outrider.net.errors import OutriderError, abort
from outrider.net.tokens import tenant
from outrider.observe.tracing import Spans
from outrider.v1 import orchestrator_pb2, orchestrator_pb2_grpc, types_pb2
from outrider.v1.orchestrator_pb2 import (
    CancelSessionRequest,
    CancelSessionResponse,
    GenerateRequest,
    GenerateResponse,
    GetSessionRequest,
    GetSessionResponse,
    OrchestratorServiceGetInfoRequest,
    OrchestratorServiceGetInfoResponse,
    ResumeRequest,
)

log = logging.getLogger(__name__)

# Of the year 9999: a Timestamp holds no later one.
_LAST_SECOND = 253_402_300_799

SERVICE_NAME = orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Implements OrchestratorService over an Orchestrator.

    Args:
        tenant_of: who a call is for.
        spans: of what is traced; None traces nothing.
        follows: whether a request is part of the trace that its client names.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        tenant_of: TenantOf = by_token,
        spans: Spans | None = None,
        *,
        follows: bool = True,
    ) -> None:
        self._orchestrator, self._tenant_of, self._spans, self._follows = orchestrator, tenant_of, spans, follows
        self._draining = False
        self.running = Running()

    async def drain(self, grace: float) -> None:
        """Refuses new generations, lets running ones finish for `grace` seconds, and ends the rest with DRAINING."""
        self._draining = True
        self._orchestrator.admission.close(_draining())
        try:
            async with asyncio.timeout(grace):
                await self.running.wait_idle()
        except TimeoutError:
            log.warning("%d generations were still running after %g s of grace", len(self.running), grace)
            self.running.stop_all(_draining())

    async def Generate(  # type: ignore[override]
        self, request: GenerateRequest, context: "grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]"
    ) -> None:
        """Streams one generation, or n of them."""
        operation = CHAT if request.HasField("chat") else COMPLETION
        await self._stream(operation, lambda call: call.run(request), context)

    async def Resume(  # type: ignore[override]
        self, request: ResumeRequest, context: "grpc.aio.ServicerContext[ResumeRequest, GenerateResponse]"
    ) -> None:
        """Streams the rest of a generation."""
        await self._stream(RESUME, lambda call: call.resume(request.session_id, request.offset), context)

    async def _stream(
        self,
        operation: str,
        work: Callable[[GenerationCall], Coroutine[Any, Any, None]],
        context: "grpc.aio.ServicerContext[Any, GenerateResponse]",
    ) -> None:
        """Runs a call to its end, or to its status."""
        try:
            metrics, metadata = self._orchestrator.services.metrics, context.invocation_metadata()
            trace = traced(self._spans, operation, metadata, follows=self._follows)
            with RequestTimes(metrics, operation) as times, trace:
                if self._draining:
                    raise _draining()
                call = GenerationCall(self._orchestrator, self.running, context.write, times, self._caller(context))
                await work(call)
        except (Exception, asyncio.CancelledError) as error:
            failure = answer(error)
            if failure is None:
                raise
            if not isinstance(error, OutriderError | asyncio.CancelledError):
                log.exception("a generation failed")
            await abort(context, failure)  # type: ignore[arg-type]

    def _caller(self, context: "grpc.aio.ServicerContext[Any, GenerateResponse]") -> Caller:
        name, left = self._tenant_of(context), context.time_remaining()
        deadline = math.inf if left is None else asyncio.get_running_loop().time() + left
        return Caller(name, self._orchestrator.tenants.limits(name).weight, deadline)

    async def GetSession(
        self, request: GetSessionRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> GetSessionResponse:
        """The committed state of a session."""
        try:
            record = await self._orchestrator.store.load(owned(request.session_id, tenant()))
            if record is None:
                raise _unknown(request.session_id)
        except OutriderError as error:
            await abort(context, error)
        expire_time = Timestamp()
        expire_time.FromMilliseconds(int(min(record.expires_at, _LAST_SECOND) * 1000))
        finished = record.state == FINISHED
        return GetSessionResponse(
            session_id=told(record.session_id),
            epoch=record.epoch,
            prompt_tokens=record.prompt_length,
            generated_tokens=to_bytes(record.tokens[record.prompt_length :]),
            state=orchestrator_pb2.SESSION_STATE_FINISHED if finished else orchestrator_pb2.SESSION_STATE_RUNNING,
            finish_reason=orchestrator_pb2.FinishReason.ValueType(record.finish_reason),
            expire_time=expire_time,
        )

    async def CancelSession(
        self, request: CancelSessionRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> CancelSessionResponse:
        """Ends a session, whichever replica runs it: its next commit is refused."""
        try:
            name = owned(request.session_id, tenant())
            if not await self._orchestrator.store.request_cancel(name):
                raise _unknown(request.session_id)
        except OutriderError as error:
            await abort(context, error)
        message = f"session {request.session_id} was cancelled"
        self.running.stop(name, OutriderError(types_pb2.ERROR_REASON_SESSION_CANCELLED, message))
        return CancelSessionResponse()

    async def GetInfo(
        self, request: OrchestratorServiceGetInfoRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> OrchestratorServiceGetInfoResponse:
        """What is served, by whom."""
        models = [link.model for link in self._orchestrator.targets.usable if link.model is not None]
        return OrchestratorServiceGetInfoResponse(
            version=__version__,
            target=models[0] if models else None,
            max_lookahead=self._orchestrator.config.max_lookahead,
            default_lookahead=self._orchestrator.config.fixed_lookahead,
            workers=self._orchestrator.shortfalls.statuses(),
            running_sessions=len(self.running),
        )


def _draining() -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_DRAINING, "the orchestrator is shutting down")


def _unknown(session_id: str) -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_SESSION_NOT_FOUND, f"session {session_id} is unknown or expired")
