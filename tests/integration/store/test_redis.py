"""What only a server on a network can do wrong."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from orchestrator.store import (
    SessionCorrupt,
    SessionExists,
    SessionGone,
    SessionRecord,
    StoreError,
    StoreUnavailable,
    open_store,
)
from orchestrator.store.redis import RedisStore
from outrider.law.sparse import Int32Array
from outrider.v1 import types_pb2
from tests.harness.engines import DEADLINE
from tests.harness.tls_front import TlsFront
from tests.harness.valkey import ValkeyServer, valkey_server
from tests.harness.valkey_groups import SentinelGroup, ValkeyCluster, replica_of, told


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def new(session_id: str) -> SessionRecord:
    return SessionRecord(session_id, ints(1, 2, 3), 3)


@asynccontextmanager
async def opened(
    url: str, *, ttl: float = 60.0, deadline: float = 5.0, max_connections: int = 64, **options: Any
) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, ttl, timeout=deadline, max_connections=max_connections, **options)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def raw(valkey: ValkeyServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url)
    try:
        yield client
    finally:
        await client.aclose()


async def calls(client: Redis, command: str) -> int:
    stats = await client.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


async def errors(client: Redis, code: str) -> int:
    stats = await client.info("errorstats")
    return int(stats.get(f"errorstat_{code}", {}).get("count", 0))


async def test_a_commit_is_one_round_trip(valkey: ValkeyServer, session_id: str) -> None:
    async with opened(valkey.url) as store, raw(valkey) as client:
        await store.create(new(session_id))
        await store.commit(session_id, 1, 3, ints(4))
        before = [await calls(client, command) for command in ("evalsha", "eval", "script|load")]
        for base in range(4, 24):
            await store.commit(session_id, 1, base, ints(base))
        after = [await calls(client, command) for command in ("evalsha", "eval", "script|load")]
        assert [b - a for a, b in zip(before, after, strict=True)] == [20, 0, 0]


async def test_commits_of_one_turn_share_a_write_and_nothing_else(valkey: ValkeyServer, session_id: str) -> None:
    """Each has its own answer: the refusals among them are their sessions' own, and so are cancellations."""
    ids = [f"{session_id}.{number}" for number in range(600)]
    async with opened(valkey.url) as before, opened(valkey.url) as store, raw(valkey) as client:
        await asyncio.gather(*(before.create(new(one)) for one in ids))
        connections = (await client.info("stats"))["total_connections_received"]
        commits = [
            asyncio.create_task(store.commit(one, 1, 9 if number % 7 == 3 else 3, ints(number)))
            for number, one in enumerate(ids)
        ]
        await asyncio.sleep(0)
        for commit in commits[5::11]:
            commit.cancel()
        answers = await asyncio.gather(*commits, return_exceptions=True)
        # At most 256 a write, each on a connection of its own; one by one they would have taken all 64.
        assert (await client.info("stats"))["total_connections_received"] - connections <= 3
        for number, (one, answer) in enumerate(zip(ids, answers, strict=True)):
            record = await store.load(one)
            assert record is not None
            if number % 11 == 5:
                assert isinstance(answer, asyncio.CancelledError)
                continue
            refused = number % 7 == 3
            assert isinstance(answer, StoreError) == refused
            assert record.tokens.tolist() == ([1, 2, 3] if refused else [1, 2, 3, number])


async def test_a_server_that_forgot_the_scripts_in_a_shared_write(own_valkey: ValkeyServer, session_id: str) -> None:
    ids = [f"{session_id}.{number}" for number in range(20)]
    async with opened(own_valkey.url) as store, raw(own_valkey) as client:
        await asyncio.gather(*(store.create(new(one)) for one in ids))
        for base in range(3, 6):
            await client.script_flush()
            await asyncio.gather(*(store.commit(one, 1, base, ints(base)) for one in ids))
        for one in ids:
            record = await store.load(one)
            assert record is not None
            assert record.tokens.tolist() == [1, 2, 3, 3, 4, 5]


