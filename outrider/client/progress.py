"""How one generation gets on over several calls: which call is next, where, and when. Does no I/O itself."""

import random
import secrets
import time
from collections.abc import Sequence

import grpc

from outrider.net.errors import OutriderError, from_rpc_error, reason_name
from outrider.net.tls import explained, refused_certificate
from outrider.v1 import orchestrator_pb2, types_pb2
from outrider.v1.orchestrator_pb2 import Finish, GenerateRequest, GenerateResponse, ResumeRequest, Started, Token

# Another orchestrator, or the same one later, goes on.
_RETRIED = {
    types_pb2.ERROR_REASON_DRAINING,
    types_pb2.ERROR_REASON_ENGINE_FAILED,
    types_pb2.ERROR_REASON_NO_WORKER,
    types_pb2.ERROR_REASON_QUEUE_FULL,
    types_pb2.ERROR_REASON_STALE_EPOCH,
    types_pb2.ERROR_REASON_STORE_UNAVAILABLE,
}
# A call that ends so without a word of the service was lost on its way.
_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}
_FIRST_PAUSE, _LONGEST_PAUSE, _MOST_DOUBLINGS = 0.05, 2.0, 10


class ClientClosed(RuntimeError):
    """The client was closed, and calls nobody any more."""

    def __init__(self) -> None:
        super().__init__("the client is closed")


class Progress:
    """One generation.

    Args:
        request: what to generate; gets a random session id unless it has one.
        addresses: of orchestrators over one session store.
        timeout: seconds that it may take, all calls and pauses together.

    Attributes:
        request: what to call Generate with.
        started, finish: the first and the last word of the service; None until then.
        received: generated tokens received so far.
    """

    def __init__(self, request: GenerateRequest, addresses: Sequence[str], timeout: float) -> None:
        self.request = GenerateRequest()
        self.request.CopyFrom(request)
        self.request.resumable = True
        self.request.session_id = request.session_id or secrets.token_urlsafe(12)
        self._nobody_elses = not request.session_id
        self._addresses = addresses
        self._next = random.randrange(len(addresses))
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._failures = 0
        self._strangers = 0  # calls in a row that met a certificate which is not to be trusted
        self.started: Started | None = None
        self.finish: Finish | None = None
        self.received = 0

    @property
    def session_id(self) -> str:
        """Id of the session."""
        return self.request.session_id

    @property
    def unfinished(self) -> bool:
        """Whether there may be a session to end, and nobody else's: one that was never heard of may have its name from
        another caller.
        """
        return self.finish is None and (self._nobody_elses or self.started is not None)

    @property
    def address(self) -> str:
        """Where the next call goes."""
        return self._addresses[self._next]

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    @property
    def rest(self) -> ResumeRequest | None:
        """What to call Resume with; None until the session is known to exist: sending the request again is safe."""
        if self.started is None:
            return None
        return ResumeRequest(session_id=self.session_id, offset=self.received)

    def take(self, response: GenerateResponse) -> Sequence[Token]:
        """The tokens of a message, each once whatever happened. Raises OutriderError when the session ended without
        its output.
        """
        if response.HasField("started") and self.started is None:
            self.started = response.started
        if response.tokens:
            self._failures = 0
            self.received += len(response.tokens)
        if response.HasField("finish"):
            self.finish = response.finish
            _check(self.session_id, response.finish)
        return response.tokens

    def pause_after(self, error: grpc.RpcError) -> float:
        """Seconds until the next call, which goes elsewhere where there is another address.

        Raises OutriderError when no call can help, PermissionError when the token was refused, ConnectionError when
        the certificates of all orchestrators were, TimeoutError when there is no time for another call.
        """
        if self.finish is not None:
            return 0.0  # nothing is missing but the call's own end
        refusal = from_rpc_error(error)
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise PermissionError(f"{self.address} refused the call: {error.details()}") from error
        self._strangers = self._strangers + 1 if refused_certificate(error.details() or "") else 0
        if self._strangers >= len(self._addresses):
            raise ConnectionError(f"{self.address} is not who it should be: {error.details()}") from error
        if refusal is None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise self._too_late(error) from error
        if refusal is None and error.code() not in _LOST:
            raise OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, _words(error)) from error
        if refusal is not None and refusal.reason not in _RETRIED:
            raise refusal from error
        pause = self._next_pause()
        if refusal is not None and refusal.retry_after is not None:
            # Never earlier than told, and not all at once: a full service tells everybody the same.
            pause = max(pause, refusal.retry_after * random.uniform(1.0, 1.5))
        if pause >= self.left:
            raise self._too_late(error) from error
        return pause

    def _next_pause(self) -> float:
        """Grows with the failures in a row; jittered, lest the clients of a lost orchestrator all come at once."""
        self._next = (self._next + 1) % len(self._addresses)
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self._failures, _MOST_DOUBLINGS))
        self._failures += 1
        return random.uniform(0.5, 1.0) * longest

    def _too_late(self, error: grpc.RpcError) -> TimeoutError:
        return TimeoutError(
            f"the generation did not end within {self._timeout:g} s, {self.received} tokens came; "
            f"the last call, to {self.address}, ended with {_words(error)}"
        )


class Told:
    """What callers are told of a generation beside its tokens."""

    _progress: Progress

    @property
    def session_id(self) -> str:
        """Id of the session, known before it begins."""
        return self._progress.session_id

    @property
    def started(self) -> Started | None:
        """How the session began; None until the first token."""
        return self._progress.started

    @property
    def finish(self) -> Finish | None:
        """Why it ended, and its usage; None until then."""
        return self._progress.finish


def _check(session_id: str, finish: Finish) -> None:
    """A session that others ended, or that failed while nobody listened, is no success."""
    if finish.reason == orchestrator_pb2.FINISH_REASON_CANCELLED:
        raise OutriderError(types_pb2.ERROR_REASON_SESSION_CANCELLED, f"session {session_id} was cancelled")
    if finish.reason == orchestrator_pb2.FINISH_REASON_ERROR:
        raise OutriderError(types_pb2.ERROR_REASON_ENGINE_FAILED, f"session {session_id} has failed")


def _words(error: grpc.RpcError) -> str:
    refusal = from_rpc_error(error)
    if refusal is not None:
        return f"{reason_name(refusal.reason)}: {refusal.message}"
    return f"{error.code().name}: {explained(error.details() or 'no details')}"
