"""The endpoint: /metrics and nothing else, without the event loop's help."""

import asyncio
import itertools
import json
import socket
import time
import urllib.error
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry

from outrider.net.address import host_and_port
from outrider.net.server import PortInUse
from outrider.observe import scrapes
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


def silent(address: str) -> socket.socket:
    return socket.create_connection(host_and_port(address))


def slow_to_ask(address: str) -> socket.socket:
    client = silent(address)
    client.sendall(b"GET /metrics HTTP/1.0\r\nX-Slow: a")
    return client


def slow_to_read(address: str) -> socket.socket:
    """Asks, and leaves so little room for the answer that its writer waits."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(host_and_port(address))
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    return client


@pytest.mark.parametrize("client", [silent, slow_to_ask, slow_to_read])
async def test_slow_clients_keep_no_scraper_out(
    client: Callable[[str], socket.socket], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many hold a connection, and for however long: the one that is waited for longest goes first."""
    monkeypatch.setattr(scrapes, "CLIENT_SECONDS", 600.0)
    monkeypatch.setattr(scrapes, "_REST", 0)
    async with endpoint(caplog) as (metrics, address):
        if client is slow_to_read:
            # More than the kernel takes of an answer that nobody reads.
            metrics.answered(f"reason {number}" for number in range(2_000))
        async with asyncio.timeout(60.0):
            clients = [client(address) for _ in range(2 * scrapes.MOST_CONNECTIONS)]
            for _ in range(3):
                (await asyncio.to_thread(scrape, address)).check_numbers()
        for each in clients:
            each.close()


async def test_a_client_that_says_a_letter_now_and_then_is_cut_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrapes, "CLIENT_SECONDS", 0.5)
    async with endpoint(caplog) as (_, address):
        client = slow_to_ask(address)
        async with asyncio.timeout(30.0):
            while not await asyncio.to_thread(hung_up, client):
                client.sendall(b"a")
        client.close()


def hung_up(client: socket.socket) -> bool:
    """Whether the other side ends the connection within a moment."""
    client.settimeout(0.1)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


async def test_scrapes_at_once_are_all_answered_whole(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint(caplog) as (metrics, address):
        metrics.passed(3, 64, 0.01, 128)
        for seen in await asyncio.gather(
            *(asyncio.to_thread(scrape, address) for _ in range(scrapes.MOST_CONNECTIONS))
        ):
            assert seen.sum("outrider_target_positions_total") == 64


def test_who_scrapes_without_a_pause_takes_little_of_the_process() -> None:
    answers, took = scrapes.Answers(CollectorRegistry()), 0.02

    def encode(_: CollectorRegistry) -> bytes:
        time.sleep(took)
        return b""

    began = time.monotonic()
    for _ in range(4):
        answers.of(encode, "text")
    assert time.monotonic() - began > 4 * took + 3 * 9 * took


def test_who_wait_at_the_same_time_get_the_same_answer_and_none_that_is_older_than_their_question() -> None:
    answers, made = scrapes.Answers(CollectorRegistry()), itertools.count()

    def encode(_: CollectorRegistry) -> bytes:
        time.sleep(0.1)
        return str(next(made)).encode()

    with ThreadPoolExecutor(16) as pool:
        together = {*pool.map(lambda _: answers.of(encode, "text"), range(16))}
    # Those who come while the first answer is made get the second.
    assert together <= {b"0", b"1", b"2"}
    assert answers.of(encode, "text") not in together
    assert answers.of(encode, "openmetrics") != answers.of(encode, "text")


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
