"""Health as the kubelet asks for it: liveness beside readiness, and a plain port of its own beside TLS."""

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.config import ConfigError, parse_config
from outrider.lm.engine import Engine
from outrider.net.channel import connect
from outrider.net.server import LIVENESS, PortInUse, Server
from outrider.v1 import target_pb2, target_pb2_grpc
from target_service.config import TargetConfig
from tests.harness.certificates import Authority, Mount
from tests.harness.engines import DEADLINE
from tests.harness.faults import target_engine
from tests.harness.processes import free_ports
from tests.harness.workers import health_of, start_target

HOST = "127.0.0.1"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def free_address() -> str:
    return f"{HOST}:{free_ports(1)[0]}"


async def test_j6_a_worker_that_loads_is_alive_and_not_ready() -> None:
    may_load = threading.Event()

    def load() -> Engine:
        assert may_load.wait(DEADLINE)
        return target_engine()

    async with start_target(load, load=False) as target:
        loading = asyncio.create_task(target.host.load())
        assert await health_of(target.channel) == NOT_SERVING
        assert await health_of(target.channel, LIVENESS) == SERVING
        may_load.set()
        await loading
        assert await health_of(target.channel) == SERVING
        assert await health_of(target.channel, LIVENESS) == SERVING


async def test_health_alone_is_plain_beside_tls_and_nothing_else_is_there(tmp_path: Path) -> None:
    authority = Authority()
    mount = Mount(tmp_path / "tls", authority.issue(HOST), authority.pem)
    server, address = Server("outrider.v1.TargetService"), free_address()
    target_pb2_grpc.add_TargetServiceServicer_to_server(target_pb2_grpc.TargetServiceServicer(), server.grpc)
    port = await server.start(HOST, 0, mount.files(), address)
    try:
        async with connect(address) as plain, connect(f"{HOST}:{port}", mount.client()) as secure:
            await server.ready()
            for service in ("", "outrider.v1.TargetService", LIVENESS):
                assert await health_of(plain, service) == await health_of(secure, service) == SERVING
            await server.alive(False)
            assert await health_of(plain, LIVENESS) == NOT_SERVING
            assert await health_of(plain) == SERVING
            stub, request = target_pb2_grpc.TargetServiceStub(plain), target_pb2.TargetServiceGetInfoRequest()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetInfo(request, timeout=DEADLINE)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "Method not found" in (refused.value.details() or "")
    finally:
        await server.stop(0)


async def test_a_health_port_that_is_taken_is_told() -> None:
    first, second, address = Server("a"), Server("b"), free_address()
    await first.start(HOST, 0, None, address)
    try:
        with pytest.raises(PortInUse, match=address):
            await second.start(HOST, 0, None, address)
    finally:
        await first.stop(0)
        await second.stop(0)


@pytest.mark.parametrize("address", ["7803", "host:", "127.0.0.1:99999", "127.0.0.1:1,127.0.0.1:2"])
def test_a_health_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match="--health-address"):
        parse_config(TargetConfig, ["--model", "synthetic:", "--health-address", address])
