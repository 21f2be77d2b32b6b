"""G: orchestrators that die, leave or freeze, as processes over one store, and clients that do not notice."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.client import AsyncClient, AsyncGeneration
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.channel import connect
from outrider.net.errors import from_rpc_error
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1 import target_pb2, target_pb2_grpc, types_pb2
from outrider.v1.orchestrator_pb2 import GenerateResponse, ResumeRequest, Token
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.commands import SECONDS, Running, running
from tests.harness.faults import greedy_output
from tests.harness.orchestrator import ask
from tests.harness.valkey import valkey_server
from tests.harness.workers import health_of

# Passes take their time, so that streams are in their middle when something happens to them.
SPEC = SyntheticSpec(vocab_size=26, seed=5)
MODEL, DRAFT = "synthetic:vocab_size=26,seed=5,pass_ms=4", "synthetic:vocab_size=26,seed=5,noise=0.5"
PROMPTS = [(index, 1, 2) for index in range(8)]
TOKENS = 300


@dataclass
class Replicas:
    """Two orchestrator processes, one store, one target, one draft."""

    orchestrators: list[Running]
    addresses: list[str]
    target: str

    async def until_freed(self) -> None:
        """Returns when the target holds no session."""
        async with connect(self.target) as channel, asyncio.timeout(SECONDS):
            stub = target_pb2_grpc.TargetServiceStub(channel)
            while (await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())).load.open_sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@asynccontextmanager
async def replicas(directory: Path, environment: Mapping[str, str] | None = None) -> AsyncIterator[Replicas]:
    with valkey_server(directory) as valkey:
        async with AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(
                    running(service, "--model", model, "--port", "0", environment=environment)
                )
                for service, model in (("target_service", MODEL), ("draft_service", DRAFT))
            ]
            target, draft = [await worker.address() for worker in workers]
            flags = ("--targets", target, "--drafts", draft, "--tokenizer", MODEL, "--store", valkey.url)
            orchestrators = [
                await stack.enter_async_context(
                    running("orchestrator", *flags, "--port", "0", "--grace", "0.2", environment=environment)
                )
                for _ in range(2)
            ]
            addresses = [await one.address() for one in orchestrators]
            for address in addresses:
                await until_serving(address)
            yield Replicas(orchestrators, addresses, target)


async def until_serving(address: str) -> None:
    async with connect(address) as channel, asyncio.timeout(SECONDS):
        while await health_of(channel) != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
async def test_g2_g4_streams_outlive_their_orchestrator(tmp_path: Path, number: signal.Signals) -> None:
    halfway = [asyncio.Event() for _ in PROMPTS]

    async def read(stream: AsyncGeneration, reached: asyncio.Event) -> list[Token]:
        tokens = []
        async for token in stream:
            tokens.append(token)
            if len(tokens) == TOKENS // 3:
                reached.set()
        return tokens

    async with replicas(tmp_path) as system, AsyncClient(",".join(system.addresses)) as client:
        streams = [client.generate(token_ids=prompt, max_tokens=TOKENS, temperature=0.0) for prompt in PROMPTS]
        reading = [asyncio.create_task(read(*each)) for each in zip(streams, halfway, strict=True)]
        await asyncio.wait_for(asyncio.gather(*(each.wait() for each in halfway)), SECONDS)
        system.orchestrators[0].process.send_signal(number)
        outputs = await asyncio.wait_for(asyncio.gather(*reading), SECONDS)
        code, _, err = await system.orchestrators[0].end()
        assert code == (-number if number is signal.SIGKILL else 0), err
        for prompt, stream, tokens in zip(PROMPTS, streams, outputs, strict=True):
            assert [token.id for token in tokens] == greedy_output(prompt, TOKENS, SPEC)
            assert "".join(token.text for token in tokens) == "".join(chr(97 + token.id) for token in tokens)
            assert stream.finish is not None
            usage = stream.finish.usage
            assert (stream.finish.reason, usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, TOKENS)
        if number is signal.SIGTERM:
            await system.until_freed()


async def test_g11_an_orchestrator_that_was_frozen_and_wakes_is_refused(tmp_path: Path) -> None:
    request = ask((0, 1, 2), max_tokens=3000, temperature=0, session_id="frozen")
    request.resumable = True
    expected = greedy_output((0, 1, 2), 3000, SPEC)
    async with replicas(tmp_path) as system, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(connect(address)) for address in system.addresses]
        former, owner = [OrchestratorServiceStub(channel) for channel in channels]
        first = former.Generate(request, timeout=SECONDS)
        seen = await ids_of(first, 20)
        offset = len(seen)
        frozen = system.orchestrators[0].process
        frozen.send_signal(signal.SIGSTOP)
        try:
            second = owner.Resume(ResumeRequest(session_id="frozen", offset=offset), timeout=SECONDS)
            rest = await ids_of(second, 20)
        finally:
            frozen.send_signal(signal.SIGCONT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rest_of(first, seen)
        error = from_rpc_error(refused.value)
        assert error is not None
        assert error.reason == types_pb2.ERROR_REASON_STALE_EPOCH
        assert seen == expected[: len(seen)]
        rest += await ids_of(second, 20)
        assert rest == expected[offset : offset + len(rest)]
        second.cancel()


async def ids_of(call: "grpc.aio.UnaryStreamCall[object, GenerateResponse]", count: int) -> list[int]:
    """The next token ids of a stream, `count` or a few more."""
    ids: list[int] = []
    while len(ids) < count:
        response = await asyncio.wait_for(call.read(), SECONDS)
        assert isinstance(response, GenerateResponse), "the stream ended"
        ids += [token.id for token in response.tokens]
    return ids


async def rest_of(call: "grpc.aio.UnaryStreamCall[object, GenerateResponse]", ids: list[int]) -> None:
    """Appends the remaining token ids of a stream. Raises AioRpcError when it fails."""
    while (response := await asyncio.wait_for(call.read(), SECONDS)) is not grpc.aio.EOF:
        assert isinstance(response, GenerateResponse)
        ids += [token.id for token in response.tokens]
