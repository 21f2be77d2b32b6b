"""From a URL to a store."""

from orchestrator.store.base import SessionStore
from orchestrator.store.memory import MemoryStore
from orchestrator.store.redis import RedisStore
from orchestrator.store.url import SCHEMES


def open_store(
    url: str, ttl: float, *, timeout: float = 5.0, replicas: int = 0, password_file: str = ""
) -> SessionStore:
    """The store that a URL names: `memory://`, or one of `orchestrator.store.url`; the rest is as for RedisStore.

    Connects to nothing yet: `await store.ping()` does. ttl in seconds, counted from a session's last commit.
    Raises ValueError with one sentence when the URL is bad.
    """
    scheme, _, rest = url.partition("://")
    if scheme in SCHEMES:
        return RedisStore(url, ttl, timeout=timeout, replicas=replicas, password_file=password_file)
    if not url.startswith("memory://"):
        raise ValueError(f"store URL must begin with {', '.join(f'{name}://' for name in (*SCHEMES, 'memory'))}")
    if rest or replicas or password_file:
        raise ValueError("store URL memory:// has no host, no replicas and no password")
    return MemoryStore(ttl)
