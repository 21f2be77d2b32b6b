"""Requests that are no protobuf message: gRPC would call them INTERNAL, as if the fault were ours."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.net.errors import abort, invalid_field


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT to a unary request that cannot be parsed, for example text that is not UTF-8."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handlers of unary requests; streams parse message by message and are left alone."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return make(
            _refusing(behaviour),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


class _Malformed:
    """Stands in for a request that could not be parsed."""


def _tolerant(deserialise: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialise is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError:
            return _Malformed()

    return parse


def _refusing(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def handle(request: Any, context: Any) -> Any:
        if isinstance(request, _Malformed):
            await abort(
                context, invalid_field("the request is no valid message: broken encoding, or text that is not UTF-8")
            )
        return await behaviour(request, context)

    return handle
