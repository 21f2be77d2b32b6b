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

# Of grpc.health.v1, beside "" and the service's full name, which tell whether calls are taken.
LIVENESS = "liveness"


class PortInUse(Exception):
    """The address cannot be bound; the message names it."""


class Server:
    """One service of a process.

    The order of a life: `start` binds and answers health with NOT_SERVING; `ready` says SERVING; `stop` says
    NOT_SERVING, lets running calls finish for the grace period and cancels the rest.

    Beside it, health of the name LIVENESS is SERVING from `start` to `stop`, unless `alive` says that the process will
    not come to its senses: who restarts processes should not ask whether one is ready, for it may be loading.

    Args:
        connection_age: seconds, give or take a tenth, after which a client is told to make its next calls over another
            connection; running ones go on. 0: never.
    """

    def __init__(
        self,
        service_name: str,
        *,
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        connection_age: float = 0.0,
    ) -> None:
        options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes)]
        if connection_age:
            options.append(("grpc.max_connection_age_ms", int(connection_age * 1_000)))
        self.grpc = grpc.aio.server(interceptors=[*interceptors, RefuseMalformed()], options=options)
        self._service_name = service_name
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        self._health_alone: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, tls: TlsFiles | None = None, health_address: str = "") -> int:
        """Binds and starts; returns the bound port (port 0 chooses a free one). Raises PortInUse, TlsError.

        Args:
            host, port: where everything is served.
            tls: how; plain text without.
            health_address: HOST:PORT where health alone is answered as well, always in plain text; "" for nowhere.
        """
        bound = _bind(self.grpc, f"{host}:{port}", server_credentials(tls) if tls else None)
        await self.ready(False)
        await self.alive()
        if health_address:
            self._health_alone = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_alone)
            _bind(self._health_alone, health_address, None)
            await self._health_alone.start()
        await self.grpc.start()
        return bound

    async def ready(self, serving: bool = True) -> None:
        """Turns readiness on or off."""
        for name in ("", self._service_name):
            await self._health.set(name, _status(serving))

    async def alive(self, living: bool = True) -> None:
        """Says whether the process may go on; without a call it may."""
        await self._health.set(LIVENESS, _status(living))

    async def stop(self, grace: float) -> None:
        """Refuses new calls, gives running ones `grace` seconds, then cancels them. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace)
        if self._health_alone is not None:
            await self._health_alone.stop(None)


def _status(well: bool) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType":
    return health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise PortInUse(f"cannot listen on {address}: the port is in use or not ours to bind") from error


def on_signal() -> asyncio.Event:
    """Is set at the first SIGTERM or SIGINT from now on. To be called before anybody can know of the process: whoever
    does may end it at once."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


async def close_each(closers: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Runs the closers in order, each even when one before it failed."""
    for closer in closers:
        try:
            await closer()
        except Exception:
            log.exception("shutdown step failed")
