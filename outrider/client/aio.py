"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from outrider.client.access import Access
from outrider.client.progress import ClientClosed, Progress, Told
from outrider.client.request import Message, Options, make_request
from outrider.client.tracing import GenerationSpan
from outrider.net.channel import connect
from outrider.net.tls import ClientTls
from outrider.v1.orchestrator_pb2 import CancelSessionRequest, GenerateRequest, Token
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

if TYPE_CHECKING:  # a name of the stubs' types alone
    from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceAsyncStub

# Telling the service that nobody listens any more takes so long at most.
CANCEL_SECONDS = 2.0


class AsyncClient:
    """Generates at any of several orchestrators over one session store.

    Args:
        addresses: HOST:PORT, several separated by commas.
        token: bearer token, "" for none.
        tls: how the orchestrators are checked, and what is shown to them; None speaks plain text.
        plain_token: whether the token may leave this machine in plain text.

    Raises ValueError naming an address that is none, or to which anybody on the way could read the token.
    """

    def __init__(
        self, addresses: str, *, token: str = "", tls: ClientTls | None = None, plain_token: bool = False
    ) -> None:
        self.access = Access(addresses, token, tls, plain_token=plain_token)
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        self._closed = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float = 600.0,
        session_id: str = "",
        **options: Unpack[Options],
    ) -> "AsyncGeneration":
        """One generation; nothing is sent before it is iterated over.

        Args:
            prompt, messages, token_ids: text to go on with, a conversation, or tokens; exactly one.
            timeout: seconds that it may take, reconnections included.
            session_id: a name for the session; random without one. A generation of that name, asked for in the same
                words, is gone on with from its first token.
            options: see Options.

        Raises TypeError or ValueError naming an argument that cannot be one.
        """
        request = make_request(prompt, messages, token_ids, options)
        request.session_id = session_id
        return self.stream(request, timeout)

    def stream(self, request: GenerateRequest, timeout: float = 600.0) -> "AsyncGeneration":
        """As `generate`, for a request of any fields but `n`."""
        return AsyncGeneration(self, Progress(request, self.access.addresses, timeout))

    def stub(self, address: str) -> "OrchestratorServiceAsyncStub":
        """A stub over the channel to an address. Raises ClientClosed."""
        if self._closed:
            raise ClientClosed
        key = address, self.access.version
        if key not in self._channels:
            self._channels[key] = connect(address, self.access.tls)
        return OrchestratorServiceStub(self._channels[key])

    async def close(self) -> None:
        """Closes the connections, also under generations that still run: end those first. Idempotent."""
        channels, self._channels, self._closed = self._channels, {}, True
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncGeneration(Told):
    """Iterates once over the tokens of one generation, as they come.

    Lost connections, draining or dead orchestrators and outages of the store are waited out or gone around until the
    timeout; no token comes twice, none is missing. Iterating raises OutriderError when the generation was refused or
    failed, PermissionError when the token was refused, ConnectionError when no orchestrator's certificate can be
    trusted, TimeoutError when it took too long. Whoever stops before the end, by `aclose`, `break` or cancellation,
    ends the session.
    """

    def __init__(self, client: AsyncClient, progress: Progress) -> None:
        self._client, self._progress = client, progress
        self._tokens = self._run()

    def __aiter__(self) -> AsyncIterator[Token]:
        return self._tokens

    async def text(self) -> str:
        """The rest of the text, when it is complete."""
        return "".join([token.text async for token in self._tokens])

    async def aclose(self) -> None:
        """Ends the session unless it has ended. Idempotent."""
        await self._tokens.aclose()

    async def _run(self) -> AsyncGenerator[Token, None]:
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
                        async for response in call:
                            for token in progress.take(response):
                                yield token
                    except grpc.aio.AioRpcError as error:
                        pause = progress.pause_after(error)
                        span.lost(error)
                        await asyncio.sleep(pause)
                    finally:
                        call.cancel()
            except (GeneratorExit, asyncio.CancelledError, TimeoutError):
                if progress.unfinished:
                    await self._cancel()
                raise

    async def _cancel(self) -> None:
        """Without an orchestrator that answers the session's time-to-live ends it."""
        request = CancelSessionRequest(session_id=self.session_id)
        with suppress(grpc.aio.AioRpcError, ClientClosed):
            stub, metadata = self._client.stub(self._progress.address), self._client.access.metadata
            await stub.CancelSession(request, timeout=CANCEL_SECONDS, metadata=metadata)