async def test_a_call_that_fails_after_the_scripts_were_forgotten_fails_alone(
    own_valkey: ValkeyServer, session_id: str
) -> None:
    ids = [f"{session_id}.{number}" for number in range(5)]
    async with opened(own_valkey.url) as store, raw(own_valkey) as client:
        await asyncio.gather(*(store.create(new(one)) for one in ids))
        await client.set(f"outrider:{{{ids[2]}}}:state", "no hash")
        await client.script_flush()
        commits = (store.commit(one, 1, 3, ints(9)) for one in ids)
        answers = await asyncio.gather(*commits, return_exceptions=True)
    assert isinstance(answers.pop(2), SessionCorrupt)
    assert answers == [None] * 4


async def test_a_server_that_forgot_the_scripts(own_valkey: ValkeyServer, session_id: str) -> None:
    async with opened(own_valkey.url) as store, raw(own_valkey) as client:
        await store.create(new(session_id))
        for base in range(3, 6):
            await client.script_flush()
            await store.commit(session_id, 1, base, ints(base))
        record = await store.load(session_id)
        assert record is not None
        assert record.tokens.tolist() == [1, 2, 3, 3, 4, 5]


async def test_both_keys_share_slot_and_time_to_live(valkey: ValkeyServer, session_id: str) -> None:
    async with opened(valkey.url) as store, raw(valkey) as client:
        await store.create(new(session_id))
        keys = sorted(await client.keys(f"*{session_id}*"))
        assert len(keys) == 2
        for key in keys:
            await client.pexpire(key, 1000)
        await store.commit(session_id, 1, 3, ints(4))
        assert await client.execute_command("PEXPIRETIME", keys[0]) == await client.execute_command(
            "PEXPIRETIME", keys[1]
        )
        assert await client.pttl(keys[0]) > 50_000
        assert len({await client.execute_command("CLUSTER", "KEYSLOT", key) for key in keys}) == 1


async def test_a_session_is_forgotten_after_its_time_to_live(valkey: ValkeyServer, session_id: str) -> None:
    async with opened(valkey.url, ttl=0.1) as store:
        await store.create(new(session_id))
        async with asyncio.timeout(10):
            while await store.load(session_id) is not None:  # noqa: ASYNC110 (only the server's clock ends it)
                await asyncio.sleep(0.01)
        with pytest.raises(SessionGone):
            await store.commit(session_id, 1, 3, ints(4))
        await store.create(new(session_id))


async def test_what_was_committed_survives_a_crash(own_valkey: ValkeyServer, session_id: str) -> None:
    async with opened(own_valkey.url) as store, opened(own_valkey.url, deadline=0.5) as hasty:
        await store.create(new(session_id))
        await store.commit(session_id, 1, 3, ints(4), b"progress")
        own_valkey.kill()
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{own_valkey.port}/0") as failed:
            await hasty.commit(session_id, 1, 4, ints(5))
        assert failed.value.reason == types_pb2.ERROR_REASON_STORE_UNAVAILABLE
        own_valkey.start()
        await store.commit(session_id, 1, 4, ints(5))
        record = await store.load(session_id)
        assert record is not None
        assert record.tokens.tolist() == [1, 2, 3, 4, 5]


async def test_a_restart_within_the_deadline_is_a_pause_and_no_more(own_valkey: ValkeyServer, session_id: str) -> None:
    async with opened(own_valkey.url, deadline=DEADLINE) as store:
        await store.create(new(session_id))
        own_valkey.kill()
        commit = asyncio.create_task(store.commit(session_id, 1, 3, ints(4)))
        with pytest.raises(StoreUnavailable):
            await store.ping()  # which tells of the outage at once
        assert not commit.done()
        own_valkey.start()
        await commit
        record = await store.load(session_id)
        assert record is not None
        assert record.tokens.tolist() == [1, 2, 3, 4]


async def test_g10_a_master_that_was_demoted_is_written_to_no_more(own_valkey: ValkeyServer, session_id: str) -> None:
    async with opened(own_valkey.url, deadline=DEADLINE) as store, raw(own_valkey) as client:
        await store.create(new(session_id))
        await client.execute_command("REPLICAOF", "127.0.0.1", 1)
        commit = asyncio.create_task(store.commit(session_id, 1, 3, ints(4)))
        async with asyncio.timeout(DEADLINE):
            while not await errors(client, "READONLY"):  # noqa: ASYNC110 (only the server knows)
                await asyncio.sleep(0.01)
        assert not commit.done()
        await client.execute_command("REPLICAOF", "NO", "ONE")
        await commit


