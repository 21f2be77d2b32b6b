"""What links to draft and target workers share: a loop that keeps one worker connected, and looks whether it lives."""

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import grpc

from orchestrator.breaker import Breaker
from orchestrator.handshake import PairRefused, check_pair, fingerprints_differ
from orchestrator.placement import load_of
from outrider.lm.tokenizer import Vocabulary
from outrider.net.channel import MAX_MESSAGE_BYTES, connect
from outrider.net.errors import OutriderError, from_rpc_error
from outrider.net.tls import ClientTls, explained
from outrider.v1 import draft_pb2, target_pb2, types_pb2

log = logging.getLogger(__name__)

INFO_TIMEOUT = 5.0
HASHES_TIMEOUT = 30.0
RECONNECT_SECONDS = 1.0
# A refused pair stays refused until somebody replaces the worker behind the address.
REFUSED_SECONDS = 5.0
# A worker that answers neither of two probes is taken for frozen or cut off: 4 seconds after its last sign of life.
PROBE_SECONDS, PROBE_TIMEOUT = 1.0, 1.5
_MOST_SILENCES = 2
# A probe whose end was noticed so much later says nothing: it was this process that stood still.
_OWN_STALL = 0.3
# How long the channel of a worker that left the list outlives the last session that was bound to it.
RETIRED_SECONDS = 10.0
# What calls may still take to end on a channel that another one replaces: closed at once, they would look cancelled.
_OLD_CHANNEL_SECONDS = 60.0
# A worker that broke the protocol is left alone for so long at most.
LONGEST_PAUSE = 60.0
_MOST_DOUBLINGS = 10  # more overflow a float one day

Info = target_pb2.TargetServiceGetInfoResponse | draft_pb2.DraftServiceGetInfoResponse


class WorkerSilent(Exception):
    """A worker that was well answers no probe."""


class SameWorker(Exception):
    """The worker is in use already, behind another address; the message names it."""


