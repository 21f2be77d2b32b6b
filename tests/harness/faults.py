"""What a test needs to make the system fail: engines with hooks, clients that read step by step, peers that lie."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from orchestrator.metrics import Metrics
from orchestrator.store.memory import MemoryStore
from outrider.lm.engine import Engine, EngineInfo, Segment, SequenceState
from outrider.lm.model_info import model_info
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.token_sequence import TokenSequence
from outrider.net.channel import connect
from outrider.net.errors import OutriderError, abort, from_rpc_error, reason_name
from outrider.net.server import Server
from outrider.v1 import draft_pb2, draft_pb2_grpc, orchestrator_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.v1.orchestrator_pb2 import GenerateRequest, ResumeRequest, Round
from tests.harness.engines import DEADLINE
from tests.harness.orchestrator import Generation, RunningOrchestrator

VOCAB = 16
SPEC = SyntheticSpec(vocab_size=VOCAB, context_length=1 << 20)
# Resembles SPEC: most of its proposals are accepted.
DRAFT_SPEC = SyntheticSpec(vocab_size=VOCAB, noise=0.5, context_length=1 << 20)


def greedy_output(prompt: Sequence[int], count: int, spec: SyntheticSpec = SPEC) -> list[int]:
    """What the model says on its own at temperature 0: the reference of every parity check."""
    engine = SyntheticEngine(spec)
    sequence = engine.open(np.array(prompt, np.int32))
    tokens, new = list(prompt), list(prompt)
    for _ in range(count):
        (row,) = engine.forward([Segment(sequence, np.array(new, np.int32), rows=1)])
        new = [int(row[0].argmax())]
        tokens += new
    return tokens[len(prompt) :]


def first_token(segment: Segment) -> int:
    """The first token of the sequence that a segment belongs to: tests mark sessions with it."""
    sequence = segment.sequence
    assert isinstance(sequence, TokenSequence)
    return int(sequence.tokens[0]) if sequence.length else int(segment.tokens[0])


class HookedEngine:
    """Another engine, counted, and under the test's control.

    Attributes:
        passes: passes begun.
        edit: called with the segments and their rows after each pass; what it returns is what the service gets.
        in_pass: whether a pass is held at this moment.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._may_run = threading.Event()
        self._may_run.set()
        self._steps = threading.Semaphore(0)
        self.stepping = False
        self.passes = 0
        self.in_pass = threading.Event()
        self.edit: Callable[[Sequence[Segment], list[torch.Tensor]], list[torch.Tensor]] | None = None

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def open(self, tokens: Any) -> SequenceState:
        return self._engine.open(tokens)

    def pages(self) -> tuple[int, int]:
        return self._engine.pages()

    def shared_pages(self) -> int:
        return self._engine.shared_pages()

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        self.passes += 1
        self.in_pass.set()
        if self.stepping:
            assert self._steps.acquire(timeout=DEADLINE), "the test never let the pass go on"
        self.until_let_go()
        self.in_pass.clear()
        rows = self._engine.forward(segments)
        return self.edit(segments, rows) if self.edit else rows

    def hold(self) -> None:
        """Passes wait until `let_go`."""
        self._may_run.clear()

    def let_go(self) -> None:
        """Passes run again."""
        self._may_run.set()

    def until_let_go(self) -> None:
        """Blocks the calling thread while passes are held."""
        assert self._may_run.wait(DEADLINE), "the test never let go"

    async def until_in_pass(self) -> None:
        """Returns when a held pass has begun."""
        assert await asyncio.to_thread(self.in_pass.wait, DEADLINE), "no pass began"

    def step(self) -> None:
        """Lets one pass of a `stepping` engine go on."""
        self.in_pass.clear()
        self._steps.release()


def target_engine(spec: SyntheticSpec = SPEC) -> HookedEngine:
    return HookedEngine(SyntheticEngine(spec))


def draft_engine(spec: SyntheticSpec = DRAFT_SPEC) -> HookedEngine:
    return HookedEngine(SyntheticEngine(spec))


class KeptStore(MemoryStore):
    """Keeps its sessions when closed, for the test to look at, or for another orchestrator."""

    async def close(self) -> None:
        self.closed = True


class Client:
    """One Generate or Resume call, read message by message."""

    def __init__(
        self,
        orchestrator: RunningOrchestrator,
        request: GenerateRequest | ResumeRequest,
        timeout: float = DEADLINE,
        stub: Any = None,
    ) -> None:
        stub = stub or orchestrator.stub
        method = stub.Generate if isinstance(request, GenerateRequest) else stub.Resume
        self.call = method(request, timeout=timeout)
        self.generation = Generation()

    async def read(self) -> bool:
        """Takes one message; False at the end. Raises AioRpcError when the call failed."""
        async with asyncio.timeout(DEADLINE):
            response = await self.call.read()
        if response is grpc.aio.EOF:
            return False
        self.generation.add(response)
        return True

    async def until(self, condition: Callable[[Generation], bool]) -> Generation:
        """Reads until the condition holds for what was read; the stream must not end before."""
        while not condition(self.generation):
            assert await self.read(), "the stream ended"
        return self.generation

    async def until_tokens(self, count: int) -> Generation:
        return await self.until(lambda generation: len(generation.tokens) >= count)

    async def until_round(self, condition: Callable[[Round], bool]) -> Generation:
        """Reads until a round that was not read yet fulfils the condition."""
        seen = len(self.generation.rounds)
        return await self.until(lambda generation: any(condition(one) for one in generation.rounds[seen:]))

    async def finish(self) -> Generation:
        """Reads to the end."""
        while await self.read():
            pass
        return self.generation

    def cancel(self) -> None:
        self.call.cancel()