async def test_a_write_that_no_replica_has_does_not_count_however_often_it_is_repeated(
    own_valkey: ValkeyServer, session_id: str, tmp_path: Path
) -> None:
    """A repeat over a new connection must not take the first write, which is not its own, for replicated."""
    with replica_of(own_valkey, tmp_path / "replica") as replica:
        async with opened(own_valkey.url, deadline=DEADLINE, replicas=1) as store:
            await store.create(new(session_id))
            replica.pause()
            for _ in range(2):
                async with opened(own_valkey.url, deadline=0.5, replicas=1) as hasty:
                    for call in (hasty.commit(session_id, 1, 3, ints(4)), hasty.load(session_id)):
                        with pytest.raises(StoreUnavailable):
                            await call
            replica.resume()
            await store.commit(session_id, 1, 3, ints(4))
            record = await store.load(session_id)
    assert record is not None
    assert record.tokens.tolist() == [1, 2, 3, 4]


async def test_too_few_replicas_for_the_server_itself_are_waited_for(own_valkey: ValkeyServer, session_id: str) -> None:
    async with opened(own_valkey.url, deadline=DEADLINE) as store, raw(own_valkey) as client:
        await store.create(new(session_id))
        await client.config_set("min-replicas-to-write", 1)
        commit = asyncio.create_task(store.commit(session_id, 1, 3, ints(4)))
        async with asyncio.timeout(DEADLINE):
            while not await errors(client, "NOREPLICAS"):  # noqa: ASYNC110 (only the server knows)
                await asyncio.sleep(0.01)
        assert not commit.done()
        await client.config_set("min-replicas-to-write", 0)
        await commit


async def test_a_silent_server_costs_the_deadline_and_the_commit_may_be_repeated(
    own_valkey: ValkeyServer, session_id: str
) -> None:
    async with opened(own_valkey.url, deadline=0.5) as store:
        await store.create(new(session_id))
        own_valkey.pause()
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await store.commit(session_id, 1, 3, ints(4))
        with pytest.raises(StoreUnavailable):
            await store.ping()
        own_valkey.resume()  # the server now runs what it had received
        async with opened(own_valkey.url) as patient:
            await patient.commit(session_id, 1, 3, ints(4))
            record = await patient.load(session_id)
        assert record is not None
        assert record.tokens.tolist() == [1, 2, 3, 4]
        await store.ping()


