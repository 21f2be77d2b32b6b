"""What links to draft and target workers share: a loop that keeps one worker connected."""

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

import grpc

from orchestrator.handshake import PairRefused
from outrider.net.channel import connect
from outrider.net.errors import OutriderError, from_rpc_error
from outrider.v1 import types_pb2

log = logging.getLogger(__name__)

INFO_TIMEOUT = 5.0
HASHES_TIMEOUT = 30.0
RECONNECT_SECONDS = 1.0
# A refused pair stays refused until somebody replaces the worker behind the address.
REFUSED_SECONDS = 5.0


class Link(ABC):
    """Keeps one worker connected until `close`.

    Attributes:
        address: host:port.
        usable: whether work may be sent.
        reason: why not, for people; empty when usable.
        sessions: sessions that are bound to this worker.
        incarnation: grows with every connection: state at the worker from an earlier one is gone.
        model: what it serves, without token hashes; None while unknown.
        max_lookahead: longest block that it makes or scores; 0 while unknown.
    """

    kind: str

    def __init__(self, address: str, changed: Callable[[], None]) -> None:
        self.address = address
        self.usable = False
        self.reason = "connecting"
        self.sessions = 0
        self.incarnation = 0
        self.model: types_pb2.ModelInfo | None = None
        self.max_lookahead = 0
        self.channel = connect(address)
        self._changed = changed
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts connecting in the background."""
        self._loop_task = asyncio.create_task(self._keep_connected(), name=f"{self.kind} {self.address}")

    async def close(self) -> None:
        """Ends the connection. Idempotent."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        await self.channel.close()

    @abstractmethod
    async def _serve_connection(self) -> None:
        """Checks the pair, calls `_up`, and returns or raises when the connection has ended."""

    def _serves(self, model: types_pb2.ModelInfo, max_lookahead: int) -> None:
        """Notes what a checked worker said of itself."""
        model.ClearField("token_hashes")
        self.model, self.max_lookahead = model, max_lookahead

    def _up(self) -> None:
        self.incarnation += 1
        self.usable, self.reason = True, ""
        log.info("%s %s is in use", self.kind, self.address)
        self._changed()

    def _down(self, reason: str) -> None:
        if self.usable or self.reason != reason:
            log.warning("%s %s is not in use: %s", self.kind, self.address, reason)
        self.usable, self.reason = False, reason
        self._changed()

    async def _keep_connected(self) -> None:
        while True:
            pause = RECONNECT_SECONDS
            try:
                await self._serve_connection()
                self._down("the worker closed the connection")
            except PairRefused as refusal:
                pause = REFUSED_SECONDS
                self._down(str(refusal))
            except grpc.aio.AioRpcError as error:
                self._down(describe(error))
            except OutriderError as error:
                self._down(error.message)
            except TimeoutError:
                self._down("the worker did not answer in time")
            except asyncio.CancelledError:
                self.usable, self.reason = False, "closed"
                raise
            except Exception:
                log.exception("%s %s: the link failed", self.kind, self.address)
                self._down("the link failed, see the log")
            await asyncio.sleep(pause * random.uniform(1.0, 1.3))


def describe(error: grpc.aio.AioRpcError) -> str:
    """One line about a failed call, for people."""
    known = from_rpc_error(error)
    if known is not None:
        return known.message
    return f"{error.code().name.lower().replace('_', ' ')}: {error.details() or 'no details'}"


def as_error(error: grpc.aio.AioRpcError) -> OutriderError:
    """The reason that a failed call carries; a transport failure becomes NO_WORKER."""
    # Without a reason it is gRPC's own word for a message over its limit, which would be over it again.
    too_large = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = types_pb2.ERROR_REASON_NO_PROGRESS if too_large else types_pb2.ERROR_REASON_NO_WORKER
    return from_rpc_error(error) or OutriderError(reason, describe(error))
