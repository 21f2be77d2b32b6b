"""The Prometheus endpoint of a process: GET /metrics, from threads of its own, and nothing else.

It neither blocks the event loop nor needs it: a process that is stuck can still be seen.
"""

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from outrider import __version__
from outrider.net.address import host_and_port
from outrider.net.server import PortInUse
from outrider.observe.instruments import Instruments

log = logging.getLogger(__name__)

PATH = "/metrics"
# Scrapes at once; what comes beyond is cut off.
_MOST_CONNECTIONS = 8
_CLIENT_SECONDS = 10.0
_SHUTDOWN_POLL_SECONDS = 0.1
_TICK_SECONDS = 0.25


class Measured(Protocol):
    """Metrics of a service."""

    instruments: Instruments


M = TypeVar("M", bound=Measured)


class Exporter:
    """What a process exports, and where.

    Args:
        service: name of the service for the collector; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over it.
        address: HOST:PORT.

    Attributes:
        provider: of the counters and gauges.
    """

    def __init__(self, service: str, address: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        # Scope labels would say the same in every series.
        reader = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        resource = Resource({SERVICE_NAME: service, SERVICE_VERSION: __version__}).merge(
            OTELResourceDetector().detect()
        )
        self.provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        ProcessCollector(registry=self._registry)
        self._server = _Server(address, self._registry)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_SHUTDOWN_POLL_SECONDS,), name="metrics", daemon=True
        )
        self._watch: asyncio.Task[None] | None = None

    def start(self, instruments: Instruments) -> None:
        """Exports these, which were made with `provider`, and looks after the running event loop."""
        self._registry.register(instruments)
        self._watch = asyncio.create_task(watch_loop(instruments))
        self._thread.start()
        log.info("metrics at http://%s%s", self._server.address, PATH)

    def close(self) -> None:
        """Ends the endpoint."""
        if self._watch is not None:
            self._watch.cancel()
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self.provider.shutdown()


@asynccontextmanager
async def exported(service: str, address: str, make: Callable[[MeterProvider | None], M]) -> AsyncIterator[M]:
    """The metrics that `make` makes, exported as long as the block lasts; without an address, nowhere.

    Raises PortInUse.
    """
    if not address:
        yield make(None)
        return
    exporter = Exporter(service, address)
    try:
        metrics = make(exporter.provider)
        exporter.start(metrics.instruments)
        yield metrics
    finally:
        exporter.close()


async def watch_loop(instruments: Instruments) -> None:
    """Measures how late the event loop is, for ever."""
    lag, due = instruments.histogram("outrider.event_loop.lag"), time.monotonic()
    instruments.gauge("outrider.event_loop.stalled", lambda: max(0.0, time.monotonic() - due))
    while True:
        due = time.monotonic() + _TICK_SECONDS
        await asyncio.sleep(_TICK_SECONDS)
        lag.record(max(0.0, time.monotonic() - due))


class _Server(ThreadingHTTPServer):
    """Binds at once. Raises PortInUse."""

    daemon_threads = True

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        self.registry, self.scraping = registry, threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        host, port = host_and_port(address)
        try:
            ((family, _, _, _, where), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family = family
            super().__init__(where[:2], _Handler)  # type: ignore[arg-type]  # the numbers of an IPv6 scope are not used
        except OSError as error:
            raise PortInUse(f"cannot serve metrics on {address}: {error.strerror}") from error

    @property
    def address(self) -> str:
        """HOST:PORT where it listens."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's name, which may take seconds."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, as long as there are not too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread's work."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            log.exception("a scrape failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_SECONDS
    server_version, sys_version = "outrider", ""

    def do_GET(self) -> None:
        if urlsplit(self.path).path != PATH:
            self.send_error(404)
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        # The exporter hands over what it collected through one queue: two scrapes would share it out.
        with self.server.scraping:
            body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for every scrape."""
