"""From a store's place to the clients that reach it: redis-py's, with our settings whatever the URL says about them."""

from redis.asyncio import ConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

from orchestrator.store.servers import Cluster, OneMaster, Servers
from orchestrator.store.url import StorePlace

# Of the time for one write, what replicas may take: less than all of it, so that their number is still heard.
_REPLICAS_SHARE = 0.8


def connect(
    place: StorePlace, patience: float, max_connections: int, replicas: int
) -> tuple[Redis | RedisCluster, Servers]:
    """The client and what writes through it; connects to nothing yet.

    Args:
        patience: seconds that one write may take.
        max_connections: to a server; for a cluster to each of its nodes.
        replicas: how many must have a write before it counts.

    Raises ValueError with one sentence when the URL has options that no connection knows.
    """
    try:
        return _connect(place, patience, max_connections, replicas)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"store URL {place.address} is invalid: {error}") from error


def _connect(
    place: StorePlace, patience: float, max_connections: int, replicas: int
) -> tuple[Redis | RedisCluster, Servers]:
    ours = {
        "decode_responses": False,
        "protocol": 2,
        # Repeating is the business of `pipelined`, which knows the deadline.
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": patience / 2,
        # Our own deadline bounds every call. redis-py would write under asyncio.wait_for, which before Python 3.12
        # swallows a cancellation that arrives as the write completes.
        "socket_timeout": None,
    }
    options, wait = place.options | ours, _REPLICAS_SHARE * patience
    if place.kind == "single":
        return _one_master(ConnectionPool(max_connections=max_connections, **options), None, replicas, wait)
    # What takes several addresses chooses its connections' class by itself, and wants to know of TLS by a flag.
    options["ssl"] = options.pop("connection_class", None) is SSLConnection
    if place.kind == "cluster":
        startup = [ClusterNode(host, port) for host, port in place.nodes]
        # One more for reading the slots anew.
        cluster = RedisCluster(startup_nodes=startup, max_connections=max_connections + 1, **options)
        return cluster, Cluster(cluster, replicas, wait)
    shared = {key: value for key, value in options.items() if key.startswith("ssl") or key in ("protocol", "retry")}
    # A Sentinel that does not answer leaves time for the others.
    share = {"socket_timeout": patience / (len(place.nodes) + 1), "socket_connect_timeout": patience / 4}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        place.nodes, sentinel_kwargs=shared | place.sentinel_options | share
    )
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        place.service, sentinel, max_connections=max_connections, **options
    )
    return _one_master(pool, sentinel, replicas, wait)


def _one_master(pool: ConnectionPool, sentinel: Sentinel | None, replicas: int, wait: float) -> tuple[Redis, OneMaster]:
    # Connects to nothing, and refuses options that no connection knows.
    pool.make_connection()  # type: ignore[no-untyped-call]
    client = Redis.from_pool(pool)
    return client, OneMaster(client, sentinel, replicas, wait)
