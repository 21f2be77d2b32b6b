"""OTLP receivers that nobody here wrote: oteltap over HTTP, and rotel over gRPC, which passes on what it got."""

import asyncio
import gzip
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.commands import SECONDS
from tests.harness.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import Span


def attributes(span: "Span") -> dict[str, Any]:
    """The attributes of a span, or of an event."""
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@dataclass
class Collector:
    """What was received.

    Attributes:
        environment: makes a service send its spans here, soon.
        http: where spans can be sent by HTTP.
    """

    environment: dict[str, str]
    http: str
    spans: "list[Span]" = field(default_factory=list)

    @property
    def traces(self) -> "dict[str, list[Span]]":
        """The spans by trace."""
        traces = defaultdict(list)
        for span in self.spans:
            traces[span.trace_id.hex()].append(span)
        return dict(traces)

    def named(self, name: str) -> "list[Span]":
        """The spans whose name ends so."""
        return [span for span in self.spans if span.name.endswith(name)]

    def orphans(self, known: Iterable[bytes] = ()) -> "list[Span]":
        """Spans whose parent was not received and is not known otherwise."""
        ids = {span.span_id for span in self.spans} | {b"", *known}
        return [span for span in self.spans if span.parent_span_id not in ids]

    async def until(self, complete: Callable[[], bool]) -> None:
        """Returns when what was received is complete; fails the test when it does not become so."""
        try:
            async with asyncio.timeout(SECONDS):
                while not complete():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            orphans = [(span.name, span.trace_id.hex()) for span in self.orphans()]
            raise AssertionError(f"{len(self.spans)} spans in {len(self.traces)} traces, orphans {orphans}") from None


@asynccontextmanager
async def collector(directory: Path, protocol: str = "http/protobuf") -> AsyncIterator[Collector]:
    """Receives spans over HTTP, or over gRPC. Skips the test where the platform has no such receiver."""
    (port,) = free_ports(1)
    received = Collector(_environment(protocol, port), f"http://127.0.0.1:{port}")
    async with _rotel(directory, port, received) if protocol == "grpc" else _oteltap(port, received):
        yield received


@asynccontextmanager
async def _oteltap(port: str, received: Collector) -> AsyncIterator[None]:
    oteltap = pytest.importorskip("oteltap", reason="oteltap has no wheel for this platform")

    async def read(tap: Any) -> None:
        async for span in tap.stream_traces():
            received.spans.append(span)

    settings = oteltap.OtelTapHttpProtobufReceiverSettings(http_port=int(port))
    async with oteltap.OtelTapHttpProtobufReceiver(settings) as tap:
        reading = asyncio.create_task(read(tap))
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def _environment(protocol: str, port: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }


@asynccontextmanager
async def _rotel(directory: Path, port: str, received: Collector) -> AsyncIterator[None]:
    rotel = pytest.importorskip("rotel", reason="rotel has no wheel for this platform")
    (spare,) = free_ports(1)
    with _reader(received) as onward:
        process = await asyncio.create_subprocess_exec(
            *(str(Path(rotel.__file__).with_name("rotel-agent")), "start"),
            *("--otlp-grpc-endpoint", f"127.0.0.1:{port}", "--otlp-http-endpoint", f"127.0.0.1:{spare}"),
            *("--exporter", "otlp", "--otlp-exporter-endpoint", onward, "--otlp-exporter-protocol", "http"),
            *("--pid-file", str(directory / "rotel.pid"), "--log-file", str(directory / "rotel.log")),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await _listening(int(port))
            yield
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), SECONDS)


async def _listening(port: int) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


@contextmanager
def _reader(received: Collector) -> "Iterator[str]":
    """Reads what rotel passes on: gzip, which oteltap does not take. Yields its address."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = gzip.decompress(self.rfile.read(int(self.headers["content-length"])))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    received.spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
