"""python -m orchestrator.store.checkup: looks at a session store, for `outrider doctor`.

Takes its settings from the orchestrator's environment variables; prints one JSON object a check: check, level (ok,
warning, broken or unseen), seen, advice. Ends with exit code 0, whatever it found.
"""

import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoPermissionError, RedisError

from orchestrator.store.base import SessionRecord, StoreError
from orchestrator.store.connecting import connect
from orchestrator.store.redis import RedisStore, store_keys
from orchestrator.store.url import SCHEMES, StorePlace, parse_store_url
from outrider.v1.orchestrator_pb2 import FINISH_REASON_LENGTH

# The throw-away session goes by itself where the user may not delete it.
_TTL = 30.0
_PINGS, _SLOW_PING = 20, 0.02
# Clocks further apart than this make logs and traces unreadable beside each other.
_SKEW = 1.0
# Part of maxmemory.
_FULL = 0.9
_OLDEST = (6, 0)


class Check(NamedTuple):
    """As printed."""

    check: str
    level: str
    seen: str
    advice: str = ""


Info = Mapping[str, Any]
# By words of an answer: who gives one is there, and reached.
_SIGNS = {
    "permission": "give the user the rights that docs/reliability.md lists",
    "maxmemory": "raise maxmemory: a full server refuses commits, and streams end",
    "read only replica": "name the master, or the Sentinels",
    "not enough good replicas": "start its replicas, or lower its min-replicas-to-write",
    "unknown command": "it must run Lua scripts (EVALSHA): a proxy or service that does not cannot be the store",
    "loading": "wait until it has read its append-only file",
    "misconf": "it cannot write to its disk: free space, then look at its log",
}
_NO_ENTRY = ("invalid username-password", "wrongpass", "authentication", "noauth", "invalid password")


async def checks(environment: Mapping[str, str]) -> AsyncIterator[Check]:
    """All of them, in an order in which what fails first explains what follows."""
    url, timeout = environment["OUTRIDER_STORE"], float(environment["OUTRIDER_STORE_TIMEOUT"])
    password_file = environment.get("OUTRIDER_STORE_PASSWORD_FILE", "")
    replicas = int(environment.get("OUTRIDER_STORE_WAIT_REPLICAS", "") or "0")
    if url.partition("://")[0] not in SCHEMES:
        advice = "give all orchestrators one redis:// store, if there are several or sessions must outlive them"
        yield Check("store", "warning", "memory:// ends with its process and cannot be looked at", advice)
        return
    try:
        place = parse_store_url(url, password_file)
        store = RedisStore(url, _TTL, timeout=timeout, replicas=0, password_file=password_file)
    except ValueError as error:
        yield Check("store", "broken", str(error), "correct --store or --store-password-file")
        return
    client, servers = connect(place, timeout, 4, 0)
    try:
        try:
            yield await _reached(store)
        except (StoreError, ValueError) as error:
            yield Check("store", "broken", str(error), _advice(str(error)))
            return
        try:
            async for check in _seen_by(client, place, replicas):
                yield check
        except (RedisError, ValueError) as error:
            seen = f"what it tells of itself (INFO) is not understood: {error}"
            yield Check("server", "unseen", seen, "is it a proxy, or a service that answers less than Redis does?")
        yield await _scripts(store, client)
    finally:
        await servers.close()
        await store.close()


async def _reached(store: RedisStore) -> Check:
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        await store.ping()
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    seen = f"answers in {1e3 * median:.2f} ms (median of {_PINGS} pings)"
    if median > _SLOW_PING:
        return Check("store", "warning", seen, "every round commits: put the store nearer, or give it a core")
    return Check("store", "ok", seen)


def _advice(message: str) -> str:
    """For what keeps everybody out."""
    words = message.lower()
    if any(each in words for each in _NO_ENTRY):
        return "correct the user, the password or --store-password-file"
    if "certificate" in words or "ssl" in words:
        return "ssl_ca_certs=FILE must hold the CA of the server's certificate, which must be for the host of the URL"
    for sign, advice in _SIGNS.items():
        if sign in words:
            return advice
    return (
        "start it, or correct --store (rediss:// where it speaks TLS, redis:// where it does not); "
        "if it runs, look for a firewall or NetworkPolicy between"
    )


async def _seen_by(client: Redis | RedisCluster, place: StorePlace, replicas: int) -> AsyncIterator[Check]:
    """What every server tells of itself, if the user may ask."""
    try:
        asked = time.time()
        infos = await _each(client, place, "INFO")
        doubt = (time.time() - asked) / 2
    except NoPermissionError:
        advice = "ask with a user that may: +info +config|get"
        yield Check("server", "unseen", "the user may not ask for version, persistence and memory (INFO)", advice)
        return
    for name, info in infos.items():
        yield _version(name, info)
        yield _memory(name, info)
        yield _replication(name, info, replicas)
        yield await _persistence(client, place, name, info)
    # INFO carries it, so that TIME needs no right of its own.
    for name, info in infos.items():
        theirs = int(info.get("server_time_usec", 0)) / 1e6
        yield _clock(name, theirs - asked - doubt if theirs else None, doubt)


