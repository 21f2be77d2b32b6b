"""How a command runs: signals become cancellation, failures become one line and an exit code."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import grpc

from outrider.cli.supervise import NotReady, ProcessDied
from outrider.net.errors import OutriderError, from_rpc_error, reason_name
from outrider.net.tls import explained, refused_certificate

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130


class Failure(Exception):
    """What the user is told; one line."""


def run(work: Coroutine[Any, Any, None], *, interrupted: int = INTERRUPTED, farewell: str = "interrupted") -> None:
    """Runs `work`; SIGINT, SIGTERM and SIGHUP cancel it, and a second one cancels its cleanup.

    Ends as `told` does; after a signal with the exit code `interrupted` and the line `farewell`.
    """
    with told(interrupted=interrupted, farewell=farewell):
        asyncio.run(_cancelled_by_signals(work))


@contextmanager
def told(*, interrupted: int = INTERRUPTED, farewell: str = "interrupted") -> Iterator[None]:
    """Ends the program with one line on stderr for what a user can meet: failures (exit code 1) and signals."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        _say(f"\n{farewell}" if sys.stderr.isatty() else farewell)  # the terminal's cursor stands behind ^C
        sys.exit(interrupted)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the reader had enough; nothing is left to flush
        sys.exit(1)
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
        details = error.details() or ""
        if refused_certificate(details):
            return f"the orchestrator's certificate was refused: {details}"
        return "the orchestrator does not answer, or the connection to it was lost (is `outrider up` running?)" + (
            "; it may want TLS, or a client certificate (see --tls-ca)" if details != explained(details) else ""
        )
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return "the orchestrator wants a valid token (see --token-file)"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the call did not end in time (see --timeout)"
    return f"{error.code().name}: {error.details() or 'no further words'}"


def _refusal(error: OutriderError) -> str:
    again = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return f"{error.message} ({reason_name(error.reason)}{again})"


def _fail(message: str) -> NoReturn:
    _say(f"error: {' '.join(message.split())}")
    sys.exit(1)


def _say(line: str) -> None:
    with suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)
