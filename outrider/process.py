"""The frame of a service process: settings, logging, one line for the operator when it cannot start, an exit code."""

import asyncio
import atexit
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from outrider.config import ConfigError, ServiceConfig, parse_config
from outrider.lm.engine import ModelRefused
from outrider.net.server import PortInUse
from outrider.net.tls import TlsError
from outrider.observe.logging import configure_logging

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=ServiceConfig)

# For the event loop to close, once everything on it has ended: looks, and seconds between them. A machine that stands
# still for a while costs one look, and no process its orderly end.
_CLOSE_LOOKS, _LOOK_SECONDS = 20, 0.1
# What an operator can put right: told in one line, without a traceback.
STARTUP_ERRORS = (ConfigError, ModelRefused, PortInUse, TlsError)


def announce(host: str, port: int) -> None:
    """Tells whoever started the process where it listens: the only line on stdout."""
    print(f"listening on {host}:{port}", flush=True)


def started() -> None:
    """To be called when everything is there that lives as long as the process.

    A full garbage collection looks at the quarter of a million objects of torch and transformers for a seventh of a
    second, and every stream waits for it: they are taken out of its sight, and collections of the rest become rarer.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def run_process(
    config_class: type[Config],
    serve: Callable[[Config], Coroutine[Any, Any, int]],
    arguments: Sequence[str],
    *,
    startup_errors: tuple[type[Exception], ...] = STARTUP_ERRORS,
) -> int:
    """Runs a service to its end and returns the exit code.

    What an operator can put right becomes one `error: ...` line on stderr, or a record where these are JSON, and exit
    code 2.
    """
    # The interpreter's last collection would look at every object of torch and transformers: most of a second.
    atexit.register(gc.freeze)
    as_record = False
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            config = parse_config(config_class, arguments)
            configure_logging(config.log_level, config.log_format)
            as_record = config.log_format == "json"
            code = runner.run(serve(config))
        except startup_errors as error:
            _complain(" ".join(str(error).split()), as_record=as_record)
            code = 2
        with _in_time(code):
            runner.close()
    return code


def _complain(sentence: str, *, as_record: bool) -> None:
    if as_record:
        log.critical("%s", sentence)
    else:
        print("error:", sentence, file=sys.stderr, flush=True)


@contextmanager
def _in_time(code: int) -> Iterator[None]:
    """Ends the process with this code where the block does not end.

    The loop would wait for lookups of names, which nobody can call back: with a resolver that does not answer for most
    of a minute, after the process has done all that it had to do, and Kubernetes would kill it.
    """
    ended = threading.Event()
    threading.Thread(target=_leave_unless, args=(ended, code), name="end of the process", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _leave_unless(ended: threading.Event, code: int) -> None:
    if any(ended.wait(_LOOK_SECONDS) for _ in range(_CLOSE_LOOKS)):
        return
    log.warning("the lookup of a name is still under way and is left behind")
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop
