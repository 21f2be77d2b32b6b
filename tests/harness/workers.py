"""Workers in the test's process: real gRPC servers on a free port over any engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.lm.engine import Engine
from outrider.net.arrays import logits_from_message, prefix_hash, to_bytes
from outrider.net.channel import connect
from outrider.net.errors import OutriderError, from_status
from outrider.v1 import target_pb2, target_pb2_grpc, types_pb2
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
    engine: Engine | Callable[[], Engine], *, load: bool = True, **settings: Any
) -> AsyncIterator[RunningTarget]:
    """A target over an engine, or over a function that loads one; `load=False` leaves loading to the test."""
    make: Callable[[], Engine] = engine if callable(engine) else lambda: engine
    config = TargetConfig(model="test", **{"grace": 0.2, **settings})
    service = TargetService(config, make)
    address = f"{config.host}:{await service.host.start()}"
    if load:
        await service.host.load()
    async with connect(address) as channel:
        try:
            yield RunningTarget(service, address, channel, target_pb2_grpc.TargetServiceStub(channel))
        finally:
            await service.host.stop()
