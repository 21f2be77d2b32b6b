"""From a URL to a store."""

from orchestrator.store.base import SessionStore
from orchestrator.store.memory import MemoryStore
from orchestrator.store.redis import RedisStore

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


def open_store(url: str, ttl: float) -> SessionStore:
    """The store that a URL names: `memory://`, `redis://HOST:PORT/DB`, `rediss://` (TLS) or `unix://PATH`.

    Connects to nothing yet: `await store.ping()` does. ttl in seconds, counted from a session's last commit.
    Raises ValueError with one sentence when the URL is bad.
    """
    if url == "memory://":
        return MemoryStore(ttl)
    if url.startswith(_REDIS_SCHEMES):
        return RedisStore(url, ttl)
    scheme = url.partition("://")[0] if "://" in url else ""
    raise ValueError(f"store URL scheme {scheme!r} is unknown, must be memory://, redis://, rediss:// or unix://")
