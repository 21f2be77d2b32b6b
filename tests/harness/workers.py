"""Workers in the test's process: real gRPC servers on a free port over any engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from draft_service.config import DraftConfig
from draft_service.service import SERVICE_NAME as DRAFT_SERVICE
from draft_service.service import DraftService, Engines
from outrider.law.params import LawParams, to_law_spec
from outrider.law.sparse import SparseLaw
from outrider.law.tree import Tree
from outrider.lm.engine import Engine
from outrider.net.arrays import int32s, law_from_message, logits_from_message, prefix_hash, to_bytes
from outrider.net.channel import connect
from outrider.net.errors import OutriderError, from_status
from outrider.observe.metrics import DraftMetrics, WorkerMetrics
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2
from outrider.worker import WorkerHost
from target_service.config import TargetConfig
from target_service.service import SERVICE_NAME, TargetService
from tests.harness.engines import DEADLINE


async def health_of(
    channel: grpc.aio.Channel, service: str = ""
) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType":
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
    return answer.status  # type: ignore[no-any-return]


async def eventually(condition: Callable[[], Any]) -> None:
    """Polls a condition for which there is no acknowledgement to wait for; fails at the deadline."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def counted(reader: InMemoryMetricReader, name: str) -> float:
    """The sum of a counter over all its attributes."""
    data = reader.get_metrics_data()
    assert data is not None
    found = [
        point.value  # type: ignore[union-attr]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]
    return sum(found)


def int32(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, dtype=np.int32)


def verify_item(
    session_id: str,
    tokens: Sequence[int],
    draft: Sequence[int] = (),
    *,
    new: int | None = None,
    epoch: int = 1,
    hash_of: Sequence[int] | None = None,
) -> target_pb2.VerifyItem:
    """An item whose committed tokens are `tokens`, of which the last `new` travel (default: all)."""
    start = 0 if new is None else len(tokens) - new
    return target_pb2.VerifyItem(
        session_id=session_id,
        epoch=epoch,
        base_length=len(tokens),
        prefix_tokens=to_bytes(int32(tokens[start:])),
        prefix_hash=prefix_hash(int32(tokens[:start] if hash_of is None else hash_of)),
        draft_tokens=to_bytes(int32(draft)),
        row_format=target_pb2.ROW_FORMAT_LOGITS,
    )


def rows_of(result: target_pb2.VerifyResult, rows: int) -> torch.Tensor:
    """The logits of an OK result as float32."""
    assert result.status.code == 0, result.status
    return logits_from_message(result.logits, rows)


def error_of(result: target_pb2.VerifyResult) -> OutriderError:
    """The error of a failed result."""
    assert result.status.code != 0, "the result is OK"
    assert not result.HasField("logits")
    return from_status(result.status)


def reason(name: str) -> types_pb2.ErrorReason.ValueType:
    return types_pb2.ErrorReason.Value(f"ERROR_REASON_{name}")


@dataclass
class RunningTarget:
    """A target worker and a channel to it."""

    service: TargetService
    address: str
    channel: grpc.aio.Channel
    stub: Any = field(repr=False)

    @property
    def host(self) -> WorkerHost[Any, Any]:
        return self.service.host

    @property
    def service_name(self) -> str:
        return SERVICE_NAME

    async def verify(self, *items: target_pb2.VerifyItem) -> list[target_pb2.VerifyResult]:
        return list((await self.call(*items)).results)

    def call(self, *items: target_pb2.VerifyItem) -> Any:
        """The running call, for tests that cancel it."""
        return self.stub.Verify(target_pb2.VerifyRequest(items=items), timeout=DEADLINE)

    async def info(self) -> target_pb2.TargetServiceGetInfoResponse:
        answer = await self.stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), timeout=DEADLINE)
        assert isinstance(answer, target_pb2.TargetServiceGetInfoResponse)
        return answer

    async def release(self, *sessions: tuple[str, int]) -> None:
        refs = [target_pb2.SessionRef(session_id=name, epoch=epoch) for name, epoch in sessions]
        await self.stub.Release(target_pb2.ReleaseRequest(sessions=refs), timeout=DEADLINE)


