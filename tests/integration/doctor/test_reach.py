"""`outrider doctor` tells apart why a connection does not come about: names, TCP, TLS of every kind of wrong."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from outrider.cli.doctor.findings import Finding, Level, ok, within
from outrider.cli.doctor.handshake import agrees
from outrider.cli.doctor.network import Endpoint, connects, looked_up, sources
from outrider.cli.doctor.scrape import scraped
from outrider.cli.doctor.services import worker
from outrider.net.server import Server
from outrider.net.tls import ClientTls
from tests.harness.certificates import CLIENT, DAY, SERVER, Authority, Mount
from tests.harness.valkey import free_port

HOST = "127.0.0.1"
SECONDS = 30.0
YEAR = 365 * DAY
CA, STRANGER = Authority(), Authority("Stranger")

Pair = tuple[bytes, bytes]
Client = Callable[[Path], tuple[ClientTls, tuple[str, str, str]]]


def client(pair: Pair | None = None, ca: Authority = CA, name: str = "") -> Client:
    """What doctor is given, with a certificate of its own or without."""

    def make(at: Path) -> tuple[ClientTls, tuple[str, str, str]]:
        mount = Mount(at / "client", pair or CA.issue("nobody"), ca.pem)
        cert, key, trusted = mount.settings().values()
        return mount.client(pair=pair is not None, name=name), (trusted, *((cert, key) if pair else ("", "")))

    return make


def served(*names: str, valid_for: object = YEAR, **usages: object) -> Callable[[], Pair]:
    return lambda: CA.issue(*names, valid_for=valid_for, **usages)  # type: ignore[arg-type]


GOOD = served(HOST, usages=[SERVER])
OURS = CA.issue("doctor", valid_for=YEAR, usages=[CLIENT])
# (the server's certificate, or None for plain text; whether it asks for ours; what we are given), level, words, advice
TLS: dict[str, tuple[Callable[[], Pair] | None, bool, Client | None, Level, str, str]] = {
    "good": (GOOD, False, client(), Level.ok, "good for 365.0 days", ""),
    "mutual": (GOOD, True, client(OURS), Level.ok, "good for 365.0 days", ""),
    "plain": (None, False, None, Level.ok, "plain text, as configured", ""),
    "by name": (served("target"), False, client(name="target"), Level.ok, "good for", ""),
    "soon over": (served(HOST, valid_for=3 * DAY), False, client(), Level.warning, "good for 3.0 days", "renew it"),
    "expired": (served(HOST, valid_for=-DAY), False, client(), Level.broken, "expired 1.0 days ago", "renew it"),
    "for another host": (
        served("elsewhere"),
        False,
        client(),
        Level.broken,
        f"is for elsewhere, not for {HOST}",
        "--target-tls-name",
    ),
    "for another name": (
        served("draft"),
        False,
        client(name="target"),
        Level.broken,
        "is for draft, not for target",
        "by one of its names",
    ),
    "a stranger's": (
        lambda: STRANGER.issue(HOST),
        False,
        client(),
        Level.broken,
        "signed by a CA that is not in",
        "--worker-tls-ca",
    ),
    "a client's": (served(HOST, usages=[CLIENT]), False, client(), Level.broken, "not for servers", "server auth"),
    "TLS where plain text was said": (GOOD, False, None, Level.broken, "it speaks TLS", "give --worker-tls-ca"),
    "mutual TLS where plain text was said": (GOOD, True, None, Level.broken, "it speaks TLS", "--worker-tls-cert"),
    "plain text where TLS was said": (None, False, client(), Level.broken, "plain text", "leave out --worker-tls*"),
    "no client certificate": (
        GOOD,
        True,
        client(),
        Level.broken,
        "it wants a client certificate, and none is given",
        "--worker-tls-cert",
    ),
    "a stranger's client certificate": (
        GOOD,
        True,
        client(STRANGER.issue("doctor")),
        Level.broken,
        "it refuses the client certificate",
        "must have signed it",
    ),
    "a client certificate for servers": (
        GOOD,
        True,
        client(CA.issue("doctor", usages=[SERVER])),
        Level.broken,
        "it refuses the client certificate",
        "for client authentication",
    ),
}


@asynccontextmanager
async def serving(pair: Pair | None, at: Path, *, mutual: bool) -> AsyncIterator[str]:
    server = Server("outrider.v1.Fake")
    files = Mount(at / "server", pair, CA.pem).files(ca=mutual) if pair else None
    try:
        yield f"{HOST}:{await server.start(HOST, 0, files)}"
    finally:
        await server.stop(0)


@pytest.mark.parametrize("name", TLS)
async def test_tls(name: str, tmp_path: Path) -> None:
    issue, mutual, given, level, words, advice = TLS[name]
    async with serving(issue and issue(), tmp_path, mutual=mutual) as address:
        tls, files = given(tmp_path) if given else (None, ("", "", ""))
        spoken, found = await agrees(Endpoint("target", address, tls, files, "--worker-tls"))
    assert (found.level, spoken) == (level, level in (Level.ok, Level.warning)), found
    assert words in found.seen
    assert advice in found.advice


@pytest.mark.parametrize("name", ["TLS where plain text was said", "no client certificate"])
async def test_what_an_orchestrator_named_may_be_out_of_our_reach(name: str, tmp_path: Path) -> None:
    issue, mutual, given, _, words, _ = TLS[name]
    async with serving(issue and issue(), tmp_path, mutual=mutual) as address:
        tls, files = given(tmp_path) if given else (None, ("", "", ""))
        spoken, found = await agrees(Endpoint("target", address, tls, files, "--worker-tls", told=True))
    assert (found.level, spoken) == (Level.unseen, False)
    assert words in found.seen


async def test_a_port_where_nobody_listens() -> None:
    for told, level in ((False, Level.broken), (True, Level.unseen)):
        found = await connects(Endpoint("target", f"{HOST}:{free_port()}", told=told), SECONDS)
        assert (found.check, found.level) == ("tcp", level)
        assert "does not connect: Connection refused" in found.seen


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that answers no SYN, as behind a firewall: its queue of connections is full, and nobody takes any."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind((HOST, 0))
        server.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield f"{HOST}:{server.getsockname()[1]}"


async def test_a_firewall_that_drops() -> None:
    with black_hole() as address:
        for told, level in ((False, Level.broken), (True, Level.unseen)):
            found = await connects(Endpoint("target", address, told=told), 0.1)
            assert (found.level, "no answer within 0.1 s" in found.seen) == (level, True)


@asynccontextmanager
async def speaking(words: bytes, *, ends: bool) -> AsyncIterator[str]:
    """A server that says the same to everybody, and hangs up or says no more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        if not ends:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        yield f"{HOST}:{server.sockets[0].getsockname()[1]}"


