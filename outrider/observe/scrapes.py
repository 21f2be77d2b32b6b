"""What answers GET /metrics, and nothing else: a small HTTP server whose clients cannot hold it up, nor the process."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from outrider.net.address import host_and_port
from outrider.net.server import PortInUse

log = logging.getLogger(__name__)

PATH = "/metrics"
# Connections at once. A client that is waited for, because it does not ask or does not read, makes room for who comes
# later, and is cut off after some seconds: neither silence nor a letter now and then keeps a scraper out.
MOST_CONNECTIONS = 8
CLIENT_SECONDS = 10.0
# How long who comes waits for room, and those behind with him.
_ROOM_SECONDS = 10.0
# After an answer was made, so many times as long none is: whoever scrapes without a pause takes a tenth of the process.
_REST = 9


class Answers:
    """Makes answers for threads, one after the other: the exporter hands over what it collected through one queue."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry, self._making = registry, threading.Lock()
        self._last, self._began, self._rested = ("", b""), 0.0, 0.0

    def of(self, encode: Callable[[CollectorRegistry], bytes], content_type: str) -> bytes:
        """Everything as it is at a moment from now on; who wait for the same moment get the same."""
        asked = time.monotonic()
        with self._making:
            known, body = self._last
            if known == content_type and self._began >= asked:
                return body
            time.sleep(max(0.0, self._rested - time.monotonic()))
            self._began = time.monotonic()
            self._last = content_type, encode(self._registry)
            ended = time.monotonic()
            self._rested = ended + _REST * (ended - self._began)
            return self._last[1]


class ScrapeServer(ThreadingHTTPServer):
    """Binds at once. Raises PortInUse."""

    daemon_threads = True

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        self.answers = Answers(registry)
        self._open, self._ending, self._changed = 0, False, threading.Condition()
        # Connections whose clients are waited for, and since when; the longest first.
        self._waits: dict[socket.socket, float] = {}
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
        if not self._enter():
            self.shutdown_request(request)
            return
        self.waits_for(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is to be had
            self._leave(request)
            raise

    def service_actions(self) -> None:
        """Now and then, and after every connection."""
        now = time.monotonic()
        with self._changed:
            late = [each for each, since in self._waits.items() if now - since > CLIENT_SECONDS]
        for each in late:
            self._cut(each)

    def waits_for(self, request: socket.socket) -> None:
        """The client has to ask, or to read its answer."""
        with self._changed:
            self._waits[request] = time.monotonic()
            self._changed.notify()

    def heard(self, request: socket.socket) -> bool:
        """It has asked; false where it was cut off before, and what it seems to have asked is not the whole of it."""
        with self._changed:
            return self._waits.pop(request, None) is not None

    def _enter(self) -> bool:
        """Whether there is a place, if need be that of the client that is waited for longest."""
        ends = time.monotonic() + _ROOM_SECONDS
        with self._changed:
            while self._open >= MOST_CONNECTIONS:
                if self._waits:
                    self._cut(next(iter(self._waits)))
                if self._ending or not self._changed.wait(ends - time.monotonic()):
                    return False
            self._open += 1
        return True

    def shutdown(self) -> None:
        """Ends serving; nobody is waited for."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        super().shutdown()

    def _leave(self, request: socket.socket) -> None:
        self.heard(request)
        with self._changed:
            self._open -= 1
            self._changed.notify()

    def _cut(self, request: socket.socket) -> None:
        """Its thread sees the end of the connection."""
        if self.heard(request):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread's work."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            log.exception("a scrape failed")


class _Handler(BaseHTTPRequestHandler):
    server: ScrapeServer
    timeout = CLIENT_SECONDS
    server_version, sys_version = "outrider", ""

    def do_GET(self) -> None:
        if not self.server.heard(self.connection):
            return
        if urlsplit(self.path).path != PATH:
            self.send_error(404)
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = self.server.answers.of(encode, content_type)
        self.server.waits_for(self.connection)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for every scrape."""
