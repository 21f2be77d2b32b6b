"""A gRPC server with health and reflection whose readiness is an acknowledgement and whose shutdown is staged."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.net.channel import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from outrider.net.malformed import RefuseMalformed
from outrider.net.tls import TlsFiles, server_credentials

log = logging.getLogger(__name__)


class PortInUse(Exception):
    """The address cannot be bound; the message names it."""


class Server:
    """One service of a process.

    The order of a life: `start` binds and answers health with NOT_SERVING; `ready` says SERVING; `stop` says
    NOT_SERVING, lets running calls finish for the grace period and cancels the rest.
    """

    def __init__(
        self,
        service_name: str,
        *,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes)]
        self.grpc = grpc.aio.server(interceptors=[*interceptors, RefuseMalformed()], options=options)
        self._service_name = service_name
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self, host: str, port: int, tls: TlsFiles | None = None) -> int:
        """Binds and starts; returns the bound port (port 0 chooses a free one). Raises PortInUse, TlsError."""
        credentials = server_credentials(tls) if tls else None
        address = f"{host}:{port}"
        try:
            if credentials is None:
                bound = self.grpc.add_insecure_port(address)
            else:
                bound = self.grpc.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {host}:{port}: the port is in use or not ours to bind") from error
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.start()
        return bound

    async def ready(self, serving: bool = True) -> None:
        """Turns readiness on or off."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._set(status)

    async def stop(self, grace: float) -> None:
        """Refuses new calls, gives running ones `grace` seconds, then cancels them. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace)

    async def _set(self, status: "health_pb2.HealthCheckResponse.ServingStatus.ValueType") -> None:
        for name in ("", self._service_name):
            await self._health.set(name, status)


async def until_signal() -> None:
    """Returns at the first SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()


async def run_until_signal(closers: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Waits for SIGTERM or SIGINT, then runs the closers in order, each even when one before it failed."""
    await until_signal()
    for closer in closers:
        try:
            await closer()
        except Exception:
            log.exception("shutdown step failed")
