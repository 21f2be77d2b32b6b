"""A server's processes, stopped while somebody else is measured on the same cores."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


class ProcessTree:
    """A process and all that descends from it.

    Args:
        pid: of the process. Raises psutil.NoSuchProcess when there is none.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._stopped: set[psutil.Process] = set()

    def stop(self) -> None:
        """Stops all of them (SIGSTOP), those that were started meanwhile as well. Idempotent."""
        while new := self._alive() - self._stopped:
            for process in new:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
                self._stopped.add(process)

    def go_on(self) -> None:
        """Lets those that were stopped go on. Idempotent."""
        while self._stopped:
            with suppress(psutil.NoSuchProcess):
                self._stopped.pop().resume()

    def _alive(self) -> set[psutil.Process]:
        try:
            return {self._root, *self._root.children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()


@contextmanager
def stoppable(pid: int | None) -> Iterator[ProcessTree | None]:
    """A tree that goes on afterwards, whatever happens; None without a process."""
    tree = None if pid is None else ProcessTree(pid)
    try:
        yield tree
    finally:
        if tree is not None:
            tree.go_on()
