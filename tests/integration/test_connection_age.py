"""J1: clients that keep a connection come to new replicas all the same."""

import asyncio
from typing import Any

from outrider.net.channel import connect
from outrider.net.server import Server
from outrider.v1 import target_pb2, target_pb2_grpc
from tests.harness.engines import DEADLINE


class Handlers(target_pb2_grpc.TargetServiceServicer):
    """GetInfo tells the connection; Verify runs until it is let go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def GetInfo(self, request: object, context: Any) -> target_pb2.TargetServiceGetInfoResponse:
        return target_pb2.TargetServiceGetInfoResponse(instance_id=context.peer())

    async def Verify(self, request: object, context: Any) -> target_pb2.VerifyResponse:
        await self.go_on.wait()
        return target_pb2.VerifyResponse(results=[target_pb2.VerifyResult(session_id=context.peer())])


async def test_j1_a_client_is_given_another_connection_and_running_calls_go_on() -> None:
    handlers, server = Handlers(), Server("outrider.v1.TargetService", connection_age=0.2)
    target_pb2_grpc.add_TargetServiceServicer_to_server(handlers, server.grpc)
    port = await server.start("127.0.0.1", 0)
    try:
        async with connect(f"127.0.0.1:{port}") as channel, asyncio.timeout(DEADLINE):
            stub = target_pb2_grpc.TargetServiceStub(channel)
            running = asyncio.ensure_future(stub.Verify(target_pb2.VerifyRequest(), timeout=DEADLINE))
            seen: set[str] = set()
            while len(seen) < 3:
                answer = await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), timeout=DEADLINE)
                seen.add(answer.instance_id)
                await asyncio.sleep(0.01)
            assert not running.done()
            handlers.go_on.set()
            assert (await running).results[0].session_id
    finally:
        await server.stop(0)
