"""A client of server-streaming calls that costs next to nothing: HTTP/2 frames read off the socket, messages as bytes.

gRPC's own client takes some 200 microseconds of CPU for a message, and 1,000 streams would leave a server on the same
machine no time. This one has no flow control of its own (windows as large as the protocol allows), reads no header but
a stream's end, and is not for anything but measuring.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_LARGEST_WINDOW, _FIRST_WINDOW = (1 << 31) - 1, (1 << 16) - 1
_FRAME_HEAD, _MESSAGE_HEAD = 9, 5


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A literal of HPACK, neither indexed nor compressed; both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        message: called with (stream, message) for each.
        ended: called with the stream when its call has ended, or with 0 when the connection was lost.
    """

    def __init__(self, authority: str, message: Callable[[int, bytes], None], ended: Callable[[int], None]) -> None:
        self._authority, self._message, self._ended = authority, message, ended
        self._unread = b""
        # Of each stream, what has come of a message.
        self._streams: dict[int, bytes] = {}
        self._next = 1

    def call(self, path: str, request: bytes) -> int:
        """Begins a call; its stream."""
        stream, self._next = self._next, self._next + 2
        self._streams[stream] = b""
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": self._authority}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        block = b"".join(_header(name, value) for name, value in headers.items())
        body = struct.pack(">BI", 0, len(request)) + request
        self._transport.write(_frame(_HEADERS, _END_HEADERS, stream, block) + _frame(_DATA, _END_STREAM, stream, body))
        return stream

    def close(self) -> None:
        """Ends every call."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opens the windows."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW))
        window = _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW))
        self._transport.write(_PREFACE + settings + window)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._ended(0)

    def data_received(self, data: bytes) -> None:
        """Reads whole frames."""
        data, at = self._unread + data, 0
        while len(data) - at >= _FRAME_HEAD:
            head, kind, flags, stream = struct.unpack_from(">IBBI", b"\0" + data[at : at + _FRAME_HEAD])
            end = at + _FRAME_HEAD + head
            if len(data) < end:
                break
            self._take(kind, flags, stream, data[at + _FRAME_HEAD : end])
            at = end
        self._unread = data[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._read(stream, payload)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY:
            self._transport.close()
        ended = kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        # A server may reset a stream that it has ended.
        if ended and self._streams.pop(stream, None) is not None:
            self._ended(stream)

    def _read(self, stream: int, payload: bytes) -> None:
        data = self._streams[stream] + payload
        while len(data) >= _MESSAGE_HEAD and len(data) >= (
            end := _MESSAGE_HEAD + int.from_bytes(data[1:_MESSAGE_HEAD], "big")
        ):
            self._message(stream, data[_MESSAGE_HEAD:end])
            data = data[end:]
        self._streams[stream] = data
