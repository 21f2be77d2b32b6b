"""A server that is stopped while another is measured goes on afterwards, whatever happens."""

import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from bench.stopped import stoppable

# A shell with a child of its own, which says when that is there.
_TREE = ("sh", "-c", "sleep 600 & echo started; wait")


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(_TREE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        root = psutil.Process(process.pid)
        tree = [*root.children(recursive=True), root]
        try:
            yield process.pid
        finally:
            for each in tree:
                each.kill()


def _until(pid: int, *, stopped: bool) -> None:
    """Returns when both processes are: a signal takes effect when its process is next looked at."""
    root = psutil.Process(pid)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        states = [each.status() == psutil.STATUS_STOPPED for each in (root, *root.children(recursive=True))]
        if states == [stopped, stopped]:
            return
        time.sleep(0.01)
    raise AssertionError(f"stopped: {states}, expected {stopped}")


def test_stops_the_whole_tree_and_lets_it_go_on(pid: int) -> None:
    with stoppable(pid) as server:
        assert server is not None
        for _ in range(2):
            server.stop()
            server.stop()
            _until(pid, stopped=True)
            server.go_on()
            _until(pid, stopped=False)


def test_goes_on_after_a_failure(pid: int) -> None:
    def fails() -> None:
        with stoppable(pid) as server:
            assert server is not None
            server.stop()
            _until(pid, stopped=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    _until(pid, stopped=False)


def test_a_server_that_ends_while_it_is_stopped_is_no_failure(pid: int) -> None:
    with stoppable(pid) as server:
        assert server is not None
        server.stop()
        for child in psutil.Process(pid).children():
            child.kill()
        psutil.Process(pid).kill()


def test_without_a_process_there_is_nothing_to_stop() -> None:
    with stoppable(None) as server:
        assert server is None