class Misbehaved(Exception):
    """The worker sent what no worker sends; the message says what."""


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
        instance_id: of the process behind the address; empty while unknown.
        reported: what the worker last said of its load when probed; None while unknown.
        breaker: opens when its work fails too often in a row.
        siblings: the links of its pool, itself included.

    Args:
        vocabulary: of the orchestrator's tokenizer.
        changed: called whenever `usable` may have changed.
        tls: how the worker is checked; None speaks plain text.
    """

    kind: str
    max_receive_bytes = MAX_MESSAGE_BYTES

    def __init__(
        self, address: str, vocabulary: Vocabulary, changed: Callable[[], None], tls: ClientTls | None = None
    ) -> None:
        self.address = address
        self.usable = False
        self.reason = "connecting"
        self.sessions = 0
        self.incarnation = 0
        self.model: types_pb2.ModelInfo | None = None
        self.max_lookahead = 0
        self.instance_id = ""
        self.reported: types_pb2.WorkerLoad | None = None
        self.breaker = Breaker()
        self.siblings: Callable[[], Iterable[Link]] = lambda: ()
        self._vocabulary = vocabulary
        self._changed = changed
        self._tls = tls
        self._old_channels: set[asyncio.Task[None]] = set()
        self._open_channel()
        self._loop_task: asyncio.Task[None] | None = None
        self._others = self._queued_items = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def start(self) -> None:
        """Starts connecting in the background."""
        self._loop_task = asyncio.create_task(self._keep_connected(), name=f"{self.kind} {self.address}")

    async def close(self) -> None:
        """Ends the connection. Idempotent."""
        await self._stop()
        for retired in self._old_channels:
            retired.cancel()
        await self.channel.close()

    async def retire(self) -> None:
        """Takes no more work, and closes when the sessions that are bound have left, with their next rounds, and time
        enough to release them has gone by."""
        await self._stop()
        self._down("it is not listed any more")
        await self._unused.wait()
        await asyncio.sleep(RETIRED_SECONDS)
        await self.close()

    def bind(self) -> None:
        """One more session."""
        self.sessions += 1
        self._unused.clear()

    def unbind(self) -> None:
        """One session less."""
        self.sessions -= 1
        if not self.sessions:
            self._unused.set()

    @property
    def load(self) -> int:
        """In sessions, those of other orchestrators included, as far as the worker told of them."""
        return load_of(self.sessions, self._others, self._queued_items)

    def heard(self, load: types_pb2.WorkerLoad) -> None:
        """What the worker says of its load."""
        self._others = max(0, load.open_sessions - self.sessions)
        self._queued_items = load.queued_items

    @abstractmethod
    async def _get_info(self, seconds: float, *, include_token_hashes: bool = False) -> Info:
        """What the worker says of itself, within so many seconds. Raises AioRpcError."""

    def _open_channel(self) -> None:
        self._tls_version = self._tls.version if self._tls is not None else 0
        self.channel = connect(self.address, self._tls, max_receive_bytes=self.max_receive_bytes)
        self._use(self.channel)

    def _renew_channel(self) -> None:
        """A channel keeps the certificates that it was made with: once they are renewed, another one connects anew."""
        if self._tls is not None and self._tls.version != self._tls_version:
            retired = asyncio.create_task(self.channel.close(_OLD_CHANNEL_SECONDS))
            self._old_channels.add(retired)
            retired.add_done_callback(self._old_channels.discard)
            self._open_channel()

    @abstractmethod
    def _use(self, channel: grpc.aio.Channel) -> None:
        """Makes the stubs."""

    @abstractmethod
    async def _serve_connection(self) -> None:
        """Calls `_up` for a worker whose pair was checked, and returns or raises when the connection has ended."""

    @abstractmethod
    async def _tend(self) -> None:
        """What is to be done now and then while the worker answers."""

    def _serves(self, info: Info) -> None:
        """Notes what a checked worker said of itself."""
        info.model.ClearField("token_hashes")
        self.model, self.max_lookahead, self.instance_id = info.model, info.max_lookahead, info.instance_id
        self._hear(info)

    def _hear(self, info: Info) -> None:
        self.reported = info.load
        self.heard(info.load)

    def _up(self) -> None:
        """Raises SameWorker."""
        self._check_twins()
        self.incarnation += 1
        self._forgive()
        self.usable, self.reason = True, ""
        log.info("%s %s is in use", self.kind, self.address)
        self._changed()

    def _forgive(self) -> None:
        """Whatever the worker did before, it has begun anew."""
        self.breaker = Breaker()

    def _down(self, reason: str) -> None:
        if self.usable or self.reason != reason:
            log.warning("%s %s is not in use: %s", self.kind, self.address, reason)
        self.usable, self.reason = False, reason
        self._changed()

    async def _stop(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)

    async def _keep_connected(self) -> None:
        offences = 0
        while True:
            pause = RECONNECT_SECONDS
            try:
                self._renew_channel()
                await self._check_pair()
                await self._attended(self._serve_connection())
                self._down("the worker closed the connection")
            except Misbehaved as offence:
                # It may do so again after every connection: each costs it twice the time of the last.
                offences += 1
                pause = min(RECONNECT_SECONDS * 2.0 ** min(offences, _MOST_DOUBLINGS), LONGEST_PAUSE)
                self._down(f"the worker broke the protocol: {offence}")
            except PairRefused as refusal:
                pause = REFUSED_SECONDS
                self._down(str(refusal))
            except (WorkerSilent, SameWorker) as error:
                self._down(str(error))
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

    async def _check_pair(self) -> None:
        info = await self._get_info(INFO_TIMEOUT)
        if fingerprints_differ(info.model, self._vocabulary):
            info = await self._get_info(HASHES_TIMEOUT, include_token_hashes=True)
        check_pair(f"{self.kind} {self.address}", info.model, self._vocabulary)
        self._serves(info)
        self._check_twins()

    def _check_twins(self) -> None:
        for other in self.siblings():
            if other is not self and other.usable and other.instance_id == self.instance_id != "":
                raise SameWorker(f"it is the same worker as {other.address}")

    async def _attended(self, serving: Coroutine[Any, Any, None]) -> None:
        """Serves the connection until it ends, or until the worker answers no probe."""
        tasks = [asyncio.create_task(serving), asyncio.create_task(self._probe())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self) -> None:
        """Asks for the worker's load again and again. Raises WorkerSilent or AioRpcError when it does not say it."""
        loop, silences = asyncio.get_running_loop(), 0
        while True:
            if not silences:
                await asyncio.sleep(PROBE_SECONDS * random.uniform(0.8, 1.0))
            asked = loop.time()
            try:
                self._hear(await self._get_info(PROBE_TIMEOUT))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                silences += loop.time() - asked < PROBE_TIMEOUT + _OWN_STALL
                if silences == _MOST_SILENCES:
                    raise WorkerSilent("the worker is connected and answers nothing: frozen, or cut off") from error
            else:
                silences = 0
                await self._tend()


def describe(error: grpc.aio.AioRpcError) -> str:
    """One line about a failed call, for people."""
    known = from_rpc_error(error)
    if known is not None:
        return known.message
    return f"{error.code().name.lower().replace('_', ' ')}: {explained(error.details() or 'no details')}"


def as_error(error: grpc.aio.AioRpcError) -> OutriderError:
    """The reason that a failed call carries; a transport failure becomes NO_WORKER."""
    # Without a reason it is gRPC's own word for a message over its limit, which would be over it again.
    too_large = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = types_pb2.ERROR_REASON_NO_PROGRESS if too_large else types_pb2.ERROR_REASON_NO_WORKER
    return from_rpc_error(error) or OutriderError(reason, describe(error))