async def test_another_program_on_the_port() -> None:
    async with speaking(b"SSH-2.0-OpenSSH_9.2\r\n", ends=True) as address:
        spoken, found = await agrees(Endpoint("target", address))
    assert (spoken, found.level) == (False, Level.broken)
    assert "neither HTTP/2 nor TLS" in found.seen


async def test_a_worker_that_is_connected_and_silent() -> None:
    async with speaking(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), ends=False) as address:
        endpoint = Endpoint("target", address)
        found = await within(0.5, "reach", endpoint.name, _checks(endpoint))
    assert [each.level for each in found] == [Level.broken]
    assert "did not end within 0.5 s" in found[0].seen


async def _checks(endpoint: Endpoint) -> list[Finding]:
    return (await worker(endpoint, SECONDS))[1]


async def test_names() -> None:
    addresses, (found,) = await looked_up("target", "dns:localhost:7801")
    assert found.level is Level.ok
    assert f"{HOST}:7801" in addresses
    assert await looked_up("target", f"{HOST}:1") == (
        [f"{HOST}:1"],
        [ok("dns", f"target {HOST}:1", f"1 address: {HOST}")],
    )
    addresses, (found,) = await looked_up("draft", "dns:nowhere.invalid:7802")
    assert (addresses, found.level) == ([], Level.broken)
    assert "nowhere.invalid is not found" in found.seen
    assert sources(f"dns:a:1, {HOST}:2,dns:a:1") == ["dns:a:1", f"{HOST}:2"]
    with pytest.raises(ValueError, match="'b' is not HOST:PORT"):
        sources("dns:a:1,b")


async def test_a_check_that_fails_or_hangs_is_a_finding() -> None:
    async def fails() -> list[Finding]:
        raise ZeroDivisionError("of its own")

    async def hangs() -> list[Finding]:
        await asyncio.Event().wait()
        return []

    (failed,) = await within(5.0, "round", "all", fails())
    (hung,) = await within(0.01, "round", "all", hangs())
    assert [failed.level, hung.level] == [Level.broken, Level.broken]
    assert "ZeroDivisionError: of its own" in failed.seen
    assert "within 0.01 s" in hung.seen


def test_words_of_peers_are_tamed() -> None:
    found = ok("version", "x", "\x1b[2J" + "y" * 10_000)
    assert "\x1b" not in found.seen
    assert len(found.seen) < 1_000


@contextmanager
def http(path: str, text: str) -> Iterator[str]:
    """Answers GET of one path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == path else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Not on stderr."""

    server = HTTPServer((HOST, 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_metrics_endpoints() -> None:
    text = '# TYPE outrider_rounds_total counter\noutrider_rounds_total{reason="x"} 1\noutrider_rounds_total 2\n'
    cases = {("/metrics", text): "1 metrics of", ("/metrics", "go_info 1\n"): "without any", ("/", ""): "with 404"}
    for (path, body), words in cases.items():
        with http(path, body) as address:
            (found,) = await scraped(address, 10.0)
        assert words in found.seen
        assert (found.level is Level.ok) == (body == text)
    async with speaking(b"SSH-2.0-OpenSSH_9.2\r\n", ends=True) as address:
        (found,) = await scraped(address, 10.0)
    assert (found.level, "does not speak HTTP" in found.seen) == (Level.broken, True)
    (found,) = await scraped(f"{HOST}:{free_port()}", 10.0)
    assert (found.level, "not answered" in found.seen) == (Level.broken, True)


async def test_a_metrics_endpoint_that_never_comes_to_an_end_is_not_waited_for() -> None:
    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"a")
            await asyncio.sleep(0.02)

    before = threading.active_count()
    async with await asyncio.start_server(trickle, HOST, 0) as server:
        (found,) = await scraped(f"{HOST}:{server.sockets[0].getsockname()[1]}", 0.3)
    assert (found.level, "not within 0.3 s" in found.seen) == (Level.broken, True)
    # A thread that is left behind would hold up the end of the command.
    assert threading.active_count() <= before
