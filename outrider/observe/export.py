"""The Prometheus endpoint of a process: GET /metrics, from threads of its own, and nothing else.

It neither blocks the event loop nor needs it: a process that is stuck can still be seen.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from prometheus_client import CollectorRegistry, ProcessCollector

from outrider import __version__
from outrider.observe.instruments import Instruments
from outrider.observe.scrapes import PATH, ScrapeServer

log = logging.getLogger(__name__)

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
        self._server = ScrapeServer(address, self._registry)
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
