"""The client over real orchestrators: whatever happens to them, the caller sees one stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from orchestrator.store.redis import RedisStore
from outrider.client import AsyncClient, AsyncGeneration, Client
from outrider.net.errors import OutriderError
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import CancelSessionRequest, GetSessionRequest, ResumeRequest, Token
from tests.harness.faults import HookedEngine, KeptStore, draft_engine, greedy_output, target_engine
from tests.harness.orchestrator import RunningOrchestrator, start_orchestrator
from tests.harness.valkey import ValkeyServer, valkey_server
from tests.harness.workers import RunningTarget, eventually, start_draft, start_target

PROMPTS = [(index, 1, 2) for index in range(8)]
LONG = 100_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path) as running:
        yield running


@asynccontextmanager
async def replicas(
    url: str = "", engine: HookedEngine | None = None
) -> AsyncIterator[tuple[list[RunningOrchestrator], RunningTarget]]:
    """Two orchestrators over one store, in memory or at a URL."""
    kept = KeptStore(600)
    stores = [RedisStore(url, 600, timeout=0.5) if url else kept for _ in range(2)]
    async with start_target(engine or target_engine()) as target, start_draft(draft_engine()) as draft:
        async with contextlib.AsyncExitStack() as stack:
            started = [
                await stack.enter_async_context(
                    start_orchestrator([target.address], [draft.address], store=store, draft_timeout=30)
                )
                for store in stores
            ]
            yield started, target


def addresses(orchestrators: list[RunningOrchestrator]) -> str:
    return ",".join(one.address for one in orchestrators)


async def first_tokens(stream: AsyncGeneration, count: int) -> list[Token]:
    tokens: list[Token] = []
    while len(tokens) < count:
        tokens.append(await anext(aiter(stream)))
    return tokens


async def rest_of(stream: AsyncGeneration, begun: list[Token]) -> list[int]:
    return [token.id for token in begun] + [token.id async for token in stream]


async def finish_reason(orchestrator: RunningOrchestrator, session_id: str) -> int:
    return (await orchestrator.stub.GetSession(GetSessionRequest(session_id=session_id))).finish_reason


@pytest.mark.parametrize("ending", ["cut", "drained"])
async def test_g2_streams_of_an_orchestrator_that_ends_go_on_at_the_other(ending: str) -> None:
    async with replicas() as (orchestrators, target), AsyncClient(addresses(orchestrators)) as client:
        streams = [client.generate(token_ids=prompt, max_tokens=400, temperature=0.0) for prompt in PROMPTS]
        begun = [await first_tokens(stream, 5) for stream in streams]
        going = orchestrators[0]
        if ending == "cut":
            await going.server.stop(0)
        else:
            await going.servicer.drain(0.0)
        outputs = await asyncio.gather(*map(rest_of, streams, begun))
        assert outputs == [greedy_output(prompt, 400) for prompt in PROMPTS]
        for stream in streams:
            assert stream.finish is not None
            assert stream.finish.usage.completion_tokens == 400
            assert await finish_reason(orchestrators[1], stream.session_id) == pb.FINISH_REASON_LENGTH
        await eventually(lambda: not target.service.load().open_sessions)


async def test_the_blocking_client_does_the_same() -> None:
    async with replicas() as (orchestrators, target):
        cut = asyncio.Event()
        loop = asyncio.get_running_loop()

        def read() -> tuple[list[int], str, str]:
            with Client(addresses(orchestrators)) as client:
                stream = client.generate(token_ids=(0, 1, 2), max_tokens=400, temperature=0.0)
                tokens = [next(iter(stream)) for _ in range(5)]
                loop.call_soon_threadsafe(cut.set)
                tokens += stream
                assert stream.finish is not None
                again = client.generate(token_ids=(0, 1, 2), max_tokens=9, temperature=0.0).text()
                return [token.id for token in tokens], "".join(token.text for token in tokens), again

        reading = asyncio.create_task(asyncio.to_thread(read))
        await cut.wait()
        busy = next((one for one in orchestrators if one.core.sessions), orchestrators[0])
        await busy.server.stop(0)
        ids, text, again = await reading
        assert ids == greedy_output((0, 1, 2), 400)
        assert text == "".join(chr(97 + token) for token in ids)
        assert again == text[:9]
        await eventually(lambda: not target.service.load().open_sessions)


@pytest.mark.parametrize("outage", ["pause", "kill"])
async def test_an_outage_of_the_store_is_waited_out(server: ValkeyServer, outage: str) -> None:
    engine = target_engine()
    async with replicas(server.url, engine) as (orchestrators, _), AsyncClient(addresses(orchestrators)) as client:
        streams = [client.generate(token_ids=prompt, max_tokens=1000, temperature=0.0) for prompt in PROMPTS[:3]]
        begun = [await first_tokens(stream, 5) for stream in streams]
        engine.hold()
        reading = [asyncio.create_task(rest_of(stream, tokens)) for stream, tokens in zip(streams, begun, strict=True)]
        getattr(server, outage)()
        engine.let_go()
        # Every stream has ended for want of the store, and is being asked for again.
        await eventually(lambda: all(stream._progress._failures for stream in streams))
        server.resume() if outage == "pause" else server.start()
        assert await asyncio.gather(*reading) == [greedy_output(prompt, 1000) for prompt in PROMPTS[:3]]


async def test_text_stops_and_usage_are_those_of_one_stream() -> None:
    plain = "".join(chr(97 + token) for token in greedy_output((0, 1, 2), 60))
    async with replicas() as (orchestrators, _), AsyncClient(addresses(orchestrators)) as client:
        stream = client.generate(token_ids=(0, 1, 2), max_tokens=60, temperature=0.0, stop=[plain[40:45]], min_tokens=9)
        begun = await first_tokens(stream, 5)
        await next((one for one in orchestrators if one.core.sessions), orchestrators[0]).servicer.drain(0.0)
        text = "".join(token.text for token in begun) + await stream.text()
        assert text == plain[: plain.find(plain[40:45], 9)]
        assert stream.finish is not None
        assert (stream.finish.reason, stream.finish.matched_stop) == (pb.FINISH_REASON_STOP, plain[40:45])


async def test_whoever_stops_early_ends_the_session() -> None:
    async def closes(stream: AsyncGeneration) -> None:
        await first_tokens(stream, 3)
        await stream.aclose()

    async def breaks(stream: AsyncGeneration) -> None:
        async for _ in stream:
            break

    async def is_cancelled(stream: AsyncGeneration) -> None:
        await first_tokens(stream, 3)
        task = asyncio.create_task(stream.text())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async with replicas() as (orchestrators, target), AsyncClient(addresses(orchestrators)) as client:
        for stop in (closes, breaks, is_cancelled):
            stream = client.generate(token_ids=(0, 1, 2), max_tokens=LONG)
            session_id = stream.session_id
            await stop(stream)
            del stream
            await eventually(lambda: not any(one.core.sessions for one in orchestrators))
            await until_cancelled(orchestrators[0], session_id)
        await eventually(lambda: not target.service.load().open_sessions)


async def test_the_blocking_client_ends_the_session_when_closed() -> None:
    async with replicas() as (orchestrators, target):

        def read() -> str:
            with Client(addresses(orchestrators)) as client:
                stream = client.generate(token_ids=(0, 1, 2), max_tokens=LONG)
                next(iter(stream))
                stream.close()
                return stream.session_id

        session_id = await asyncio.to_thread(read)
        assert await finish_reason(orchestrators[0], session_id) == pb.FINISH_REASON_CANCELLED
        await eventually(lambda: not target.service.load().open_sessions)


async def test_g11_a_session_that_somebody_else_resumes_is_taken_back() -> None:
    async with replicas() as (orchestrators, _), AsyncClient(addresses(orchestrators)) as client:
        stream = client.generate(token_ids=(0, 1, 2), max_tokens=1500, temperature=0.0)
        begun = await first_tokens(stream, 5)
        for one in orchestrators:
            thief = one.stub.Resume(ResumeRequest(session_id=stream.session_id))
            with contextlib.suppress(grpc.aio.AioRpcError):  # it was taken back already
                await thief.read()
            begun += await first_tokens(stream, 5)
            thief.cancel()
        assert await rest_of(stream, begun) == greedy_output((0, 1, 2), 1500)


async def test_a_full_orchestrator_is_waited_for() -> None:
    async with start_target(target_engine()) as target:
        async with start_orchestrator([target.address], max_sessions=1) as orchestrator:
            async with AsyncClient(orchestrator.address) as client:
                streams = [client.generate(token_ids=prompt, max_tokens=40, temperature=0.0) for prompt in PROMPTS[:3]]
                outputs = await asyncio.gather(*(rest_of(stream, []) for stream in streams))
                assert outputs == [greedy_output(prompt, 40) for prompt in PROMPTS[:3]]


async def test_a_name_that_another_has_taken_is_left_to_it() -> None:
    async with replicas() as (orchestrators, _), AsyncClient(addresses(orchestrators)) as client:
        mine = client.generate(token_ids=(0, 1, 2), max_tokens=LONG, session_id="taken")
        await first_tokens(mine, 3)
        with pytest.raises(OutriderError) as refused:
            await client.generate(token_ids=(3, 4), session_id="taken").text()
        assert refused.value.reason == types_pb2.ERROR_REASON_SESSION_EXISTS
        assert await finish_reason(orchestrators[0], "taken") == pb.FINISH_REASON_UNSPECIFIED
        await mine.aclose()
        assert await finish_reason(orchestrators[0], "taken") == pb.FINISH_REASON_CANCELLED


async def test_a_closed_client_calls_nobody() -> None:
    async with replicas() as (orchestrators, _):
        async with AsyncClient(addresses(orchestrators)) as client:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate("x").text()
        with Client(addresses(orchestrators)) as blocking:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            blocking.generate("x").text()


async def test_a_session_that_others_cancel_is_no_success() -> None:
    async with replicas() as (orchestrators, _), AsyncClient(addresses(orchestrators)) as client:
        stream = client.generate(token_ids=(0, 1, 2), max_tokens=LONG)
        await first_tokens(stream, 3)
        for one in orchestrators:
            await one.stub.CancelSession(CancelSessionRequest(session_id=stream.session_id))
        with pytest.raises(OutriderError) as error:
            await stream.text()
        assert error.value.reason == types_pb2.ERROR_REASON_SESSION_CANCELLED


async def until_cancelled(orchestrator: RunningOrchestrator, session_id: str) -> None:
    async with asyncio.timeout(60):
        while await finish_reason(orchestrator, session_id) != pb.FINISH_REASON_CANCELLED:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_wrong_with_a_request_is_said_at_once() -> None:
    async with replicas() as (orchestrators, _), AsyncClient(addresses(orchestrators)) as client:
        with pytest.raises(OutriderError, match="max_tokens"):
            await client.generate(token_ids=(0, 1, 2), max_tokens=1 << 30).text()


async def test_nobody_at_any_address_is_an_error_in_time() -> None:
    async with AsyncClient("127.0.0.1:1,127.0.0.1:2") as client:
        with pytest.raises(
            TimeoutError, match=r"0 tokens came; the last call, to 127.0.0.1:[12], ended with UNAVAILABLE"
        ):
            await client.generate("x", timeout=0.5).text()
    with Client("127.0.0.1:1") as blocking, pytest.raises(TimeoutError):
        blocking.generate("x", timeout=0.5).text()


async def test_a_deadline_ends_the_session() -> None:
    async with replicas() as (orchestrators, target), AsyncClient(addresses(orchestrators)) as client:
        stream = client.generate(token_ids=(0, 1, 2), max_tokens=LONG, timeout=1.0)
        with pytest.raises(TimeoutError):
            await stream.text()
        await eventually(lambda: not any(one.core.sessions or one.core._endings for one in orchestrators))
        record = await orchestrators[0].core.store.load(stream.session_id)
        # A machine that took a second to begin has stored nothing.
        assert record is None or record.finish_reason == pb.FINISH_REASON_CANCELLED
        await eventually(lambda: not target.service.load().open_sessions)
