"""The spans of a worker: one for each item of a session, and one for each forward pass, linked to the sessions in
it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanContext, SpanKind

from outrider.lm.passes import Pass
from outrider.observe.tracing import Attributes, Spans, epoch_nanos, remote_context


@dataclass(frozen=True)
class Item:
    """What a worker did for a session, and has just ended.

    Attributes:
        traceparent: of the round that it did it for.
        began: when it came, or was begun unasked, in monotonic seconds.
        first_pass_at: of the first pass that it is in; None without one.
        passes: that it is in.
        error: why it came to nothing; empty when it did not.
    """

    name: str
    traceparent: str
    began: float
    first_pass_at: float | None
    passes: Sequence[Pass]
    attributes: Attributes
    error: str = ""


class WorkerSpans:
    """Lives on the event loop."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def item(self, item: Item | None) -> None:
        """Makes the spans of an item, and those of its passes that have none yet. No effect where it is not sampled."""
        parent = remote_context(item.traceparent) if item is not None else None
        if item is None or parent is None or not parent.trace_flags.sampled:
            return
        now = time.monotonic()
        begins = epoch_nanos(item.began, now)
        context = self._spans.child(parent)
        links = [each.span for each in item.passes if each.span is not None]
        if item.first_pass_at is not None and item.first_pass_at > item.began:
            self._spans.record("queue", context, begins, epoch_nanos(item.first_pass_at, now))
        if item.passes:
            self._forward(context, item, now)
        self._spans.record(
            item.name,
            parent,
            begins,
            epoch_nanos(now, now),
            item.attributes,
            context=context,
            kind=SpanKind.SERVER,
            links=links,
            error=item.error,
        )

    def _forward(self, parent: SpanContext, item: Item, now: float) -> None:
        """From the first pass that was not over when the item came to the last one."""
        first, last = item.passes[0], item.passes[-1]
        began, ended = max(first.began, item.began), last.began + last.micros / 1e6
        if ended <= item.began:
            return
        context = self._spans.record(
            "forward",
            parent,
            epoch_nanos(began, now),
            epoch_nanos(ended, now),
            {"outrider.passes": len(item.passes), "outrider.positions.batch": last.positions},
        )
        for each in item.passes:
            if each.span is None:
                each.span = self._pass(context, each, now)

    def _pass(self, parent: SpanContext, one: Pass, now: float) -> SpanContext:
        return self._spans.record(
            "pass",
            parent,
            epoch_nanos(one.began, now),
            epoch_nanos(one.began + one.micros / 1e6, now),
            {"outrider.pass.items": one.items, "outrider.pass.positions": one.positions},
            links=[remote_context(each) for each in one.traceparents],
        )
