"""The link to one target worker: batched Verify, health watched, pair checked."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from uuid import uuid4

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.batcher import Batcher
from orchestrator.costs import TargetCosts
from orchestrator.handshake import PairRefused
from orchestrator.links.base import Info, Link, WorkerSilent, as_error, describe
from orchestrator.stats import RoundStats
from orchestrator.tenants import ANYONE, Caller
from outrider.law.params import LawParams, to_law_spec
from outrider.lm.features import Feeding
from outrider.lm.tokenizer import Vocabulary
from outrider.net.answers import row_bytes
from outrider.net.arrays import to_bytes
from outrider.net.errors import OutriderError, from_status
from outrider.net.tls import ClientTls
from outrider.v1 import target_pb2, target_pb2_grpc, types_pb2
from outrider.v1.target_pb2 import SessionRef, VerifyItem, VerifyResponse, VerifyResult

log = logging.getLogger(__name__)

RELEASE_TIMEOUT = 5.0
# Sessions of one Release.
MAX_OWED = 1_024
# What a single trial of a worker whose breaker is open may take.
TRIAL_TIMEOUT = 10.0
# What counts against a worker; a full or draining one is not ill.
_FAULTS = {
    types_pb2.ERROR_REASON_NO_WORKER,
    types_pb2.ERROR_REASON_ENGINE_FAILED,
    types_pb2.ERROR_REASON_NO_PROGRESS,
}
# A call is cancelled when the last deadline of those who wait for it has passed. Were its own deadline the same, either
# could come first, and a worker that is in time would seem to have failed.
_AFTER_DEADLINE = 1.0


class TargetLink(Link):
    """One target worker.

    Attributes:
        costs: what rounds cost with it.
        max_tree_nodes: most tokens of a block that is a tree; 0 where it takes chains alone.
        hidden_size, layers: of the features that it shows; 0 where it shows none.

    Args:
        vocabulary: of the orchestrator's tokenizer.
        verify_timeout: deadline of one Verify call, in seconds.
        changed: called whenever `usable` may have changed.
        batched: told how long each item waited for its call, in seconds.
        model: MODEL that the worker must have been started with; empty: any of that vocabulary.
    """

    kind = "target"

    def __init__(
        self,
        address: str,
        vocabulary: Vocabulary,
        verify_timeout: float,
        changed: Callable[[], None],
        tls: ClientTls | None = None,
        batched: Callable[[float], None] = lambda _: None,
        model: str = "",
    ) -> None:
        super().__init__(address, vocabulary, changed, tls)
        self._model = model
        self._verify_timeout = verify_timeout
        self.costs = TargetCosts()
        self.max_tree_nodes = 0
        self.hidden_size = self.layers = 0
        self._batcher = Batcher(self._send, self.costs, waited=batched)
        self._releases: set[asyncio.Task[None]] = set()
        self._verifying: dict[str, asyncio.Future[None]] = {}
        # Sessions that left and could not be released, with their epochs.
        self._owed: dict[str, int] = {}

    async def verify(self, item: VerifyItem, caller: Caller = ANYONE, stats: RoundStats | None = None) -> VerifyResult:
        """Scores one block, batched with those of other sessions. Raises OutriderError when the call failed.

        A session may have two owners here for a moment, of which one does not know yet that it is none any more. Their
        items do not share a call: the target takes one of a session.
        """
        while (other := self._verifying.get(item.session_id)) is not None:
            await asyncio.wait({other})
        if self._owed:
            self._owed.pop(item.session_id, None)
        answered = self._verifying[item.session_id] = asyncio.get_running_loop().create_future()
        try:
            return await self._batcher.verify(item, caller, stats)
        finally:
            del self._verifying[item.session_id]
            answered.set_result(None)

    def shows(self, feeding: Feeding) -> bool:
        """Whether it has such features."""
        return self.hidden_size == feeding.hidden_size and max(feeding.layers) <= self.layers

    @property
    def queued(self) -> tuple[int, int]:
        """(items that wait for the next call, items in calls that are not answered)."""
        return self._batcher.waiting, self._batcher.in_flight

    def away(self, session_id: str) -> None:
        """The session's next block will take its time."""
        self._batcher.away(session_id)

    def left_by(self, session_id: str, epoch: int) -> None:
        """A session has gone to another worker: it is released here in the background."""
        release = asyncio.create_task(self.release(session_id, epoch))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def release(self, session_id: str, epoch: int) -> None:
        """Frees a session. A worker that this does not reach is told when it answers again, and frees it by its
        time-to-live if it never does.

        A Release that overtook a Verify of its session would leave the session to its time-to-live: calls of one
        connection are not handled in the order in which they were sent.
        """
        self._batcher.away(session_id)
        await self._batcher.answered(session_id, RELEASE_TIMEOUT)
        await self._release({session_id: epoch})

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        releases = list(self._releases)
        for release in releases:
            release.cancel()
        await asyncio.gather(*releases, return_exceptions=True)
        await self._batcher.close()
        await super().close()

    async def _release(self, sessions: dict[str, int]) -> None:
        refs = [SessionRef(session_id=name, epoch=epoch) for name, epoch in sessions.items()]
        try:
            await self._stub.Release(target_pb2.ReleaseRequest(sessions=refs), timeout=RELEASE_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            # Whether the worker is usable is what its health says: it would not be asked again after a lost Release.
            log.info("target %s: %d sessions were not released: %s", self.address, len(refs), describe(error))
            if len(self._owed) + len(sessions) <= MAX_OWED:
                self._owed.update(sessions)
        except grpc.aio.UsageError:
            log.info("target %s: %d sessions were not released: the link is closed", self.address, len(refs))

    def _use(self, channel: grpc.aio.Channel) -> None:
        self._stub = target_pb2_grpc.TargetServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def _send(self, items: Sequence[VerifyItem], left: float) -> VerifyResponse:
        timeout = min(self._verify_timeout, max(0.0, left) + _AFTER_DEADLINE)
        try:
            response = await self._stub.Verify(target_pb2.VerifyRequest(items=items), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            failure = as_error(error)
            hurried = timeout < self._verify_timeout and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if failure.reason in _FAULTS and not hurried:
                self.breaker.failure()
            raise failure from error
        self.heard(response.load)
        self._judge(response)
        return response

    def _judge(self, response: VerifyResponse) -> None:
        """Tells the breaker of a call: that all its items failed is one failure."""
        if any(not result.status.code for result in response.results):
            self.breaker.success()
        elif any(from_status(result.status).reason in _FAULTS for result in response.results):
            self.breaker.failure()

    async def _get_info(
        self, seconds: float, *, include_token_hashes: bool = False
    ) -> target_pb2.TargetServiceGetInfoResponse:
        request = target_pb2.TargetServiceGetInfoRequest(include_token_hashes=include_token_hashes)
        return await self._stub.GetInfo(request, timeout=seconds)

    def _serves(self, info: Info) -> None:
        if self._model not in ("", info.model.model_id):
            raise PairRefused(f"target {self.address} serves {info.model.model_id}, --target-model is {self._model}")
        super()._serves(info)
        self._batcher.row_bytes = row_bytes(info.model.vocab_size, info.model.dtype)
        if isinstance(info, target_pb2.TargetServiceGetInfoResponse):
            self._batcher.max_positions = info.token_budget
            self.max_tree_nodes = info.max_tree_nodes
            self.hidden_size, self.layers = info.hidden_size, info.layers

    async def _serve_connection(self) -> None:
        request = health_pb2.HealthCheckRequest()
        async for update in self._health.Watch(request):
            serving = update.status == health_pb2.HealthCheckResponse.SERVING
            if serving and not self.usable:
                self._up()
            elif not serving:
                self._down("the worker says NOT_SERVING: it is loading, draining or stuck")

    async def _check_pair(self) -> None:
        try:
            await super()._check_pair()
        except grpc.aio.AioRpcError as error:
            # There is no connection any more: a server that stopped may have left a call without an answer.
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._batcher.abandon()
            raise

    async def _probe(self) -> None:
        try:
            await super()._probe()
        except WorkerSilent:
            # Nobody else ends these calls before their deadline.
            self._batcher.abandon()
            raise

    async def _tend(self) -> None:
        if self._owed:
            owed, self._owed = self._owed, {}
            await self._release(owed)
        if not self.breaker.closed and self.breaker.allows():
            await self._try()

    async def _try(self) -> None:
        """A pass over one token, so that no session has to try a worker whose breaker is open."""
        item = VerifyItem(
            session_id=f"trial-{uuid4().hex}",
            epoch=1,
            base_length=1,
            prefix_tokens=to_bytes(np.zeros(1, np.int32)),
            row_format=target_pb2.ROW_FORMAT_SAMPLE,
            law=to_law_spec(LawParams(temperature=0.0), 0),
        )
        try:
            async with asyncio.timeout(TRIAL_TIMEOUT):
                await self._send([item], math.inf)
        except (OutriderError, TimeoutError) as error:
            log.info("target %s: a trial failed: %s", self.address, str(error) or "it took too long")
            self.breaker.failure()
        else:
            await self.release(item.session_id, item.epoch)
