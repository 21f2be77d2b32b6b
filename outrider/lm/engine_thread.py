"""The one thread that owns an engine. The event loop posts commands to it and gets results back; neither waits."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Command = TypeVar("Command")
Result = TypeVar("Result")

# How often the scheduler may free what has timed out; an idle thread wakes for it.
SWEEP_SECONDS = 1.0


class Scheduler(Protocol[Command, Result]):
    """What the engine thread runs. Its methods are called by that thread alone."""

    def handle(self, commands: list[Command]) -> list[Result]:
        """Takes commands in the order in which they were posted. Never runs the model."""

    def step(self) -> list[Result]:
        """Runs at most one forward pass per engine. Called only while `busy`."""

    def sweep(self) -> None:
        """Frees what has timed out. Called about once a second, between passes."""

    @property
    def busy(self) -> bool:
        """Whether there is work for a pass."""


class EngineThread(Generic[Command, Result]):
    """Runs a scheduler: commands in, results to the event loop: once per pass, and before it those that need none.

    Args:
        name: the thread's name.
        build: loads the engine and makes the scheduler; runs in the thread, so that the event loop answers meanwhile.
        deliver: called on the event loop with the results of a pass.
        failed: called on the event loop, once, when the scheduler raised: the thread is dead and nothing will be
            answered any more.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Scheduler[Command, Result]],
        deliver: Callable[[list[Result]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._build, self._deliver, self._failed = build, deliver, failed
        self._inbox: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._turn_began: float | None = None
        self._swept_at = -math.inf
        # Daemon: a pass that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def start(self) -> None:
        """Starts the thread and waits until the scheduler is built. Raises what `build` raised."""
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._built

    def post(self, command: Command) -> None:
        """Hands a command over; never blocks. Commands posted after a failure or a stop are never answered."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    async def stop(self, grace: float) -> bool:
        """Ends the thread after the pass that it is in; False when it is still in that pass after `grace` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, grace)
        return not self._thread.is_alive()

    def stuck_seconds(self) -> float:
        """For how long the thread has been in its present turn; 0 while it waits for commands."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        try:
            scheduler = self._build()
        except BaseException as error:
            self._call_loop(self._settle, error)
            return
        self._call_loop(self._settle, None)
        try:
            while self._turn(scheduler):
                pass
        except BaseException as error:
            self._call_loop(self._failed, error)
        finally:
            self._turn_began = None

    def _turn(self, scheduler: Scheduler[Command, Result]) -> bool:
        """Commands, one pass, hand-over; False when told to stop."""
        commands = self._take(wait=not scheduler.busy)
        if self._stopping:
            return False
        self._turn_began = time.monotonic()
        self._hand_over(scheduler.handle(commands))
        if scheduler.busy:
            self._hand_over(scheduler.step())
        if time.monotonic() - self._swept_at >= SWEEP_SECONDS:
            scheduler.sweep()
            self._swept_at = time.monotonic()
        return True

    def _hand_over(self, results: list[Result]) -> None:
        if results:
            self._call_loop(self._deliver, results)

    def _take(self, *, wait: bool) -> list[Command]:
        """All posted commands; with `wait`, blocks until there is one or a sweep is due."""
        with self._wake:
            if wait and not self._inbox and not self._stopping:
                self._turn_began = None
                self._wake.wait(SWEEP_SECONDS)
            commands = list(self._inbox)
            self._inbox.clear()
        return commands

    def _settle(self, error: BaseException | None) -> None:
        if self._built.done():  # the starter was cancelled
            return
        if error is None:
            self._built.set_result(None)
        else:
            self._built.set_exception(error)

    def _call_loop(self, function: Callable[..., None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The loop is closed: the process is going down and nobody waits for results any more.
            if not self._loop.is_closed():
                raise
