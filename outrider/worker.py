"""The life of a worker process: bind, load, serve, drain; and what happens when its engine dies or hangs."""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Generic, TypeVar

from outrider.config import WorkerConfig
from outrider.lm.engine_load import EngineLoad
from outrider.lm.engine_thread import EngineThread, Scheduler
from outrider.net.errors import OutriderError
from outrider.net.server import Server, on_signal
from outrider.observe.metrics import WorkerMetrics
from outrider.process import started
from outrider.v1 import types_pb2

log = logging.getLogger(__name__)

Command = TypeVar("Command")
Result = TypeVar("Result")

_WATCH_SECONDS = 0.25
_LOADING_RETRY_SECONDS = 1.0


class State(Enum):
    """Where a worker stands."""

    LOADING = "loading"
    SERVING = "serving"
    STUCK = "stuck"
    FAILED = "failed"
    DRAINING = "draining"


def loading_error() -> OutriderError:
    """What is answered before the model is there."""
    message = "the model is still loading"
    return OutriderError(types_pb2.ERROR_REASON_NO_WORKER, message, retry_after=_LOADING_RETRY_SECONDS)


class WorkerHost(Generic[Command, Result]):
    """Server, engine thread and watchdog of one worker.

    Args:
        service_name: full name of the gRPC service, for health and reflection.
        build: loads the engine, warms it up and makes the scheduler; runs in the engine thread.
        deliver: called on the event loop with the results of a pass.
        fail_pending: called on the event loop when nothing that is pending will be answered: ends it with the error.
        drained: returns when nothing is pending.
    """

    def __init__(
        self,
        service_name: str,
        config: WorkerConfig,
        *,
        build: Callable[[], Scheduler[Command, Result]],
        deliver: Callable[[list[Result]], None],
        fail_pending: Callable[[OutriderError], None],
        drained: Callable[[], Awaitable[None]],
    ) -> None:
        self.server = Server(service_name)
        self.thread: EngineThread[Command, Result] = EngineThread(f"{service_name} engine", build, deliver, self._died)
        self.state = State.LOADING
        self.loaded = False
        self.instance_id = secrets.token_hex(8)
        self._config = config
        self._fail_pending, self._drained = fail_pending, drained
        self._dead = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    def refusal(self) -> OutriderError | None:
        """Why new work is refused at this moment; None when it is not."""
        match self.state:
            case State.SERVING:
                return None
            case State.LOADING:
                return loading_error()
            case State.DRAINING:
                return OutriderError(types_pb2.ERROR_REASON_DRAINING, "the worker is shutting down")
            case State.STUCK | State.FAILED:
                return OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, f"the engine thread is {self.state.value}")

    def watch(self, metrics: WorkerMetrics, load: Callable[[], EngineLoad], queue: Callable[[], float]) -> None:
        """Lets the worker be seen."""
        metrics.watch(
            state=lambda: self.state.value,
            turn_age=self.thread.stuck_seconds,
            load=load,
            queue=queue,
            token_budget=self._config.token_budget,
        )

    async def start(self) -> int:
        """Binds; returns the port. Health answers NOT_SERVING from here on. Raises PortInUse, TlsError."""
        config = self._config
        return await self.server.start(config.host, config.port, config.tls, config.health_address)

    async def load(self) -> None:
        """Loads the engine and turns SERVING. Raises ModelRefused, or whatever the load raised."""
        await self.thread.start()
        self.loaded = True
        if self.state is State.LOADING:
            self.state = State.SERVING
            await self.server.ready()
            self._watch = asyncio.create_task(self._watch_engine())

    async def stop(self) -> bool:
        """NOT_SERVING; new work is refused, running work gets the grace period, then everything ends.

        Returns False when the engine thread could not be ended.
        """
        if self._watch is not None:
            self._watch.cancel()
        if self.state is State.SERVING:
            self.state = State.DRAINING
            await self.server.ready(False)
            await self._drain()
        self.state = State.DRAINING if self.state is not State.FAILED else State.FAILED
        await self.server.stop(grace=min(1.0, self._config.grace))
        return await self.thread.stop(grace=min(1.0, self._config.grace))

    async def run(self, announce: Callable[[int], None]) -> int:
        """A process's life up to SIGTERM, SIGINT or the engine's death; returns the exit code.

        Raises PortInUse, TlsError, ModelRefused, or what else kept it from starting.
        """
        stopped = on_signal()
        announce(await self.start())
        signalled = asyncio.create_task(stopped.wait())
        dead = asyncio.create_task(self._dead.wait())
        loading = asyncio.create_task(self.load())
        try:
            await asyncio.wait({signalled, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading
                started()
                log.info("serving %s", self._config.model)
                await asyncio.wait({signalled, dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (signalled, dead, loading):
                task.cancel()
            ended = await self.stop()
        code = 1 if self._dead.is_set() else 0
        if not ended:
            # Leaving the interpreter while the thread is inside the model would crash in native code.
            log.warning("the engine thread is still in a pass or a load and is left behind")
            logging.shutdown()
            os._exit(code)
        return code

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._config.grace):
                await self._drained()
        except TimeoutError:
            log.warning("work was still pending after %g s of grace", self._config.grace)
            self._fail_pending(OutriderError(types_pb2.ERROR_REASON_DRAINING, "the worker is shutting down"))

    def _died(self, error: BaseException) -> None:
        log.critical("the engine thread died: %s", error, exc_info=error)
        self.state = State.FAILED
        self._dead.set()
        self._fail_pending(OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, "the engine thread died"))

    async def _watch_engine(self) -> None:
        """Readiness and liveness follow the engine; a pass that takes too long ends what waits for it."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self.state is State.FAILED:
                await self._tell(False)
                return
            stuck = self.thread.stuck_seconds()
            if self.state is State.SERVING and stuck > self._config.stall_timeout:
                log.error("the engine thread has been in one pass for %.0f s", stuck)
                self.state = State.STUCK
                await self._tell(False)
                message = f"the engine thread has been in one pass for {stuck:.0f} s"
                self._fail_pending(OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, message))
            elif self.state is State.STUCK and stuck < self._config.stall_timeout:
                log.warning("the engine thread moves again")
                self.state = State.SERVING
                await self._tell(True)

    async def _tell(self, well: bool) -> None:
        await self.server.ready(well)
        await self.server.alive(well)
