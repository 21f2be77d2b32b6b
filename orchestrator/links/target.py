"""The link to one target worker: batched Verify, health watched, pair checked."""

import logging
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.batcher import Batcher
from orchestrator.costs import TargetCosts
from orchestrator.handshake import check_pair, fingerprints_differ
from orchestrator.links.base import HASHES_TIMEOUT, INFO_TIMEOUT, Link, as_error, describe
from outrider.lm.tokenizer import Vocabulary
from outrider.v1 import target_pb2, target_pb2_grpc
from outrider.v1.target_pb2 import SessionRef, VerifyItem, VerifyResponse, VerifyResult

log = logging.getLogger(__name__)

RELEASE_TIMEOUT = 5.0


class TargetLink(Link):
    """One target worker.

    Attributes:
        costs: what rounds cost with it.

    Args:
        vocabulary: of the orchestrator's tokenizer.
        verify_timeout: deadline of one Verify call, in seconds.
        changed: called whenever `usable` may have changed.
    """

    kind = "target"

    def __init__(
        self, address: str, vocabulary: Vocabulary, verify_timeout: float, changed: Callable[[], None]
    ) -> None:
        super().__init__(address, changed)
        self._vocabulary = vocabulary
        self._verify_timeout = verify_timeout
        self._stub = target_pb2_grpc.TargetServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self.costs = TargetCosts()
        self._batcher = Batcher(self._send, hold=self.costs.hold)

    async def verify(self, item: VerifyItem) -> VerifyResult:
        """Scores one block, batched with those of other sessions. Raises OutriderError when the call failed."""
        return await self._batcher.verify(item)

    def away(self, session_id: str) -> None:
        """The session's next block will take its time."""
        self._batcher.away(session_id)

    async def release(self, session_id: str, epoch: int) -> None:
        """Frees a session. What this does not reach is freed by the worker's time-to-live, or is gone already.

        A Release that overtook a Verify of its session would leave the session to its time-to-live: calls of one
        connection are not handled in the order in which they were sent.
        """
        self._batcher.away(session_id)
        await self._batcher.answered(session_id, RELEASE_TIMEOUT)
        request = target_pb2.ReleaseRequest(sessions=[SessionRef(session_id=session_id, epoch=epoch)])
        try:
            await self._stub.Release(request, timeout=RELEASE_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            # Whether the worker is usable is what its health says: it would not be asked again after a lost Release.
            log.info("target %s: session %s was not released: %s", self.address, session_id, describe(error))

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._batcher.close()
        await super().close()

    async def _send(self, items: Sequence[VerifyItem]) -> VerifyResponse:
        try:
            return await self._stub.Verify(target_pb2.VerifyRequest(items=items), timeout=self._verify_timeout)
        except grpc.aio.AioRpcError as error:
            raise as_error(error) from error

    async def _serve_connection(self) -> None:
        await self._check_pair()
        request = health_pb2.HealthCheckRequest()
        async for update in self._health.Watch(request):
            serving = update.status == health_pb2.HealthCheckResponse.SERVING
            if serving and not self.usable:
                self._up()
            elif not serving:
                self._down("the worker says NOT_SERVING: it is loading, draining or stuck")

    async def _check_pair(self) -> None:
        info = await self._stub.GetInfo(target_pb2.TargetServiceGetInfoRequest(), timeout=INFO_TIMEOUT)
        if fingerprints_differ(info.model, self._vocabulary):
            hashes = target_pb2.TargetServiceGetInfoRequest(include_token_hashes=True)
            info = await self._stub.GetInfo(hashes, timeout=HASHES_TIMEOUT)
        check_pair(f"target {self.address}", info.model, self._vocabulary)
        self._serves(info.model, info.max_lookahead)
