"""Waiting for a service to say that it serves."""

import asyncio
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.supervise import NotReady
from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2 import OrchestratorServiceGetInfoRequest, OrchestratorServiceGetInfoResponse
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

_POLL_SECONDS = 0.1
_CALL_SECONDS = 5.0


async def until_serving(name: str, address: str, within: float) -> None:
    """Returns when grpc.health.v1 at `address` says SERVING. Raises NotReady, with the name, after `within` seconds."""
    try:
        async with asyncio.timeout(within), connect(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not await _watched_serving(stub, within):
                pass
    except TimeoutError:
        raise NotReady(f"{name} at {address} was not ready within {within:g} s") from None


async def _watched_serving(stub: health_pb2_grpc.HealthStub, within: float) -> bool:
    """Whether the watch saw SERVING before it broke; a broken one is opened again when the channel has reconnected."""
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=within, wait_for_ready=True)
    with suppress(grpc.aio.AioRpcError):
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
    return False


async def until_paired(address: str, within: float) -> OrchestratorServiceGetInfoResponse:
    """The orchestrator's view once it uses all its workers, or after `within` seconds what it is by then."""
    async with connect(address) as channel:
        stub = OrchestratorServiceStub(channel)
        ends = asyncio.get_running_loop().time() + within
        while True:
            info = await stub.GetInfo(OrchestratorServiceGetInfoRequest(), timeout=_CALL_SECONDS)
            if all(worker.usable for worker in info.workers) or asyncio.get_running_loop().time() > ends:
                return info
            await asyncio.sleep(_POLL_SECONDS)
