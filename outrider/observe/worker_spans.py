"""The spans of a worker: one for each item of a session, and one for each forward pass, linked to the sessions in
it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind

from outrider.lm.passes import Pass
from outrider.observe.tracing import Attributes, Spans, child, epoch_nanos, remote_context


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
    """Lives on the event loop; the spans are made elsewhere, in the order in which the items ended."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def item(self, item: Item | None) -> None:
        """An item has ended. No effect where it is not traced."""
        if item is not None and item.traceparent:
            self._spans.later(partial(_item_spans, self._spans, item, time.monotonic()))


def _item_spans(spans: Spans, item: Item, ended: float) -> list[ReadableSpan]:
    """The spans of an item, and those of its passes that have none yet."""
    parent, now = remote_context(item.traceparent), time.monotonic()
    if not parent.trace_flags.sampled:
        return []
    context = child(parent)
    begins, ends = epoch_nanos(item.began, now), epoch_nanos(ended, now)
    links = [each.span for each in item.passes if each.span is not None]
    own = {"context": context, "kind": SpanKind.SERVER, "links": links, "error": item.error}
    made = [spans.ended(item.name, parent, begins, ends, item.attributes, **own)]  # type: ignore[arg-type]
    if item.first_pass_at is not None and item.first_pass_at > item.began:
        made.append(spans.ended("queue", context, begins, epoch_nanos(item.first_pass_at, now)))
    return made + _forward(spans, context, item, now) if item.passes else made


def _forward(spans: Spans, parent: SpanContext, item: Item, now: float) -> list[ReadableSpan]:
    """From the first pass that was not over when the item came to the last one."""
    first, last = item.passes[0], item.passes[-1]
    began, ended = max(first.began, item.began), last.began + last.micros / 1e6
    if ended <= item.began:
        return []
    context, times = child(parent), (epoch_nanos(began, now), epoch_nanos(ended, now))
    told = {"outrider.passes": len(item.passes), "outrider.positions.batch": last.positions}
    made = [spans.ended("forward", parent, *times, told, context=context)]
    for each in item.passes:
        if each.span is None:
            each.span = child(context)
            made.append(_pass(spans, context, each, each.span, now))
    return made


def _pass(spans: Spans, parent: SpanContext, one: Pass, context: SpanContext, now: float) -> ReadableSpan:
    return spans.ended(
        "pass",
        parent,
        epoch_nanos(one.began, now),
        epoch_nanos(one.began + one.micros / 1e6, now),
        {"outrider.pass.items": one.items, "outrider.pass.positions": one.positions},
        context=context,
        links=[remote_context(each) for each in one.traceparents],
    )