@asynccontextmanager
async def small_window(orchestrator: RunningOrchestrator, size: int = 65_535) -> AsyncIterator[Any]:
    """A stub whose peer may be 64 KB ahead of its reader, instead of megabytes."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", size)]
    async with grpc.aio.insecure_channel(orchestrator.address, options=options) as channel:
        yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


async def refused(call: Awaitable[object], reason: str, code: grpc.StatusCode | None = None) -> OutriderError:
    """Awaits a call that must fail with the reason; returns the error."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async with asyncio.timeout(DEADLINE):
            await call
    error = from_rpc_error(failure.value)
    assert error is not None, failure.value
    assert reason_name(error.reason) == reason, failure.value
    assert code is None or failure.value.code() is code
    return error


class Counters:
    """The orchestrator's counters, readable."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.metrics = Metrics(MeterProvider([self._reader]))

    def read(self) -> Counter[str]:
        """Sums by "name" and by "name{value of its attribute}"."""
        found: Counter[str] = Counter()
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        found[metric.name] += point.value  # type: ignore[union-attr]
                        for value in (point.attributes or {}).values():
                            found[f"{metric.name}{{{value}}}"] += point.value  # type: ignore[union-attr]
        return found


@dataclass
class FakeTarget(target_pb2_grpc.TargetServiceServicer):
    """A target that answers whatever the test says."""

    answer: Callable[[target_pb2.VerifyRequest], target_pb2.VerifyResponse]
    address: str = ""
    calls: list[target_pb2.VerifyRequest] = field(default_factory=list)

    async def Verify(self, request: target_pb2.VerifyRequest, context: Any) -> target_pb2.VerifyResponse:
        self.calls.append(request)
        try:
            return self.answer(request)
        except OutriderError as error:
            await abort(context, error)

    async def Release(self, request: target_pb2.ReleaseRequest, context: Any) -> target_pb2.ReleaseResponse:
        return target_pb2.ReleaseResponse()

    async def GetInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetInfoResponse:
        info = model_info(SyntheticEngine(SPEC).info, include_token_hashes=request.include_token_hashes)
        return target_pb2.TargetServiceGetInfoResponse(model=info, max_lookahead=64, token_budget=512)


@asynccontextmanager
async def fake_target(
    answer: Callable[[target_pb2.VerifyRequest], target_pb2.VerifyResponse],
    kind: type[FakeTarget] = FakeTarget,
) -> AsyncIterator[FakeTarget]:
    fake = kind(answer)
    server = Server("outrider.v1.TargetService")
    target_pb2_grpc.add_TargetServiceServicer_to_server(fake, server.grpc)
    fake.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.ready()
    try:
        yield fake
    finally:
        await server.stop(0)


@dataclass
class FakeDraft(draft_pb2_grpc.DraftServiceServicer):
    """A draft that answers each command whatever the test says; no answer leaves the command unanswered."""

    answer: Callable[[draft_pb2.DraftCommand], Sequence[draft_pb2.DraftEvent]]
    address: str = ""
    commands: list[draft_pb2.DraftCommand] = field(default_factory=list)
    info_calls: list[float] = field(default_factory=list)
    refuses: bool = False
    context: Any = None

    async def send(self, events: Sequence[draft_pb2.DraftEvent]) -> None:
        """Sends events on the stream that was opened last, unasked."""
        await self.context.write(draft_pb2.DraftResponse(events=events))

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        self.context = context
        async for request in requests:
            for command in request.commands:
                self.commands.append(command)
                events = self.answer(command)
                if events:
                    await self.send(events)

    async def GetInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetInfoResponse:
        self.info_calls.append(asyncio.get_running_loop().time())
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "down")
        info = model_info(SyntheticEngine(SPEC).info, include_token_hashes=request.include_token_hashes)
        return draft_pb2.DraftServiceGetInfoResponse(model=info, max_lookahead=64, proposers=[draft_pb2.PROPOSER_MODEL])


@asynccontextmanager
async def fake_draft(
    answer: Callable[[draft_pb2.DraftCommand], Sequence[draft_pb2.DraftEvent]], *, refuses: bool = False
) -> AsyncIterator[FakeDraft]:
    async with served_draft(FakeDraft(answer, refuses=refuses)) as fake:
        yield fake


SomeDraft = TypeVar("SomeDraft", bound=FakeDraft)


@asynccontextmanager
async def served_draft(fake: SomeDraft) -> AsyncIterator[SomeDraft]:
    """The draft on a free port, ready."""
    server = Server("outrider.v1.DraftService")
    draft_pb2_grpc.add_DraftServiceServicer_to_server(fake, server.grpc)
    fake.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.ready()
    try:
        yield fake
    finally:
        await server.stop(0)


async def raw_generate(orchestrator: RunningOrchestrator, request: bytes) -> None:
    """Sends bytes as a GenerateRequest, well-formed or not, and reads the answer to its end."""
    async with connect(orchestrator.address) as channel:
        method = "/outrider.v1.OrchestratorService/Generate"
        call = channel.unary_stream(method)(request, timeout=DEADLINE)
        async for _ in call:
            pass
