"""The store of many processes: any server that speaks the Redis protocol and runs Lua."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from orchestrator.store import fence, scripts
from orchestrator.store.base import (
    FINISHED,
    RUNNING,
    SessionCorrupt,
    SessionRecord,
    StoreError,
    StoreUnavailable,
)
from orchestrator.store.pipelined import Pipelined
from outrider.law.sparse import Int32Array
from outrider.net.arrays import ArrayError, int32s, to_bytes
from outrider.v1.orchestrator_pb2 import FINISH_REASON_CANCELLED

T = TypeVar("T")
Answer = list[Any]  # [verdict, detail ...], all bytes but for nested lists and integers

# Repeats of a command whose connection failed, within the deadline: every script is safe to repeat.
_RETRIES = 3
_BACKOFF = ExponentialBackoff(cap=0.5, base=0.05)


class RedisStore:
    """Sessions in a Redis-protocol server, two keys each (see `scripts`)."""

    def __init__(self, url: str, ttl: float, *, timeout: float = 5.0, max_connections: int = 64) -> None:
        """Connects on first use. ttl and timeout in seconds; timeout bounds every operation, waiting for one of
        the max_connections included. Raises ValueError with one sentence when the URL is bad."""
        self._address = _without_password(url)
        self._ttl_ms = max(1, round(ttl * 1000))
        self._timeout = timeout
        self._client = Redis.from_pool(_pool(url, self._address, timeout, max_connections))
        register = self._client.register_script
        self._create, self._finish = register(scripts.CREATE), register(scripts.FINISH)
        self._commit = Pipelined(self._client, register(scripts.COMMIT), timeout)
        self._load, self._take_over = register(scripts.LOAD), register(scripts.TAKE_OVER)
        self._request_cancel = register(scripts.REQUEST_CANCEL)

    async def create(self, record: SessionRecord) -> None:
        """See SessionStore."""
        fence.check_epoch(record.epoch)
        nonce = secrets.token_bytes(16)
        fields = (nonce, record.epoch, record.prompt_length, record.meta, record.progress, record.finish_reason)
        answer = await self._run(self._create, record.session_id, (*fields, to_bytes(record.tokens), self._ttl_ms))
        self._accept(answer, record.session_id, record.epoch, 0)

    async def commit(
        self,
        session_id: str,
        epoch: int,
        base_length: int,
        tokens: Int32Array,
        progress: bytes = b"",
        *,
        finish_reason: int = 0,
    ) -> None:
        """See SessionStore."""
        fence.check_commit(epoch, base_length, tokens, finish_reason)
        arguments = (epoch, base_length, to_bytes(tokens), progress, finish_reason, self._ttl_ms)
        # Its write has the deadline already, which is one for many calls.
        answer = await self._answered(self._commit(_keys(session_id), arguments), session_id)
        self._accept(answer, session_id, epoch, base_length)

    async def finish(self, session_id: str, epoch: int, finish_reason: int) -> None:
        """See SessionStore."""
        fence.check_epoch(epoch)
        self._accept(await self._run(self._finish, session_id, (epoch, finish_reason)), session_id, epoch, 0)

    async def load(self, session_id: str) -> SessionRecord | None:
        """See SessionStore."""
        answer = await self._run(self._load, session_id)
        return None if answer[0] == b"gone" else _record(session_id, answer)

    async def take_over(self, session_id: str) -> SessionRecord:
        """See SessionStore."""
        answer = await self._run(self._take_over, session_id)
        self._accept(answer, session_id, 0, 0)
        return _record(session_id, answer)

    async def request_cancel(self, session_id: str) -> bool:
        """See SessionStore."""
        answer: Answer = await self._run(self._request_cancel, session_id, (FINISH_REASON_CANCELLED,))
        return bool(answer[0] == b"ok")

    async def ping(self) -> None:
        """See SessionStore."""
        await self._within_deadline(self._client.ping(), "ping")

    async def close(self) -> None:
        """See SessionStore."""
        await self._commit.close()
        await self._client.aclose()

    async def _run(
        self, script: Callable[..., Awaitable[Any]], session_id: str, arguments: Sequence[Any] = ()
    ) -> Answer:
        """One script, one round trip (two when the server has forgotten it: NOSCRIPT, then the whole script)."""
        answer: Answer = await self._within_deadline(script(keys=_keys(session_id), args=arguments), session_id)
        return answer

    async def _within_deadline(self, call: Awaitable[T], subject: str) -> T:
        async def limited() -> T:
            async with asyncio.timeout(self._timeout):
                return await call

        return await self._answered(limited(), subject)

    async def _answered(self, call: Awaitable[T], subject: str) -> T:
        try:
            return await call
        except TimeoutError as error:
            raise StoreUnavailable(f"session store {self._address} did not answer within {self._timeout} s") from error
        except (RedisError, OSError) as error:
            raise self._translated(error, subject) from error

    def _translated(self, error: Exception, subject: str) -> StoreError:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "WRONGTYPE" in text:
            return SessionCorrupt(f"session store {self._address} holds something else under the keys of {subject}")
        return StoreUnavailable(f"session store {self._address} failed: {text}")

    def _accept(self, answer: Answer, session_id: str, epoch: int, base_length: int) -> None:
        """Raises the refusal that an answer is."""
        verdict, detail = answer[0], answer[1:]
        if verdict == b"ok":
            return
        refusals: dict[bytes, Callable[[], StoreError]] = {
            b"exists": lambda: fence.exists(session_id),
            b"gone": lambda: fence.gone(session_id),
            b"stale": lambda: fence.stale(session_id, epoch, int(detail[0])),
            b"ahead": lambda: fence.ahead(session_id, epoch, int(detail[0])),
            b"cancelled": lambda: fence.cancelled(session_id),
            b"finished": lambda: fence.finished(session_id, int(detail[0])),
            b"length": lambda: fence.length(session_id, base_length, int(float(detail[0]))),
            b"corrupt": lambda: _corrupt(session_id, "epoch or finish reason is missing"),
        }
        raise refusals[verdict]()


def _keys(session_id: str) -> tuple[str, str]:
    """Both in one hash slot, so that a cluster can run the scripts."""
    return f"outrider:{{{session_id}}}:state", f"outrider:{{{session_id}}}:tokens"


def _record(session_id: str, answer: Answer) -> SessionRecord:
    """A snapshot as the scripts return it. Raises SessionCorrupt."""
    _, flat, tokens, ttl_ms = answer
    state = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        finish_reason = int(state[b"finish_reason"])
        return SessionRecord(
            session_id=session_id,
            tokens=int32s(tokens or b"", "tokens"),
            prompt_length=int(state[b"prompt_length"]),
            epoch=int(state[b"epoch"]),
            state=FINISHED if finish_reason else RUNNING,
            finish_reason=finish_reason,
            meta=state[b"meta"],
            progress=state[b"progress"],
            cancelled=b"cancelled" in state,
            expires_at=time.time() + ttl_ms / 1000,
        )
    except (KeyError, ValueError) as error:
        detail = (
            str(error) if isinstance(error, ArrayError) else f"a field of its state is missing or no number ({error})"
        )
        raise _corrupt(session_id, detail) from error


def _corrupt(session_id: str, detail: str) -> SessionCorrupt:
    return SessionCorrupt(f"session {session_id} is damaged in the store: {detail}")


def _pool(url: str, address: str, timeout: float, max_connections: int) -> BlockingConnectionPool:
    """Connections with our settings, whatever the URL's query says about them."""
    try:
        options: dict[str, Any] = dict(parse_url(url))
        options |= {
            "decode_responses": False,
            "protocol": 2,
            "retry": Retry(_BACKOFF, _RETRIES),
            "socket_connect_timeout": timeout / 2,
            # Our own deadline bounds every call. redis-py would write under asyncio.wait_for, which before Python 3.12
            # swallows a cancellation that arrives as the write completes.
            "socket_timeout": None,
        }
        # A little sooner than the deadline, so that the error says what was waited for.
        pool = BlockingConnectionPool(max_connections=max_connections, timeout=0.9 * timeout, **options)
        # Connects to nothing, and refuses options that no connection knows.
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"store URL {address} is invalid: {error}") from error
    return pool


def _without_password(url: str) -> str:
    """The URL for people: no credentials, no query. Raises ValueError when it is no URL at all."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"store URL is invalid: {error}") from None
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