async def _each(client: Redis | RedisCluster, place: StorePlace, *command: str) -> dict[str, Any]:
    """Answers by server: of a cluster, of each master."""
    if isinstance(client, RedisCluster):
        await client.initialize()
        return {node.name: await client.execute_command(*command, target_nodes=node) for node in client.get_primaries()}
    answer = await client.execute_command(*command)  # type: ignore[no-untyped-call]
    return {place.address.partition("://")[2]: answer}


def _version(name: str, info: Info) -> Check:
    version = str(info.get("valkey_version") or info.get("redis_version") or "unknown")
    kind = "Valkey" if "valkey_version" in info else "Redis"
    numbers = tuple(int(each) for each in version.split(".")[:2] if each.isdigit())
    if numbers and numbers < _OLDEST:
        return Check(
            "version", "warning", f"{name}: {kind} {version}", "use Redis 6 or newer: what is older is not tested"
        )
    return Check("version", "ok", f"{name}: {kind} {version}")


def _memory(name: str, info: Info) -> Check:
    policy, limit = str(info.get("maxmemory_policy", "noeviction")), int(info.get("maxmemory", 0))
    seen = (
        f"{name}: {info.get('used_memory_human', '?')} of {info['maxmemory_human'] if limit else 'no limit'}, {policy}"
    )
    if policy == "noeviction" and limit and int(info.get("used_memory", 0)) > _FULL * limit:
        return Check("memory", "broken", seen, "raise maxmemory: a full server refuses commits, and streams end")
    if policy == "noeviction":
        return Check("memory", "ok", seen)
    advice = "CONFIG SET maxmemory-policy noeviction: else sessions vanish when memory runs out"
    return Check("memory", "broken" if limit else "warning", seen, advice)


def _replication(name: str, info: Info, wanted: int) -> Check:
    online = sum(isinstance(value, dict) and value.get("state") == "online" for value in info.values())
    if info.get("role") != "master":
        return Check(
            "replicas", "broken", f"{name} is a replica: it refuses writes", "name the master, or the Sentinels"
        )
    if online < wanted:
        advice = f"commits wait for {wanted} (--store-wait-replicas): start replicas, or wait for fewer"
        return Check("replicas", "broken", f"{name}: {online} online", advice)
    return Check("replicas", "ok", f"{name}: {online} online, {wanted} waited for")


async def _persistence(client: Redis | RedisCluster, place: StorePlace, name: str, info: Info) -> Check:
    failed = [key for key in ("aof_last_write_status", "rdb_last_bgsave_status") if info.get(key, "ok") != "ok"]
    if failed:
        advice = "its disk is full or broken: free space, then look at its log"
        return Check("persistence", "broken", f"{name}: {', '.join(failed)} failed", advice)
    if not int(info.get("aof_enabled", 0)):
        advice = "appendonly yes, if sessions must outlive the server (docs/reliability.md has the table)"
        return Check("persistence", "warning", f"{name}: no append-only file: sessions end with the server", advice)
    try:
        answer = (await _each(client, place, "CONFIG GET", "appendfsync"))[name]
    except RedisError:
        return Check("persistence", "ok", f"{name}: append-only file; how often it is synced may not be asked")
    sync = str(answer.get("appendfsync", answer.get(b"appendfsync", "unknown")))
    if sync == "no":
        advice = "appendfsync everysec or always (docs/reliability.md says what each is worth)"
        return Check("persistence", "warning", f"{name}: append-only file that is never synced", advice)
    return Check("persistence", "ok", f"{name}: append-only file, appendfsync {sync}")


def _clock(name: str, ahead: float | None, doubt: float) -> Check:
    """`doubt`: seconds by which the answer may have been under way for longer in one direction."""
    if ahead is None:
        return Check("clock", "unseen", f"{name} does not tell its time")
    seen = f"{name}: {1e3 * ahead:+.0f} ms from this machine's"
    if abs(ahead) - doubt > _SKEW:
        advice = "set the clocks (NTP): certificates, logs and traces go by them; sessions and deadlines do not"
        return Check("clock", "warning", seen, advice)
    return Check("clock", "ok", seen)


async def _scripts(store: RedisStore, client: Redis | RedisCluster) -> Check:
    """A whole life of a session that nobody sees: each script once."""
    name = f"doctor-{secrets.token_hex(8)}"
    tokens = np.zeros(1, np.int32)
    try:
        await store.create(SessionRecord(name, tokens, 1))
        await store.commit(name, 1, 1, tokens)
        record = await store.take_over(name)
        await store.finish(name, record.epoch, FINISH_REASON_LENGTH)
        await store.request_cancel(name)
    except StoreError as error:
        return Check("scripts", "broken", error.message, _advice(error.message))
    try:
        await client.delete(*store_keys(name))
    except RedisError:
        return Check("scripts", "ok", f"create, commit, take-over and end work; the key {name} goes within {_TTL:g} s")
    return Check("scripts", "ok", "create, commit, take-over and end work; what they wrote is removed")


async def main() -> None:
    """Prints what `checks` find."""
    async for check in checks(os.environ):
        print(json.dumps(check._asdict()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
