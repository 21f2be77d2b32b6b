"""The client for programs without an event loop. It may be used from several threads, a generation from one."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Self, Unpack

import grpc

from outrider.client.access import Access
from outrider.client.aio import CANCEL_SECONDS
from outrider.client.progress import ClientClosed, Progress, Told
from outrider.client.request import Message, Options, make_request
from outrider.client.tracing import GenerationSpan
from outrider.net.channel import connect_blocking
from outrider.net.tls import ClientTls
from outrider.v1.orchestrator_pb2 import CancelSessionRequest, GenerateRequest, Token
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub


class Client:
    """As AsyncClient, whose arguments and errors these are."""

    def __init__(
        self, addresses: str, *, token: str = "", tls: ClientTls | None = None, plain_token: bool = False
    ) -> None:
        self.access = Access(addresses, token, tls, plain_token=plain_token)
        self._channels: dict[tuple[str, int], grpc.Channel] = {}
        self._closed = False
        self._lock = Lock()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float = 600.0,
        session_id: str = "",
        **options: Unpack[Options],
    ) -> "Generation":
        """One generation; nothing is sent before it is iterated over. See AsyncClient.generate."""
        request = make_request(prompt, messages, token_ids, options)
        request.session_id = session_id
        return self.stream(request, timeout)

    def stream(self, request: GenerateRequest, timeout: float = 600.0) -> "Generation":
        """As `generate`, for a request of any fields but `n`."""
        return Generation(self, Progress(request, self.access.addresses, timeout))

    def stub(self, address: str) -> OrchestratorServiceStub:
        """A stub over the channel to an address. Raises ClientClosed."""
        with self._lock:
            if self._closed:
                raise ClientClosed
            key = address, self.access.version
            if key not in self._channels:
                self._channels[key] = connect_blocking(address, self.access.tls)
            return OrchestratorServiceStub(self._channels[key])

    def close(self) -> None:
        """Closes the connections, also under generations that still run: end those first. Idempotent."""
        with self._lock:
            channels, self._channels, self._closed = self._channels, {}, True
        for channel in channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Generation(Told):
    """As AsyncGeneration: iterates once over the tokens of one generation, as they come."""

    def __init__(self, client: Client, progress: Progress) -> None:
        self._client, self._progress = client, progress
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def text(self) -> str:
        """The rest of the text, when it is complete."""
        return "".join(token.text for token in self._tokens)

    def close(self) -> None:
        """Ends the session unless it has ended. Idempotent."""
        self._tokens.close()

    def _run(self) -> Generator[Token, None, None]:
        progress, span = self._progress, GenerationSpan(self._progress)
        with span:
            try:
                while progress.finish is None:
                    stub, rest, left = self._client.stub(progress.address), progress.rest, progress.left
                    metadata = span.call(self._client.access.metadata)
                    call = (
                        stub.Generate(progress.request, timeout=left, metadata=metadata)
                        if rest is None
                        else stub.Resume(rest, timeout=left, metadata=metadata)
                    )
                    try:
                        for response in call:
                            yield from progress.take(response)
                    except grpc.RpcError as error:
                        pause = progress.pause_after(error)
                        span.lost(error)
                        time.sleep(pause)
                    finally:
                        call.cancel()
            except (GeneratorExit, KeyboardInterrupt, TimeoutError):
                if progress.unfinished:
                    self._cancel()
                raise

    def _cancel(self) -> None:
        request = CancelSessionRequest(session_id=self.session_id)
        with suppress(grpc.RpcError, ClientClosed):
            stub, metadata = self._client.stub(self._progress.address), self._client.access.metadata
            stub.CancelSession(request, timeout=CANCEL_SECONDS, metadata=metadata)
