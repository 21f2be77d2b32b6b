"""Spans that are made after the fact, and the trace context that messages carry.

Nothing here is a context manager on a hot path: who is traced notes a few moments, and says how spans are made of them.
That is done when they are sent, by the thread that sends them; for a collector that does not answer it is not done at
all. Ids that a message names before its span exists are drawn beforehand.
"""

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from outrider import __version__

HEADER = "traceparent"
# W3C trace context: version 00, or a later one that begins the same, and may go on, within reason.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{,200})?")
# Sampled, and random trace id; what else a peer may set is not passed on.
_KNOWN_FLAGS = 0x03

Attributes = Mapping[str, AttributeValue]
# Makes spans of what was noted; called once, by another thread.
Make: TypeAlias = Callable[[], Sequence[ReadableSpan]]

_OK = Status(StatusCode.UNSET)


def traceparent(context: SpanContext) -> str:
    """The context as W3C writes it."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def remote_context(header: str) -> SpanContext:
    """The context that a peer sent; an invalid one for whatever is none."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or (found[1] == "00" and found[5]):
        return INVALID_SPAN_CONTEXT
    trace_id, span_id, flags = (int(part, 16) for part in found.groups()[1:4])
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & _KNOWN_FLAGS))
    return context if context.is_valid else INVALID_SPAN_CONTEXT


def kept(header: str) -> str:
    """A header that came in a message, as long as it is worth keeping: "" unless it is the context of a trace that is
    recorded."""
    return header if header and remote_context(header).trace_flags.sampled else ""


def new_span_id() -> int:
    """In [1, 2^64), for a span that is made later."""
    return random.getrandbits(64) or 1


def child(parent: SpanContext, span_id: int = 0) -> SpanContext:
    """The context of a span in the same trace; 0 draws its id."""
    return SpanContext(parent.trace_id, span_id or new_span_id(), False, parent.trace_flags)


def epoch_nanos(moment: float, now: float) -> int:
    """A moment of a monotonic clock, which says `now`, as Unix time."""
    return time.time_ns() - int((now - moment) * 1e9)


class Spans:
    """Makes the spans of a process.

    Args:
        later: takes what makes spans; called by the event loop's thread.
        scope: name of what makes the spans.
    """

    def __init__(self, provider: TracerProvider, later: Callable[[Make], None], scope: str) -> None:
        self._tracer, self._resource = provider.get_tracer(scope, __version__), provider.resource
        self._scope = InstrumentationScope(scope, __version__)
        self.later = later

    def begin(
        self, name: str, parent: SpanContext, kind: SpanKind, attributes: Attributes, links: Sequence[SpanContext] = ()
    ) -> Span:
        """A span that begins now; the sampler decides whether it is recorded. Never the current one by itself."""
        within = set_span_in_context(NonRecordingSpan(parent), Context())
        return self._tracer.start_span(name, within, kind, attributes, [Link(each) for each in links])

    def ended(
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
    ) -> ReadableSpan:
        """A span that has ended, of a trace that is sampled.

        Args:
            start, end: Unix time in nanoseconds.
            context: its own, from `child`; a new one without.
            error: what went wrong; empty for a span without an error.
        """
        attributes = attributes or {}
        return ReadableSpan(
            name,
            context or child(parent),
            parent,
            self._resource,
            {**attributes, "error.type": error} if error else attributes,
            events,
            [Link(each) for each in links],
            kind,
            status=Status(StatusCode.ERROR, error) if error else _OK,
            start_time=start,
            end_time=max(start, end),
            instrumentation_scope=self._scope,
        )