async def test_cancelled_calls_end_at_once_and_leave_the_connections_sound(
    own_valkey: ValkeyServer, session_id: str
) -> None:
    """Cancelled at any point of a call. A reply that nobody waits for any more must never answer the next call."""
    async with opened(own_valkey.url, max_connections=2, deadline=60.0) as store:
        for name in ("a", "b"):
            await store.create(new(session_id + name))
        for turns in range(25):
            own_valkey.pause()
            calls = [asyncio.create_task(store.commit(session_id + "a", 1, 3, ints(4))) for _ in range(2)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            async with asyncio.timeout(10):
                assert {type(end) for end in await asyncio.gather(*calls, return_exceptions=True)} == {
                    asyncio.CancelledError
                }
            own_valkey.resume()
            for _ in range(4):
                record = await store.load(session_id + "b")
                assert record is not None
                assert record.tokens.tolist() == [1, 2, 3]


async def test_g13_more_sessions_than_connections_wait_their_turn(valkey: ValkeyServer, session_id: str) -> None:
    async with opened(valkey.url, max_connections=10, deadline=30.0) as store, raw(valkey) as client:

        async def session(number: int) -> None:
            name = f"{session_id}-{number}"
            await store.create(new(name))
            for base in range(3, 8):
                await store.commit(name, 1, base, ints(number))

        before = int((await client.info("clients"))["connected_clients"])
        await asyncio.gather(*(session(number) for number in range(300)))
        assert int((await client.info("clients"))["connected_clients"]) - before <= 10


@pytest.mark.parametrize("kind", ["sentinels", "cluster"])
async def test_g13_few_connections_to_each_server_of_many(
    request: pytest.FixtureRequest, session_id: str, kind: str
) -> None:
    group: SentinelGroup | ValkeyCluster = request.getfixturevalue(kind)

    async def session(store: RedisStore, number: int) -> None:
        name = f"{session_id}-{number}"
        await store.create(new(name))
        for base in range(3, 6):
            await store.commit(name, 1, base, ints(number))

    def connected() -> list[int]:
        return [int(told(server, "INFO", "clients")["connected_clients"]) for server in group.servers]

    before = connected()
    async with opened(group.url, max_connections=4, deadline=DEADLINE) as store:
        await asyncio.gather(*(session(store, number) for number in range(300)))
        # A cluster's slots are read over one more.
        assert max(now - then for now, then in zip(connected(), before, strict=True)) <= 5


class LossyProxy:
    """Passes bytes between client and server, and swallows the next reply together with its connection when told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.lose_next_reply = False
        self.lost = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        requests = asyncio.create_task(self._requests(reader, server_writer))
        try:
            while data := await server_reader.read(65536):
                if self.lose_next_reply:
                    self.lose_next_reply = False
                    self.lost += 1
                    break
                writer.write(data)
        finally:
            requests.cancel()
            server_writer.close()
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            server.write(data)
        server.close()


async def test_a_lost_answer_is_no_false_refusal(valkey: ValkeyServer, session_id: str) -> None:
    proxy = LossyProxy(valkey.port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, opened(f"redis://127.0.0.1:{port}", max_connections=1) as store:
        await store.ping()
        proxy.lose_next_reply = True
        await store.create(new(session_id))
        with pytest.raises(SessionExists):
            await store.create(new(session_id))
        proxy.lose_next_reply = True
        await store.commit(session_id, 1, 3, ints(4, 5), finish_reason=1)
        proxy.lose_next_reply = True
        await store.finish(session_id, 1, 1)
        record = await store.load(session_id)
        assert proxy.lost == 3
        assert record is not None
        assert record.tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("tokens", b"12345", "not a multiple of 4"),
        ("tokens", {"a": "b"}, "something else"),
        ("state", b"text", "something else"),
        ("state", {"prompt_length": "x"}, "no number"),
        ("state", {"epoch": "x"}, "no number"),
        ("state", {"epoch": "1.5"}, "something else"),
        ("state", {"version": "2"}, "of version 2 in the store, this orchestrator knows version 1"),
    ],
)
async def test_l6_damaged_values_fail_that_session_alone(
    valkey: ValkeyServer, session_id: str, key: str, value: bytes | dict[str, str], match: str
) -> None:
    async with opened(valkey.url) as store, raw(valkey) as client:
        await store.create(new(session_id))
        await store.create(new(session_id + "-neighbour"))
        name = f"outrider:{{{session_id}}}:{key}"
        if isinstance(value, bytes):
            await client.set(name, value)
        else:
            if key == "tokens":
                await client.delete(name)
            await client.hset(name, mapping=value)
        for call in (store.load, store.take_over):
            with pytest.raises(SessionCorrupt, match=match) as damaged:
                await call(session_id)
            # A client does not call again for it, as it would for a store that is away.
            assert damaged.value.reason == types_pb2.ERROR_REASON_SESSION_CORRUPT
        if key != "tokens" and value not in ({"prompt_length": "x"}, {"epoch": "1.5"}):
            with pytest.raises(SessionCorrupt):
                await store.commit(session_id, 1, 3, ints(4))
            with pytest.raises(SessionCorrupt):
                await store.request_cancel(session_id)
        await store.commit(session_id + "-neighbour", 1, 3, ints(4))


@pytest.mark.parametrize(
    ("credentials", "match"),
    [
        ("outrider:not-it@", "invalid username-password"),
        ("", "authentication|Authentication"),
    ],
)
async def test_who_may_not_come_in_hears_so_at_once_and_without_the_password(
    guarded: TlsFront, session_id: str, credentials: str, match: str
) -> None:
    url = f"rediss://{credentials}127.0.0.1:{guarded.port}/0?{guarded.query}"
    async with opened(url, deadline=10 * DEADLINE) as store, asyncio.timeout(DEADLINE):
        with pytest.raises(StoreUnavailable, match=match) as refused:
            await store.load(session_id)
        assert "not-it" not in str(refused.value)
        assert "outrider" not in str(refused.value)


@pytest.mark.parametrize("query", ["ssl_ca_certs=/no/such/file", "ssl_cert_reqs=required"])
async def test_a_server_that_cannot_be_trusted_is_not_told_the_password(guarded: TlsFront, query: str) -> None:
    async with opened(f"rediss://outrider:not-it@127.0.0.1:{guarded.port}/0?{query}") as store:
        with pytest.raises(StoreUnavailable) as refused:
            await store.ping()
        assert "not-it" not in str(refused.value)


async def test_a_password_that_is_changed_in_its_file_counts_for_the_next_connection(
    own_valkey: ValkeyServer, session_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path := tmp_path / "password").write_text("first\n")
    url = own_valkey.url.replace("//", "//somebody@")
    async with raw(own_valkey) as client:
        await client.execute_command("ACL", "SETUSER", "somebody", "on", ">first", "~*", "+@all")
        async with opened(url, deadline=DEADLINE, password_file=str(path)) as store:
            await store.create(new(session_id))
            await client.execute_command("ACL", "SETUSER", "somebody", "<first", ">second")
            path.write_text("second\n")
            await client.execute_command("CLIENT", "KILL", "USER", "somebody")
            await store.commit(session_id, 1, 3, ints(4))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("redis")] == []


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    async with opened("redis://user:secret@127.0.0.1:1/0", deadline=5.0) as store:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1:1/0 failed: .*[Cc]onnect") as failed:
            await store.ping()
        assert "secret" not in failed.value.message
        assert "\n" not in failed.value.message
        assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost",
        "redis://localhost:port",
        "redis://[::1",
        "redis://localhost/0?no_such_option=1",
        "memory://somewhere",
        "redis://u:secret@localhost:99999999",
        "redis+sentinel://u:secret@a:1,b:2",
        "redis+sentinel://u:secret@a:1,b:2/main/first",
        "redis+sentinel://u:secret@a:1,,b:2/main",
        "redis+sentinel://u:secret@a:1/main?no_such_option=1",
        "redis+sentinel://u:secret@a:1/main?sentinel_no_such_option=1",
        "redis+cluster://u:secret@a:1/0",
        "redis+cluster://u:secret@a:port",
        "redis+cluster://u:secret@a:1?no_such_option=1",
        "redis+other://a:1",
    ],
)
def test_bad_urls_are_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="store URL") as refused:
        open_store(url, 60.0)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_url_cannot_turn_bytes_into_text(valkey: ValkeyServer, session_id: str) -> None:
    async with opened(valkey.url + "?decode_responses=true&protocol=3") as store:
        await store.create(SessionRecord(session_id, ints(255, -1), 2, meta=b"\xff"))
        record = await store.load(session_id)
        assert record is not None
        assert (record.tokens.tolist(), record.meta) == ([255, -1], b"\xff")


def test_a_password_has_one_place(tmp_path: Path) -> None:
    (path := tmp_path / "password").write_text("secret")
    with pytest.raises(ValueError, match="there is a password file") as refused:
        open_store("redis://u:other@localhost", 60.0, password_file=str(path))
    assert "other" not in str(refused.value)
    with pytest.raises(ValueError, match="cannot be read"):
        open_store("redis://u@localhost", 60.0, password_file=str(tmp_path / "none"))
    for options in ({"password_file": str(path)}, {"replicas": 1}):
        with pytest.raises(ValueError, match="memory:// has no host"):
            open_store("memory://", 60.0, **options)  # type: ignore[arg-type]


async def test_how_full_it_is_in_memory(tmp_path: Path) -> None:
    with valkey_server(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as server:
        store = RedisStore(server.url, 60.0, timeout=DEADLINE)
        before = await store.fullness()
        assert before is not None
        meta = b"x" * 10_000_000
        await store.create(SessionRecord("large", ints(1), 1, meta=meta))
        after = await store.fullness()
        assert after is not None
        # The server's buffers hold as much again for a while.
        assert 0.09 < after - before < 0.35
        server.kill()
        with pytest.raises(StoreUnavailable):
            await store.fullness()
        await store.close()
