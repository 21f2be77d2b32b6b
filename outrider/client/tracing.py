"""The span of a generation at its client: the root of its trace, or a child of whatever the application has open.

Without a tracer provider of the application nothing is recorded, and a trace that came from elsewhere is passed on.
"""

from types import TracebackType

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from outrider import __version__
from outrider.client.progress import Progress
from outrider.net.errors import OutriderError, from_rpc_error, reason_name
from outrider.observe.tracing import HEADER, traceparent

Metadata = tuple[tuple[str, str], ...]


class GenerationSpan:
    """One span for all calls of a generation. As a context manager ends with it; never the current span by itself, for
    between two tokens the application's code runs.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._calls = progress, 0

    def __enter__(self) -> "GenerationSpan":
        tracer = trace.get_tracer("outrider.client", __version__)
        attributes = {"gen_ai.provider.name": "outrider", "outrider.session_id": self._progress.session_id}
        self._span = tracer.start_span("outrider generation", kind=SpanKind.CLIENT, attributes=attributes)
        return self

    def call(self, metadata: Metadata) -> Metadata:
        """The metadata of the next call."""
        self._calls += 1
        context = self._span.get_span_context()
        return (*metadata, (HEADER, traceparent(context))) if context.is_valid else metadata

    def lost(self, error: grpc.RpcError) -> None:
        """A call has ended, and another one goes on."""
        if self._span.is_recording():
            details = {"server.address": self._progress.address, "error.type": _name(error)}
            self._span.add_event("call lost", {**details, "outrider.received": self._progress.received})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        progress, span = self._progress, self._span
        span.set_attributes({"outrider.calls": self._calls, "outrider.resumed": self._calls > 1})
        if progress.finish is not None:
            usage = progress.finish.usage
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        if isinstance(error, Exception):
            span.set_attribute("error.type", _name(error))
            span.set_status(StatusCode.ERROR, _name(error))
        elif error is not None:
            # Whoever stops before the end has what it wanted.
            span.set_attribute("error.type", "CANCELLED")
        span.end()


def _name(error: BaseException) -> str:
    refusal = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
    if isinstance(refusal, OutriderError):
        return reason_name(refusal.reason)
    return error.code().name if isinstance(error, grpc.RpcError) else type(error).__name__
