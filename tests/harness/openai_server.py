"""A small server that speaks OpenAI's HTTP API: it says the words of the prompt, one a token, over and over."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, islice
from typing import Any

MODEL = "echo"


@dataclass
class EchoServer:
    """A running server.

    Attributes:
        url: its base URL.
        requests: (path, body) of every completion asked for, in order of arrival.
        most_at_once: how many were under way together.
    """

    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: int = 0


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # more clients than the 5 of the library connect at once


@contextmanager
def echo_server(
    *, token_seconds: float = 0.0, counts: bool = True, key: str = "", together: int = 1
) -> Iterator[EchoServer]:
    """Serves on a free port.

    Args:
        token_seconds: what a token takes.
        counts: whether usage is told when it is asked for.
        key: bearer token that is demanded; empty demands none.
        together: how many completions wait for each other before any is answered.
    """
    state, meet = EchoServer(), threading.Barrier(together)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            else:
                self._answer(404, {"error": {"message": f"no {self.path}"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                self._answer(401, {"error": {"message": "no such key"}})
            elif body["model"] != MODEL:
                self._answer(404, {"error": {"message": f"the model {body['model']!r} does not exist"}})
            else:
                self._complete(body)

        def _complete(self, body: dict[str, Any]) -> None:
            chat = self.path.endswith("/chat/completions")
            with state.lock:
                state.requests.append((self.path, body))
                state.under_way += 1
                state.most_at_once = max(state.most_at_once, state.under_way)
            text = " ".join(it["content"] for it in body["messages"]) if chat else body["prompt"]
            tokens = list(islice(cycle(text.split()), body["max_tokens"]))
            try:
                meet.wait(30.0)
                self._begin()
                for token in tokens:
                    time.sleep(token_seconds)
                    said = {"delta": {"content": token + " "}} if chat else {"text": token + " "}
                    self._event({"choices": [{"index": 0, "finish_reason": None, **said}]})
                if counts and body.get("stream_options", {}).get("include_usage"):
                    self._event({"choices": [], "usage": {"completion_tokens": len(tokens)}})
                self._send("[DONE]")
                self.wfile.write(b"0\r\n\r\n")
            finally:
                with state.lock:
                    state.under_way -= 1

        def _begin(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

        def _event(self, chunk: dict[str, Any]) -> None:
            self._send(json.dumps({"object": "completion.chunk", "model": MODEL, **chunk}))

        def _send(self, data: str) -> None:
            event = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = _Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
