"""Draws docs/trace.svg: the beginning of one request's trace, from the spans that a collector received.

    python -m bench.trace_picture

Runs three services with synthetic models (a pass of the target takes 12 ms, a step of the draft 2 ms) and two requests
at a time; the collector is oteltap.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from bench.tracing_cost import environment
from bench.wire_bytes import service, until_linked
from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.collector import attributes, collector
from tests.harness.orchestrator import ask

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

TARGET, DRAFT = "synthetic:vocab_size=26,seed=5,pass_ms=12", "synthetic:vocab_size=26,seed=5,noise=0.3,pass_ms=2"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "trace.svg"
ROW, LABEL, WIDTH = 17, 250, 900
COLOURS = {"draft": "#2a9d8f", "verify block": "#b5651d", "pass": "#8a5a44", "round": "#5b6c8f", "wait": "#d1495b"}


def ordered(spans: Sequence["Span"], rounds: int) -> "list[tuple[int, Span]]":
    """(depth, span) of the call and its first rounds, every span before its children."""
    children = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.start_time_unix_nano):
        children[span.parent_span_id].append(span)
    (call,) = [span for span in spans if span.name.endswith("/Generate")]
    found = [(0, call)]

    def add(span: "Span", depth: int) -> None:
        found.append((depth, span))
        for child in children[span.span_id]:
            add(child, depth + 1)

    for one in [span for span in children[call.span_id] if span.name == "round"][:rounds]:
        add(one, 1)
    return found


def label(span: "Span") -> str:
    """What stands beside a bar."""
    told = attributes(span)
    name = span.name.removeprefix("outrider.v1.OrchestratorService/")
    if name == "round":
        reason = told.get("outrider.plain_reason", "")
        return f"round {told['outrider.accepted']}/{told['outrider.drafted']} {reason}".rstrip()
    return f"{name}, {told['outrider.pass.items']} items" if name == "pass" else name


def colour(name: str) -> str:
    """By what a span is about."""
    if "wait" in name or name == "queue":
        return COLOURS["wait"]
    return next((value for key, value in COLOURS.items() if name.startswith(key)), "#7f8fa6")


def picture(rows: "Sequence[tuple[int, Span]]") -> str:
    """The SVG."""
    start = rows[0][1].start_time_unix_nano
    end = max(span.end_time_unix_nano for _, span in rows[1:])
    scale, height = (WIDTH - LABEL - 60) / (end - start), ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="11" '
        'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">',
        "<title>The beginning of a trace</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, (depth, span) in enumerate(rows):
        y = ROW * (index + 1)
        left = LABEL + (span.start_time_unix_nano - start) * scale
        width = max(1.0, (min(span.end_time_unix_nano, end) - span.start_time_unix_nano) * scale)
        millis = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        lines += [
            f'<text x="{8 + 14 * depth}" y="{y + 11}" fill="#222222">{escape(label(span))}</text>',
            f'<rect x="{left:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 5}" fill="{colour(span.name)}"/>',
            f'<text x="{left + width + 4:.1f}" y="{y + 11}" fill="#666666">{millis:.1f} ms</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


async def draw(rounds: int) -> None:
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        received = await stack.enter_async_context(collector(Path(directory)))
        with environment(received.environment):
            target = await stack.enter_async_context(service("target_service", "--model", TARGET))
            draft = await stack.enter_async_context(service("draft_service", "--model", DRAFT))
            flags = ("--targets", target, "--drafts", draft, "--tokenizer", TARGET)
            address = await stack.enter_async_context(service("orchestrator", *flags))
        stub = OrchestratorServiceStub(await stack.enter_async_context(connect(address)))
        await until_linked(stub)

        async def one(first: int) -> None:
            async for _ in stub.Generate(ask((first, 1, 2), max_tokens=40, temperature=0, lookahead=4)):
                pass

        await one(9)
        await received.until(lambda: len(received.named("/Generate")) == 1)
        await asyncio.gather(one(0), one(3))
        await received.until(lambda: len(received.named("/Generate")) == 3 and not received.orphans())
    calls = sorted(received.named("/Generate"), key=lambda span: span.start_time_unix_nano)
    PICTURE.write_text(picture(ordered(received.traces[calls[1].trace_id.hex()], rounds)))
    print(f"{PICTURE}, load of the machine {os.getloadavg()[0]:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="that are drawn")
    asyncio.run(draw(parser.parse_args().rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
