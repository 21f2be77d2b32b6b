"""One map of errors: reason -> gRPC code, exception <-> google.rpc.Status.

Callers act on the reason, people read the message.
"""

import math
from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from outrider.v1 import types_pb2
from outrider.v1.types_pb2 import ErrorReason

DOMAIN = "outrider"
_PREFIX = "ERROR_REASON_"
_QUEUE_RETRY_SECONDS = 0.1
_REASONS = frozenset(types_pb2.ErrorReason.keys()) - {_PREFIX + "UNSPECIFIED"}
_MAX_MESSAGE_BYTES = 1_000
# Of what a peer says.
_LONGEST_RETRY_SECONDS = 86_400.0

CODES: dict[ErrorReason.ValueType, grpc.StatusCode] = {
    types_pb2.ERROR_REASON_SESSION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    types_pb2.ERROR_REASON_PREFIX_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    types_pb2.ERROR_REASON_VOCAB_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    types_pb2.ERROR_REASON_STALE_EPOCH: grpc.StatusCode.ABORTED,
    types_pb2.ERROR_REASON_QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    types_pb2.ERROR_REASON_DRAINING: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_NON_FINITE_LOGITS: grpc.StatusCode.INTERNAL,
    types_pb2.ERROR_REASON_INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    types_pb2.ERROR_REASON_CONTEXT_EXCEEDED: grpc.StatusCode.OUT_OF_RANGE,
    types_pb2.ERROR_REASON_SESSION_CANCELLED: grpc.StatusCode.ABORTED,
    types_pb2.ERROR_REASON_SESSION_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    types_pb2.ERROR_REASON_NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_STORE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_NO_PROGRESS: grpc.StatusCode.INTERNAL,
    types_pb2.ERROR_REASON_ENGINE_FAILED: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_REASON_SESSION_CORRUPT: grpc.StatusCode.DATA_LOSS,
}


class OutriderError(Exception):
    """A failure with a reason that the caller acts on.

    Attributes:
        reason: one of ErrorReason.
        message: for people; names the field and the limit where there is one.
        retry_after: seconds until a retry makes sense, or None.
    """

    def __init__(self, reason: ErrorReason.ValueType, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC code of the reason."""
        return CODES[self.reason]


def invalid_field(message: str) -> OutriderError:
    """INVALID_ARGUMENT; the message starts with the field's name."""
    return OutriderError(types_pb2.ERROR_REASON_INVALID_FIELD, message)


def queue_full(what: str, limit: int) -> OutriderError:
    """RESOURCE_EXHAUSTED: a queue holds as many of `what` as it may; there is room again within a pass or two."""
    message = f"{limit} {what} wait already, which is the limit"
    return OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, message, retry_after=_QUEUE_RETRY_SECONDS)


def reason_name(reason: ErrorReason.ValueType) -> str:
    """The reason as ErrorInfo spells it."""
    return types_pb2.ErrorReason.Name(reason).removeprefix(_PREFIX)


def to_status(error: OutriderError) -> Status:
    """google.rpc.Status with ErrorInfo, and RetryInfo when the error says when to come back."""
    details = [_packed(ErrorInfo(domain=DOMAIN, reason=reason_name(error.reason)))]
    if error.retry_after is not None:
        fraction, whole = math.modf(error.retry_after)
        details.append(_packed(RetryInfo(retry_delay=Duration(seconds=int(whole), nanos=int(fraction * 1e9)))))
    return Status(code=error.code.value[0], message=_short(error.message), details=details)


def from_status(status: Status) -> OutriderError:
    """The error that a status carries; a status that no Outrider service made becomes ENGINE_FAILED. Never raises."""
    reason: ErrorReason.ValueType = types_pb2.ERROR_REASON_ENGINE_FAILED
    retry_after = None
    for detail in status.details:
        info, retry = ErrorInfo(), RetryInfo()
        if _unpacked(detail, info) and info.domain == DOMAIN and _PREFIX + info.reason in _REASONS:
            reason = types_pb2.ErrorReason.Value(_PREFIX + info.reason)
        elif _unpacked(detail, retry):
            seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
            retry_after = min(max(0.0, seconds), _LONGEST_RETRY_SECONDS)
    return OutriderError(reason, status.message, retry_after=retry_after)


def from_rpc_error(error: grpc.RpcError) -> OutriderError | None:
    """The error inside a failed call, or None when the failure is the transport's own. Never raises."""
    try:
        status = rpc_status.from_call(error)
    except (DecodeError, ValueError):
        # The peer's own, in a status that contradicts the call's, or that is none.
        return OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, error.details() or "a status that is none")
    return from_status(status) if status is not None else None


async def abort(context: "grpc.aio.ServicerContext[object, object]", error: OutriderError) -> NoReturn:
    """Ends the call with the error's status."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returned")


def _short(message: str) -> str:
    """A status travels in trailers, twice, and peers refuse trailers above 8 KiB: the call would lose its reason."""
    data = message.encode("utf-8", "replace")
    if len(data) <= _MAX_MESSAGE_BYTES:
        return data.decode()
    return data[:_MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + " ..."


def _unpacked(detail: Any, message: ErrorInfo | RetryInfo) -> bool:
    try:
        return detail.Unpack(message)
    except DecodeError:
        return False


def _packed(message: ErrorInfo | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
