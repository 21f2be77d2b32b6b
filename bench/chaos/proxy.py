"""A TCP proxy between two parts of the system: the network cable that the faults pull."""

import asyncio
import contextlib
import socket
import struct

_CHUNK = 1 << 16
# SO_LINGER on, zero seconds: closing sends RST at once.
_RST = struct.pack("ii", 1, 0)


class Proxy:
    """Listens at one address as long as it lives; whatever listens behind it may end and begin again elsewhere.

    Attributes:
        upstream: HOST:PORT or the path of a unix socket; empty while nothing listens.
        address: where it listens.
    """

    def __init__(self) -> None:
        self.upstream = ""
        self.address = ""
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def start(self) -> None:
        """Chooses a free port and listens."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Ends every connection and the listening."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """A black hole: connections stay, nothing passes any more, not even their end."""
        self._passing.clear()

    def mend(self) -> None:
        """Undoes `cut`: what was held passes, however late."""
        self._passing.set()

    def reset(self) -> None:
        """Every connection ends with RST on both sides; new ones pass."""
        for writer in [writer for writers in self._connections.values() for writer in writers]:
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        writers = self._connections[task] = [writer]
        try:
            await self._passing.wait()
            onward_reader, onward_writer = await self._dial()
            writers.append(onward_writer)
            pumps = (self._pump(reader, onward_writer), self._pump(onward_reader, writer))
            tasks = [asyncio.ensure_future(pump) for pump in pumps]
            try:
                # Whichever side ends: nobody here half-closes.
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except (OSError, asyncio.CancelledError):  # nobody listens behind it, or the proxy is being closed
            _reset(writer)
        finally:
            del self._connections[task]
            for each in writers:
                each.close()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self.upstream:
            raise ConnectionRefusedError
        if self.upstream.startswith("/"):
            return await asyncio.open_unix_connection(self.upstream)
        host, _, port = self.upstream.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        await self._passing.wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    if writer.transport.is_closing():
        return
    connection: socket.socket = writer.get_extra_info("socket")
    if connection.family is not socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
    writer.transport.abort()
