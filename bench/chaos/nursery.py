"""Processes that start at once: forked from one that has imported everything and done nothing else.

Importing torch and transformers takes seconds of CPU; a system whose processes are killed hundreds of times would do
little else. The children are processes like any other, in sessions of their own, and end with the nursery.

    python -m bench.chaos.nursery FD

answers on the socket FD: a message [module, arguments] with two descriptors, for stdout and stderr, starts a child and
is answered by its process id; the end of a child is told as [process id, exit code].
"""

import asyncio
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections import deque

from outrider.cli.child import Child, Command, Log
from outrider.cli.tether import tethered, tie_to

MODULES = ("orchestrator", "draft_service", "target_service")
_MESSAGE = 1 << 16
_STDOUT, _STDERR = 1, 2
# Threads do not survive a fork: none may run by then.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Newborn(Child):
    """A child of the nursery."""

    def __init__(self, command: Command, log: Log) -> None:
        super().__init__(command, log)
        self.born: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.born.result()


class Nursery:
    """The side that asks. Its process ends with this one, and all children with it."""

    def __init__(self) -> None:
        self._channel, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._unborn: deque[Newborn] = deque()
        self._children: dict[int, Newborn] = {}
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Returns when everything is imported."""
        number = self._other.fileno()
        command = tethered((sys.executable, "-m", "bench.chaos.nursery", str(number)))
        environment = {**os.environ, **_ENVIRONMENT}
        self._process = await asyncio.create_subprocess_exec(*command, pass_fds=(number,), env=environment)
        self._other.close()
        asyncio.get_running_loop().add_reader(self._channel, self._told)
        await self._ready.wait()

    async def start(self, command: Command, log: Log) -> Newborn:
        """As Child.start, for `python -m MODULE FLAGS...`."""
        child = Newborn(command, log)
        self._unborn.append(child)
        pipes = [os.pipe(), os.pipe()]
        socket.send_fds(self._channel, [json.dumps(command.arguments[2:]).encode()], [write for _, write in pipes])
        for number, (read, write) in zip((_STDOUT, _STDERR), pipes, strict=True):
            os.close(write)
            await _listen(child, number, read)
        await child.born
        return child

    async def close(self) -> None:
        """Ends all of them."""
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    def _told(self) -> None:
        message = self._channel.recv(_MESSAGE)
        if not message:
            raise RuntimeError("the nursery has died")
        match json.loads(message):
            case ["ready"]:
                self._ready.set()
            case ["born", pid]:
                child = self._children[pid] = self._unborn.popleft()
                child.born.set_result(pid)
            case ["ended", pid, code]:
                self._children.pop(pid).ended.set_result(code)


async def _listen(child: Newborn, number: int, read: int) -> None:
    class Pipe(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            child.pipe_data_received(number, data)

        def connection_lost(self, exc: Exception | None) -> None:
            child.pipe_connection_lost(number, exc)

    await asyncio.get_running_loop().connect_read_pipe(Pipe, os.fdopen(read, "rb", 0))


def serve(channel: socket.socket) -> None:
    """Forks a child for each message until the other side is gone; returns only in children, as what they became."""
    for module in MODULES:
        importlib.import_module(f"{module}.__main__")
        del sys.modules[f"{module}.__main__"]  # it will be run, not imported
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads run, a fork would lose them"
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    channel.send(json.dumps(["ready"]).encode())
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == woken:
                os.read(woken, _MESSAGE)
                _tell_ends(channel)
                continue
            message, descriptors, *_ = socket.recv_fds(channel, _MESSAGE, 2)
            if not message:
                sys.exit()
            pid = os.fork()
            if not pid:
                selector.close()
                channel.close()
                _become(json.loads(message), descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(json.dumps(["born", pid]).encode())


def _tell_ends(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there is none
            return
        if not pid:
            return
        channel.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())


def _become(command: list[str], descriptors: list[int]) -> None:
    """Runs a module as the main program of this process."""
    parent = os.getppid()
    os.setsid()
    tie_to(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in zip((_STDOUT, _STDERR), descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
