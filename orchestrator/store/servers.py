"""One write to the servers behind a store: one master, whoever holds that post, or the masters of a cluster."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from orchestrator.store.scripts import Script

# Failures of a server or of the way to it; whoever is asked next may be another one.
TRANSIENT = (ConnectionError, TimeoutError, OSError, RedisClusterException, ClusterDownError, ReadOnlyError)
# Refusals that pass by themselves and have no class of their own: too few replicas at the moment
# (min-replicas-to-write), a master that is being demoted.
_PASSING = ("NOREPLICAS", "UNBLOCKED", "MASTERDOWN")


class TooFewReplicas(ConnectionError):
    """A write that not enough replicas have acknowledged: it may be lost with its server."""


@dataclass(eq=False)
class Call:
    """One call of a script.

    Attributes:
        answer: what its caller waits for.
        failure: what it last failed with.
        untaught: whether the server does not know the script, which is then sent whole.
        asked: the cluster's node that has the keys at this moment, while a slot is moving.
    """

    script: Script
    keys: tuple[str, ...]
    args: Sequence[Any]
    answer: "asyncio.Future[Any]"
    failure: Exception | None = None
    untaught: bool = False
    asked: ClusterNode | None = None

    @property
    def command(self) -> tuple[Any, ...]:
        """The words that are sent."""
        name, script = ("EVAL", self.script.text) if self.untaught else ("EVALSHA", self.script.sha)
        return name, script, len(self.keys), *self.keys, *self.args


def passes(error: Exception) -> bool:
    """Whether the same call may come to something else in a moment."""
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return False
    if isinstance(error, (*TRANSIENT, NoScriptError, AskError, TryAgainError)):  # MovedError is an AskError
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_PASSING)


class Servers(Protocol):
    """Where scripts run."""

    async def send(self, calls: Sequence[Call]) -> list[Any]:
        """One write; for every call its answer or its exception. Raises what befell all of them."""

    async def forget(self) -> None:
        """Drops idle connections and what is known of the servers' roles: the next write finds out anew."""

    async def ping(self) -> None:
        """Returns when a server answers."""

    async def memory(self) -> list[Mapping[str, Any]]:
        """What INFO says of the memory of every master."""

    async def close(self) -> None:
        """Gives connections back."""


class OneMaster:
    """A server, or with a Sentinel the master that the Sentinels name.

    Args:
        replicas: how many must have a write before it counts.
        patience: seconds that they may take.
    """

    def __init__(self, client: Redis, sentinel: Sentinel | None, replicas: int, patience: float) -> None:
        self._client, self._sentinel = client, sentinel
        self._wait = wait_command(replicas, patience)

    async def send(self, calls: Sequence[Call]) -> list[Any]:
        """See Servers."""
        pipeline = self._client.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command(*call.command)
        if self._wait:
            pipeline.execute_command(*self._wait)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        if self._wait:
            check_replicas(answers.pop(), self._wait)
        for call, answer in zip(calls, answers, strict=True):
            call.untaught = isinstance(answer, NoScriptError)
        return answers

    async def forget(self) -> None:
        """See Servers."""
        await self._client.connection_pool.disconnect(inuse_connections=False)

    async def ping(self) -> None:
        """See Servers."""
        await self._client.ping()

    async def memory(self) -> list[Mapping[str, Any]]:
        """See Servers."""
        return [await self._client.info("memory")]

    async def close(self) -> None:
        """See Servers."""
        await self._client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()


class Cluster:
    """The masters of a cluster: to each goes one write with the calls whose slots it has.

    redis-py's pipeline would follow MOVED and ASK by itself, call by call. Its ASKING goes over another connection than
    the call behind it, and no WAIT would cover what it repeats: so both come back as answers, and the call is repeated.

    Args:
        replicas, patience: as for OneMaster, at each master.
    """

    def __init__(self, client: RedisCluster, replicas: int, patience: float) -> None:
        self._client = client
        self._wait = wait_command(replicas, patience)

    async def send(self, calls: Sequence[Call]) -> list[Any]:
        """See Servers."""
        await self._client.initialize()
        pipeline, places, nodes = self._client.pipeline(), [], [self._node(call) for call in calls]
        for call, node in zip(calls, nodes, strict=True):
            if call.asked:
                pipeline.execute_command("ASKING", target_nodes=node)
            places.append(len(pipeline))
            pipeline.execute_command(*call.command, target_nodes=node)
        waits = {}
        for node in set(nodes) if self._wait else ():
            waits[node] = len(pipeline)
            pipeline.execute_command(*self._wait, target_nodes=node)
        everything: list[Any] = await pipeline.execute(raise_on_error=False, allow_redirections=False)
        answers = [everything[place] for place in places]
        for index, (call, node) in enumerate(zip(calls, nodes, strict=True)):
            await self._learn(call, answers[index])
            if self._wait and not isinstance(answers[index], Exception):
                try:
                    check_replicas(everything[waits[node]], self._wait)
                except TooFewReplicas as error:
                    answers[index] = error
        return answers

    async def forget(self) -> None:
        """See Servers."""
        await self._client.aclose()

    async def ping(self) -> None:
        """See Servers."""
        await self._client.ping()

    async def memory(self) -> list[Mapping[str, Any]]:
        """See Servers."""
        await self._client.initialize()
        masters = self._client.get_primaries()
        return [await self._client.execute_command("INFO", "memory", target_nodes=node) for node in masters]

    async def close(self) -> None:
        """See Servers."""
        await self._client.aclose()

    def _node(self, call: Call) -> ClusterNode:
        return call.asked or self._client.nodes_manager.get_node_from_slot(self._client.keyslot(call.keys[0]))

    async def _learn(self, call: Call, answer: Any) -> None:
        call.untaught, call.asked = isinstance(answer, NoScriptError), None
        if isinstance(answer, MovedError):
            await self._client.nodes_manager.move_slot(answer)
        elif isinstance(answer, AskError):
            call.asked = self._client.get_node(answer.host, answer.port)


def wait_command(replicas: int, patience: float) -> tuple[Any, ...]:
    """WAIT with its arguments; empty where no replica is waited for."""
    return ("WAIT", replicas, max(1, round(1000 * patience))) if replicas else ()


def check_replicas(answer: Any, wait: tuple[Any, ...]) -> None:
    """Raises TooFewReplicas unless as many replicas as were asked for have what was written before."""
    if not isinstance(answer, int) or answer < wait[1]:
        raise TooFewReplicas(f"{wait[1]} replicas are to acknowledge every write, WAIT came to: {answer}")
