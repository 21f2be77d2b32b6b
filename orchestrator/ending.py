"""How a session ends, told from how its call ended."""

import asyncio

import grpc

from outrider.net.errors import OutriderError
from outrider.v1 import orchestrator_pb2, types_pb2
from outrider.v1.orchestrator_pb2 import FinishReason

# With these a resumable session has not ended: another replica goes on with it, or this one later.
_INTERRUPTIONS = {
    types_pb2.ERROR_REASON_DRAINING,
    types_pb2.ERROR_REASON_ENGINE_FAILED,
    types_pb2.ERROR_REASON_NO_WORKER,
    types_pb2.ERROR_REASON_QUEUE_FULL,
    types_pb2.ERROR_REASON_STALE_EPOCH,
    types_pb2.ERROR_REASON_STORE_UNAVAILABLE,
}


def finish_reason(error: BaseException, *, resumable: bool) -> "FinishReason.ValueType":
    """The end of a session whose call ended with the error; unspecified when it waits for its next owner instead."""
    if resumable and _interrupts(error):
        return orchestrator_pb2.FINISH_REASON_UNSPECIFIED
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return orchestrator_pb2.FINISH_REASON_CANCELLED
    cancelled = isinstance(error, OutriderError) and error.reason == types_pb2.ERROR_REASON_SESSION_CANCELLED
    return orchestrator_pb2.FINISH_REASON_CANCELLED if cancelled else orchestrator_pb2.FINISH_REASON_ERROR


def _interrupts(error: BaseException) -> bool:
    """Whether an error is about the call, its client or a worker, and not about the session itself."""
    if isinstance(error, OutriderError):
        return error.reason in _INTERRUPTIONS
    return isinstance(error, (asyncio.CancelledError, GeneratorExit, grpc.aio.BaseError))
