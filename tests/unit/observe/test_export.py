"""The endpoint: /metrics and nothing else, without the event loop's help."""

import json
import socket
import urllib.error
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection

import pytest

from outrider.net.address import host_and_port
from outrider.net.server import PortInUse
from outrider.observe.export import Exporter, exported
from outrider.observe.metrics import WorkerMetrics
from outrider.process import run_process
from target_service.__main__ import serve
from target_service.config import TargetConfig
from tests.harness.logs import restored_logging
from tests.harness.scrape import scrape


@asynccontextmanager
async def endpoint(caplog: pytest.LogCaptureFixture) -> AsyncIterator[tuple[WorkerMetrics, str]]:
    """Metrics of a worker, and where they are served."""
    with caplog.at_level("INFO"):
        async with exported(
            "outrider-test", "127.0.0.1:0", lambda provider: WorkerMetrics("target", provider)
        ) as metrics:
            yield metrics, caplog.messages[-1].removeprefix("metrics at http://").removesuffix("/metrics")


async def test_a_scrape_needs_no_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint(caplog) as (metrics, address):
        metrics.passed(3, 64, 0.01, 128)
        # This thread is the loop's, and it waits for the answer.
        seen = scrape(address)
    seen.check_numbers()
    assert seen.sum("outrider_target_positions_total") == 64
    assert seen.sum("outrider_target_pass_fullness_bucket", le="0.5") == 1
    assert seen.sum("target_info", service_name="outrider-test") == 1
    assert seen.values_of("otel_scope_name") == set()


async def test_openmetrics_is_answered_to_who_asks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint(caplog) as (_, address):
        text = scrape(address, "application/openmetrics-text; version=1.0.0").text
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("method", "path", "code"), [("GET", "/", 404), ("GET", "/metrics/x", 404), ("POST", "/metrics", 501)]
)
async def test_nothing_else_is_served(caplog: pytest.LogCaptureFixture, method: str, path: str, code: int) -> None:
    async with endpoint(caplog) as (_, address):
        connection = HTTPConnection(*host_and_port(address), timeout=30)
        connection.request(method, path)
        assert connection.getresponse().status == code
        connection.close()


async def test_clients_that_say_nothing_hold_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint(caplog) as (_, address):
        silent = [socket.create_connection(host_and_port(address)) for _ in range(4)]
        scrape(address).check_numbers()
        for client in silent:
            client.close()


async def test_it_ends_with_its_block(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint(caplog) as (_, address):
        scrape(address)
    with pytest.raises(urllib.error.URLError):
        scrape(address)


async def test_without_an_address_nothing_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with exported("outrider-test", "", lambda provider: WorkerMetrics("target", provider)) as metrics:
            metrics.passed(1, 1, 0.01, 8)
    assert "metrics at" not in caplog.text


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        with pytest.raises(PortInUse, match=f"cannot serve metrics on {address}: "):
            Exporter("test", address)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_service_that_cannot_serve_metrics_says_so_in_one_line(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy, restored_logging():
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        flags = ["--model", "synthetic:vocab_size=8", "--metrics-address", address, "--log-format", log_format]
        assert run_process(TargetConfig, serve, flags) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    message = json.loads(line)["message"] if log_format == "json" else line.removeprefix("error: ")
    assert message.startswith(f"cannot serve metrics on {address}: ")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "host", "port"), [("0.0.0.0:9464", "0.0.0.0", 9464), ("[::1]:0", "::1", 0), ("h:1", "h", 1)]
)
def test_addresses_to_listen_on(text: str, host: str, port: int) -> None:
    assert host_and_port(text) == (host, port)


@pytest.mark.parametrize("text", ["9464", ":9464", "h:", "h:x", "h:65536", "::1:80", "[h]:1", "[]:1", "h:-1"])
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        host_and_port(text)
