"""What is fuzzed: targets, their cases, and how a case is found to have failed."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from outrider.net.errors import from_rpc_error, reason_name
from outrider.v1 import types_pb2
from tests.fuzz.messages import mutate, random_message

CORPUS = Path(__file__).parent / "corpus"
# Of one call. None takes a second on an idle machine.
PATIENCE = 60.0
OUR_FAULT = "the orchestrator failed, see its log"

T = TypeVar("T")


class Harness:
    """A started system that takes cases."""

    async def run(self, case: bytes) -> str:
        """What became of the case, for the table. Raises AssertionError when that must not happen."""
        raise NotImplementedError

    async def golden(self) -> None:
        """Raises AssertionError when an honest caller gets anything but what it gets of a new system, or when
        something of the cases was left behind."""
        raise NotImplementedError


@dataclass(frozen=True)
class Target:
    """One thing to fuzz.

    Attributes:
        seeds: cases that pass every check.
        draw: a new case.
        start: the system that takes them.
    """

    seeds: Callable[[], Sequence[bytes]]
    draw: Callable[[Random], bytes]
    start: Callable[[], AbstractAsyncContextManager[Harness]]


def join(head: str, body: bytes) -> bytes:
    """A case: a line that says what the bytes after it are."""
    return head.encode() + b"\n" + body


def split(case: bytes) -> tuple[str, bytes]:
    """The inverse of `join`."""
    head, _, body = case.partition(b"\n")
    return head.decode("utf-8", "replace"), body


def drawing(seeds: Callable[[], Sequence[bytes]], kind_of: Callable[[str], type[Message]]) -> Callable[[Random], bytes]:
    """Cases like the seeds with a little changed, one in four a message of any content, one in sixteen no message."""

    def draw(dice: Random) -> bytes:
        return vary(dice, dice.choice(seeds()), kind_of)

    return draw


def vary(dice: Random, case: bytes, kind_of: Callable[[str], type[Message]]) -> bytes:
    """A neighbour of a case."""
    head, body = split(case)
    kind = kind_of(head)
    if dice.randrange(4) == 0:
        return join(head, random_message(dice, kind).SerializeToString())
    try:
        message = kind.FromString(body)
    except DecodeError:
        return join(head, random_message(dice, kind).SerializeToString())
    mutate(dice, message)
    data = message.SerializeToString()
    if data and dice.randrange(16) == 0:
        place = dice.randrange(len(data))
        data = data[:place] + bytes([dice.randrange(256)]) + data[place + 1 :]
    return join(head, data)


async def status_of(call: Awaitable[object], allowed: Collection[str]) -> str:
    """OK, or the reason that a call ended with, which must be one of those allowed."""
    try:
        async with asyncio.timeout(PATIENCE):
            await call
    except grpc.aio.AioRpcError as error:
        known = from_rpc_error(error)
        if known is None or known.message == OUR_FAULT or reason_name(known.reason) not in allowed:
            raise AssertionError(f"{error.code()}: {error.details()}") from error
        return reason_name(known.reason)
    return "OK"


async def drained(call: Any) -> None:
    """Reads a stream to its end."""
    async for _ in call:
        pass


def reasons(*names: str) -> set[str]:
    """Checks the spelling."""
    for name in names:
        types_pb2.ErrorReason.Value(f"ERROR_REASON_{name}")
    return set(names)


class Complaints(logging.Handler):
    """What the system logged as an error: an exception that nobody handled is logged, and no more."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


@asynccontextmanager
async def watched(harness: Harness) -> AsyncIterator[Callable[[bytes], Awaitable[str]]]:
    """Runs cases, and fails those that something was logged in as an error."""
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)

    async def run(case: bytes) -> str:
        async with asyncio.timeout(2 * PATIENCE):
            status = await harness.run(case)
        seen, complaints.seen = complaints.seen, []
        assert not seen, seen[0]
        return status

    try:
        yield run
    finally:
        logging.getLogger().removeHandler(complaints)


class LoopThread:
    """An event loop in a thread of its own, for hypothesis, whose tests are plain functions."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fuzzed", daemon=True)
        self._thread.start()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(5 * PATIENCE)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