@asynccontextmanager
async def start_target(
    engine: Engine | Callable[[], Engine],
    *,
    load: bool = True,
    metrics: WorkerMetrics | None = None,
    **settings: Any,
) -> AsyncIterator[RunningTarget]:
    """A target over an engine, or over a function that loads one; `load=False` leaves loading to the test."""
    make: Callable[[], Engine] = engine if callable(engine) else lambda: engine
    config = TargetConfig(model="test", **{"grace": 0.2, **settings})
    service = TargetService(config, make, metrics)
    address = f"{config.host}:{await service.host.start()}"
    if load:
        await service.host.load()
    async with connect(address) as channel:
        try:
            yield RunningTarget(service, address, channel, target_pb2_grpc.TargetServiceStub(channel))
        finally:
            await service.host.stop()


class DraftStream:
    """A client's end of one draft stream.

    Attributes:
        pushed: blocks drafted ahead that came, and that no command has asked for since.
    """

    def __init__(self, stub: Any) -> None:
        self.call = stub.Draft()
        self._waiting: list[draft_pb2.DraftEvent] = []
        self.pushed: list[draft_pb2.DraftEvent] = []

    async def send(self, *commands: draft_pb2.DraftCommand) -> None:
        async with asyncio.timeout(DEADLINE):
            await self.call.write(draft_pb2.DraftRequest(commands=commands))

    async def event(self) -> draft_pb2.DraftEvent:
        """The next answer."""
        while not self._waiting:
            await self._read()
        return self._waiting.pop(0)

    async def push(self) -> draft_pb2.DraftEvent:
        """The oldest block drafted ahead that no command has asked for."""
        while not self.pushed:
            await self._read()
        return self.pushed.pop(0)

    async def ask(
        self, command: draft_pb2.DraftCommand, committed: Sequence[int] | None = None
    ) -> draft_pb2.DraftEvent:
        """Sends a command and returns its answer: the next event, or a block that was pushed for just this.

        Without `committed`, all committed tokens, what a pushed block is for is known as far as the command says it.
        """
        await self.send(command)
        while not self._waiting:
            for event in self.pushed:
                if _answers(event, command, None if committed is None else to_bytes(int32(committed))):
                    self.pushed.remove(event)
                    return event
            await self._read()
        event = await self.event()
        assert event.session_id == command.session_id
        return event

    async def _read(self) -> None:
        async with asyncio.timeout(DEADLINE):
            response = await self.call.read()
        assert isinstance(response, draft_pb2.DraftResponse), "the stream ended"
        for event in response.events:
            (self.pushed if event.hypothesis else self._waiting).append(event)

    async def end(self) -> grpc.StatusCode:
        """Half-closes and returns the status."""
        async with asyncio.timeout(DEADLINE):
            await self.call.done_writing()
            return await self.code()

    async def code(self) -> grpc.StatusCode:
        """The status, which comes after everything that was sent."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code()  # type: ignore[no-any-return]


def _answers(event: draft_pb2.DraftEvent, command: draft_pb2.DraftCommand, committed: bytes | None) -> bool:
    """Whether a pushed block is for the tokens of an Advance."""
    advance = command.advance
    if (event.session_id, event.epoch, event.base_length) != (command.session_id, command.epoch, advance.base_length):
        return False
    if committed is not None:
        return committed.endswith(event.hypothesis)
    known = min(len(event.hypothesis), len(advance.tokens))
    return event.hypothesis[-known:] == advance.tokens[-known:]


def open_command(
    session_id: str,
    tokens: Sequence[int],
    lookahead: int,
    *,
    law: LawParams | None = None,
    seed: int = 7,
    top: int = 0,
    epoch: int = 1,
    proposer: int = 0,
    nodes: int = 0,
) -> draft_pb2.DraftCommand:
    command = draft_pb2.DraftCommand(session_id=session_id, epoch=epoch)
    command.open.tokens = to_bytes(int32(tokens))
    command.open.law.CopyFrom(to_law_spec(law or LawParams(), seed))
    command.open.lookahead = lookahead
    command.open.law_top = top
    command.open.proposer = proposer  # type: ignore[assignment]
    command.open.max_nodes = nodes
    return command


def advance_command(
    session_id: str,
    tokens: Sequence[int],
    lookahead: int,
    *,
    new: int = 1,
    epoch: int = 1,
    hash_of: Sequence[int] | None = None,
    nodes: int = 0,
) -> draft_pb2.DraftCommand:
    """`tokens` are all committed ones; the last `new` travel."""
    before = tokens[: len(tokens) - new]
    command = draft_pb2.DraftCommand(session_id=session_id, epoch=epoch)
    command.advance.base_length = len(tokens)
    command.advance.tokens = to_bytes(int32(tokens[len(tokens) - new :]))
    command.advance.prefix_hash = prefix_hash(int32(before if hash_of is None else hash_of))
    command.advance.lookahead = lookahead
    command.advance.max_nodes = nodes
    return command


def close_command(session_id: str, epoch: int = 1) -> draft_pb2.DraftCommand:
    return draft_pb2.DraftCommand(session_id=session_id, epoch=epoch, close=draft_pb2.Close())


def block_of(event: draft_pb2.DraftEvent) -> tuple[list[int], SparseLaw]:
    """(tokens, law) of an event that must hold a block; no rows of law where its acceptance rule looks at none."""
    assert event.WhichOneof("outcome") == "block", event
    tokens = int32s(event.block.tokens, "tokens").tolist()
    rows = len(tokens) if event.block.law.sizes else 0
    return tokens, law_from_message(event.block.law, rows, tree=bool(event.block.parents))


def shape_of(event: draft_pb2.DraftEvent) -> Tree | None:
    """The shape of a block; None for a chain."""
    parents = int32s(event.block.parents, "parents")
    return Tree.of(parents) if len(parents) else None


def draft_error(event: draft_pb2.DraftEvent) -> OutriderError:
    """The error of an event that must hold one."""
    assert event.WhichOneof("outcome") == "error", event
    return from_status(event.error)


@dataclass
class RunningDraft:
    """A draft worker and a channel to it."""

    service: DraftService
    address: str
    channel: grpc.aio.Channel
    stub: Any = field(repr=False)

    service_name = DRAFT_SERVICE

    @property
    def host(self) -> WorkerHost[Any, Any]:
        return self.service.host

    def stream(self) -> DraftStream:
        return DraftStream(self.stub)

    async def info(self) -> draft_pb2.DraftServiceGetInfoResponse:
        answer = await self.stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=DEADLINE)
        assert isinstance(answer, draft_pb2.DraftServiceGetInfoResponse)
        return answer

    async def until_sessions(self, count: int) -> None:
        """Returns when the worker holds that many sessions."""
        await eventually(lambda: self.service.load().open_sessions == count)


@asynccontextmanager
async def start_draft(
    engine: Engine | Callable[[], Engine],
    *,
    load: bool = True,
    metrics: DraftMetrics | None = None,
    **settings: Any,
) -> AsyncIterator[RunningDraft]:
    """A draft worker whose model (and early exit) is the engine; `load=False` leaves loading to the test."""
    config = DraftConfig(model="test", **{"grace": 0.2, **settings})

    def engines() -> Engines:
        made = engine() if callable(engine) else engine
        copying = (draft_pb2.PROPOSER_PROMPT_LOOKUP, draft_pb2.PROPOSER_PREDICTION, draft_pb2.PROPOSER_SUFFIX)
        kinds = [kind for kind in config.kinds if kind not in copying]
        return dict.fromkeys(kinds, made), made.info

    service = DraftService(config, engines, metrics)
    address = f"{config.host}:{await service.host.start()}"
    if load:
        await service.host.load()
    async with connect(address) as channel:
        try:
            yield RunningDraft(service, address, channel, draft_pb2_grpc.DraftServiceStub(channel))
        finally:
            await service.host.stop()
