"""Spans that are made after the fact, and the trace context that messages carry.

Nothing here is a context manager on a hot path: who is traced notes a few moments, and makes the spans of what has
ended in one go. Ids that a message names before its span exists are drawn beforehand.
"""

import re
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from outrider import __version__

HEADER = "traceparent"
# W3C trace context: version 00, or a later one that begins the same.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")

Attributes = Mapping[str, AttributeValue]
Event = tuple[str, int, Attributes]


def traceparent(context: SpanContext) -> str:
    """The context as W3C writes it."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def remote_context(header: str) -> SpanContext:
    """The context that a peer sent; an invalid one for whatever is none."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None:
        return INVALID_SPAN_CONTEXT
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def epoch_nanos(moment: float, now: float) -> int:
    """A moment of a monotonic clock, which says `now`, as Unix time."""
    return time.time_ns() - int((now - moment) * 1e9)


class SpanIds(RandomIdGenerator):
    """Random ids, but for the one span whose id was drawn before.

    Attributes:
        planned: of the span that is started next; 0 for a random one.
    """

    planned = 0

    def generate_span_id(self) -> int:
        """The planned id, once."""
        planned, self.planned = self.planned, 0
        return planned or super().generate_span_id()


class Spans:
    """Makes the spans of a process. Used by one thread, that of the event loop.

    Args:
        ids: those of the provider.
        scope: name of what makes the spans.
    """

    def __init__(self, provider: TracerProvider, ids: SpanIds, scope: str) -> None:
        self._tracer, self._ids = provider.get_tracer(scope, __version__), ids

    def begin(self, name: str, parent: SpanContext, kind: SpanKind, attributes: Attributes) -> Span:
        """A span that begins now; the sampler decides whether it is recorded. Never the current one by itself."""
        return self._tracer.start_span(name, _within(parent), kind, attributes)

    def child(self, parent: SpanContext) -> SpanContext:
        """The context of a span that `record` makes later; `parent` is sampled."""
        return SpanContext(parent.trace_id, self._ids.generate_span_id(), False, parent.trace_flags)

    def record(
        self,
        name: str,
        parent: SpanContext,
        start: int,
        end: int,
        attributes: Attributes | None = None,
        *,
        context: SpanContext | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[SpanContext] = (),
        events: Sequence[Event] = (),
        error: str = "",
    ) -> SpanContext:
        """A span that has ended.

        Args:
            start, end: Unix time in nanoseconds.
            context: its own, from `child`; a new one without.
            error: what went wrong; empty for a span without an error.
        """
        self._ids.planned = context.span_id if context is not None else 0
        linked = [Link(each) for each in links]
        span = self._tracer.start_span(name, _within(parent), kind, attributes, linked, start_time=start)
        for event, moment, details in events:
            span.add_event(event, details, moment)
        if error:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR, error)
        span.end(max(start, end))
        return span.get_span_context()


def _within(parent: SpanContext) -> Context:
    return set_span_in_context(NonRecordingSpan(parent), Context())
