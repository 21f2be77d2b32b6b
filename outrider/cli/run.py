"""How a command runs: signals become cancellation, failures become one line and an exit code."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from outrider.cli.supervise import NotReady, ProcessDied
from outrider.net.errors import OutriderError, from_rpc_error, reason_name

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130


class Failure(Exception):
    """What the user is told; one line."""


def run(work: Coroutine[Any, Any, None], *, interrupted: int = INTERRUPTED) -> None:
    """Runs `work`; SIGINT, SIGTERM and SIGHUP cancel it, and a second one cancels its cleanup.

    Exits with 1 and one `error:` line on stderr for failures that a user can meet, with `interrupted` after a signal.
    """
    try:
        asyncio.run(_cancelled_by_signals(work))
    except asyncio.CancelledError:
        sys.exit(interrupted)
    except grpc.aio.AioRpcError as error:
        _fail(rpc_failure(error))
    except (Failure, NotReady, ProcessDied) as error:
        _fail(str(error))


async def _cancelled_by_signals(work: Coroutine[Any, Any, None]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    for number in _ENDING_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    await task


def rpc_failure(error: grpc.aio.AioRpcError) -> str:
    """A failed call in one line: the service's own words where it spoke, the transport's state where it did not."""
    refused = from_rpc_error(error)
    if refused is not None:
        return _refusal(refused)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "the orchestrator does not answer, or the connection to it was lost (is `outrider up` running?)"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the call did not end in time (see --timeout)"
    return f"{error.code().name}: {error.details() or 'no further words'}"


def _refusal(error: OutriderError) -> str:
    again = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return f"{error.message} ({reason_name(error.reason)}{again})"


def _fail(message: str) -> NoReturn:
    with suppress(BrokenPipeError):
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)
