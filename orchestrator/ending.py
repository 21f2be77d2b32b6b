"""How a call ends, told from the error that ended its handler, and how its session does."""

import asyncio

import grpc

from orchestrator.running import being_cancelled, interrupted
from outrider.net.errors import OutriderError, reason_name
from outrider.observe.catalogue import CANCELLED
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


def answer(error: BaseException) -> OutriderError | None:
    """What the client of a call that ended so is told; None where the client has cancelled it, or is gone.

    To be asked in the task of the call: its handler is cancelled with it, and not when what it awaited was.
    """
    match error:
        case OutriderError():
            return error
        case asyncio.CancelledError():
            return None if being_cancelled() else interrupted()
        case grpc.aio.BaseError():
            return None
        case _:
            return OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, "the orchestrator failed, see its log")


def error_type(error: BaseException | None) -> str:
    """How a call ended, as metrics and spans say it: the reason that its client is told, CANCELLED where there is
    nobody to tell, empty where it ended well. As with `answer`, to be asked in the call's task."""
    if error is None:
        return ""
    told = answer(error)
    return reason_name(told.reason) if told is not None else CANCELLED


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
