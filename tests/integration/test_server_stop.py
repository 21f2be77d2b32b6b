"""J8: a server that stops waits for its handlers, and those that abort meanwhile end with their status."""

import asyncio
from typing import Any

import grpc
import pytest

from outrider.net.channel import connect
from outrider.net.errors import OutriderError, abort, from_rpc_error
from outrider.net.server import Server
from outrider.v1 import target_pb2, target_pb2_grpc, types_pb2
from tests.harness.engines import DEADLINE


class Handlers(target_pb2_grpc.TargetServiceServicer):
    """Verify answers and Release aborts, both when they are let go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Semaphore(0), asyncio.Event()

    async def Verify(self, request: target_pb2.VerifyRequest, context: Any) -> target_pb2.VerifyResponse:
        self.begun.release()
        await self.go_on.wait()
        return target_pb2.VerifyResponse(results=[target_pb2.VerifyResult(session_id="answered")])

    async def Release(self, request: target_pb2.ReleaseRequest, context: Any) -> target_pb2.ReleaseResponse:
        self.begun.release()
        await self.go_on.wait()
        await abort(context, OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_after=1.0))


async def refusing(stub: Any) -> None:
    """Returns when the server lets nobody in."""
    code = None
    while code is not grpc.StatusCode.UNAVAILABLE:
        try:
            await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            code = error.code()  # until then UNIMPLEMENTED


async def test_j8_a_handler_that_aborts_while_the_server_stops_does_not_end_the_others() -> None:
    handlers, server = Handlers(), Server("outrider.v1.TargetService")
    target_pb2_grpc.add_TargetServiceServicer_to_server(handlers, server.grpc)
    port = await server.start("127.0.0.1", 0)
    async with connect(f"127.0.0.1:{port}") as channel, asyncio.timeout(DEADLINE):
        stub = target_pb2_grpc.TargetServiceStub(channel)
        answered = asyncio.ensure_future(stub.Verify(target_pb2.VerifyRequest(), timeout=DEADLINE))
        aborted = asyncio.ensure_future(stub.Release(target_pb2.ReleaseRequest(), timeout=DEADLINE))
        for _ in range(2):
            await handlers.begun.acquire()
        stopping = asyncio.create_task(server.stop(DEADLINE))
        await refusing(stub)
        assert not stopping.done()
        handlers.go_on.set()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await aborted
        error = from_rpc_error(refused.value)
        assert error is not None
        assert (error.reason, error.retry_after) == (types_pb2.ERROR_REASON_QUEUE_FULL, 1.0)
        assert (await answered).results[0].session_id == "answered"
        await stopping
