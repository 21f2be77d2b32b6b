"""The store of many processes: any server that speaks the Redis protocol and runs Lua."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import NoPermissionError, RedisClusterException, RedisError

from orchestrator.store import fence, scripts
from orchestrator.store.base import (
    FINISHED,
    MAX_EPOCH,
    RUNNING,
    SessionCorrupt,
    SessionRecord,
    StoreError,
    StoreUnavailable,
)
from orchestrator.store.connecting import connect
from orchestrator.store.pipelined import Pipelined
from orchestrator.store.scripts import Script
from orchestrator.store.url import parse_store_url
from outrider.law.sparse import Int32Array
from outrider.net.arrays import ArrayError, int32s, to_bytes
from outrider.v1.orchestrator_pb2 import FINISH_REASON_CANCELLED
from outrider.versions import RECORD_VERSION

T = TypeVar("T")
Answer = list[Any]  # [verdict, detail ...], all bytes but for nested lists and integers

# What Redis says when a script meets a value that no script of ours has written.
_FOREIGN = ("WRONGTYPE", "not an integer")
# The wire's largest enum.
_MAX_REASON = (1 << 31) - 1
# A server that takes longer than this many seconds may have been replaced: the call is repeated, at whoever is the
# master by then.
_PATIENCE = 3.0


class RedisStore:
    """Sessions in a Redis-protocol server, two keys each (see `scripts`)."""

    def __init__(
        self,
        url: str,
        ttl: float,
        *,
        timeout: float = 5.0,
        max_connections: int = 64,
        replicas: int = 0,
        password_file: str = "",
    ) -> None:
        """Connects on first use. ttl and timeout in seconds; timeout bounds every operation, repeats and waiting for
        one of the max_connections included. `replicas` must have a write before it counts. A password file is read at
        every new connection. Raises ValueError with one sentence when the URL is bad."""
        self._ttl_ms = max(1, round(ttl * 1000))
        self._timeout = timeout
        place = parse_store_url(url, password_file)
        self._address = place.address
        patience = min(timeout, _PATIENCE)
        self._client, servers = connect(place, patience, max_connections, replicas)
        self._scripts = Pipelined(servers, timeout, patience, max_connections)

    async def create(self, record: SessionRecord) -> None:
        """See SessionStore."""
        fence.check_epoch(record.epoch)
        nonce = secrets.token_bytes(16)
        fields = (nonce, record.epoch, record.prompt_length, record.meta, record.progress, record.finish_reason)
        answer = await self._run(scripts.CREATE, record.session_id, (*fields, to_bytes(record.tokens), self._ttl_ms))
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
        answer = await self._run(scripts.COMMIT, session_id, arguments)
        self._accept(answer, session_id, epoch, base_length)

    async def finish(self, session_id: str, epoch: int, finish_reason: int) -> None:
        """See SessionStore."""
        fence.check_epoch(epoch)
        self._accept(await self._run(scripts.FINISH, session_id, (epoch, finish_reason)), session_id, epoch, 0)

    async def load(self, session_id: str) -> SessionRecord | None:
        """See SessionStore."""
        answer = await self._run(scripts.LOAD, session_id, (0,))
        if answer[0] == b"gone":
            return None
        self._accept(answer, session_id, 0, 0)
        return _record(session_id, answer)

    async def take_over(self, session_id: str) -> SessionRecord:
        """See SessionStore."""
        answer = await self._run(scripts.LOAD, session_id, (1,))
        self._accept(answer, session_id, 0, 0)
        return _record(session_id, answer)

    async def request_cancel(self, session_id: str) -> bool:
        """See SessionStore."""
        answer = await self._run(scripts.REQUEST_CANCEL, session_id, (FINISH_REASON_CANCELLED,))
        if answer[0] == b"gone":
            return False
        self._accept(answer, session_id, 0, 0)
        return True

    async def ping(self) -> None:
        """See SessionStore."""
        await self._answered(self._scripts.ping(), "ping")

    async def fullness(self) -> float | None:
        """See SessionStore; in memory, which the store's user may ask for with the right +info alone."""
        try:
            told = await self._answered(self._scripts.memory(), "memory")
        except StoreUnavailable as error:
            if isinstance(error.__cause__, NoPermissionError):
                return None
            raise
        parts = [each["used_memory"] / each["maxmemory"] for each in told if each["maxmemory"]]
        return max(parts, default=None)

    async def close(self) -> None:
        """See SessionStore."""
        await self._scripts.close()

    async def _run(self, script: Script, session_id: str, arguments: Sequence[Any]) -> Answer:
        answer: Answer = await self._answered(self._scripts(script, store_keys(session_id), arguments), session_id)
        return answer

    async def _answered(self, call: Awaitable[T], subject: str) -> T:
        try:
            return await call
        except TimeoutError as error:
            raise StoreUnavailable(f"session store {self._address} did not answer within {self._timeout} s") from error
        except (RedisError, RedisClusterException, OSError) as error:
            raise self._translated(error, subject) from error

    def _translated(self, error: Exception, subject: str) -> StoreError:
        # Without what redis-py tells of its own objects.
        text = str(error).partition(" : <")[0].splitlines()[0] if str(error) else type(error).__name__
        if any(words in text for words in _FOREIGN):
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
            b"corrupt": lambda: _corrupt(session_id, "a field of its state is missing or no number"),
            b"version": lambda: _other_version(session_id, detail[0]),
        }
        raise refusals[verdict]()


def store_keys(session_id: str) -> tuple[str, str]:
    """Both in one hash slot, so that a cluster can run the scripts."""
    return f"outrider:{{{session_id}}}:state", f"outrider:{{{session_id}}}:tokens"


def _record(session_id: str, answer: Answer) -> SessionRecord:
    """A snapshot as the scripts return it. Raises SessionCorrupt."""
    _, flat, tokens, ttl_ms = answer
    state = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        finish_reason = int(state[b"finish_reason"])
        record = SessionRecord(
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
    for name, value, low, high in (
        ("prompt_length", record.prompt_length, 1, len(record.tokens)),
        ("epoch", record.epoch, 1, MAX_EPOCH),
        ("finish_reason", record.finish_reason, 0, _MAX_REASON),
    ):
        if not low <= value <= high:
            raise _corrupt(session_id, f"{name} is {value}, must be in [{low}, {high}]")
    return record


def _corrupt(session_id: str, detail: str) -> SessionCorrupt:
    return SessionCorrupt(f"session {session_id} is damaged in the store: {detail}")


def _other_version(session_id: str, version: bytes) -> SessionCorrupt:
    held = version.decode("ascii", "backslashreplace")
    return SessionCorrupt(
        f"session {session_id} is of version {held} in the store, this orchestrator knows version {RECORD_VERSION}"
    )
