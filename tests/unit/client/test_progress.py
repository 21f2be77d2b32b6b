"""Which call is next, and what the messages of several calls come to."""

import grpc
import pytest
from grpc_status import rpc_status

from outrider.client.progress import Progress
from outrider.net.errors import OutriderError, to_status
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1 import types_pb2


def progress(**fields: object) -> Progress:
    return Progress(pb.GenerateRequest(prompt="x", **fields), ["a:1", "b:1"], 60.0)  # type: ignore[arg-type]


def tokens(*ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=[pb.Token(id=index) for index in ids])


def started(seed: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(seed=seed))


def finish(reason: "pb.FinishReason.ValueType") -> pb.GenerateResponse:
    return pb.GenerateResponse(finish=pb.Finish(reason=reason))


def test_a_request_is_sent_again_until_its_session_is_heard_of_then_its_rest_is_asked_for() -> None:
    one = progress()
    assert one.request.resumable
    assert one.request.session_id
    assert one.request.session_id != progress().request.session_id
    assert one.rest is None
    one.take(started(7))
    assert one.rest == pb.ResumeRequest(session_id=one.session_id, offset=0)
    assert [token.id for token in one.take(tokens(4, 5, 6))] == [4, 5, 6]
    assert one.rest == pb.ResumeRequest(session_id=one.session_id, offset=3)
    one.take(started(7))  # of the next call
    one.take(tokens(7))
    assert one.rest == pb.ResumeRequest(session_id=one.session_id, offset=4)
    assert one.started is not None
    assert one.started.seed == 7
    one.take(finish(pb.FINISH_REASON_LENGTH))
    assert one.finish is not None
    assert not one.unfinished


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (pb.FINISH_REASON_CANCELLED, types_pb2.ERROR_REASON_SESSION_CANCELLED),
        (pb.FINISH_REASON_ERROR, types_pb2.ERROR_REASON_ENGINE_FAILED),
    ],
)
def test_a_session_that_ended_without_its_output_is_an_error(
    end: "pb.FinishReason.ValueType", reason: "types_pb2.ErrorReason.ValueType"
) -> None:
    one = progress()
    with pytest.raises(OutriderError) as failed:
        one.take(finish(end))
    assert failed.value.reason == reason
    assert not one.unfinished


def test_a_name_that_others_may_have_is_ended_only_when_it_was_heard_of() -> None:
    assert progress().unfinished
    named = progress(session_id="mine")
    assert named.session_id == "mine"
    assert not named.unfinished
    named.take(started(1))
    assert named.unfinished


class Refused(grpc.RpcError):
    """A call that ended with the error."""

    def __init__(self, error: OutriderError) -> None:
        self._status = rpc_status.to_status(to_status(error))

    def code(self) -> grpc.StatusCode:
        return self._status.code  # type: ignore[no-any-return]

    def details(self) -> str:
        return self._status.details  # type: ignore[no-any-return]

    def trailing_metadata(self) -> object:
        return self._status.trailing_metadata


def full(retry_after: float) -> Refused:
    return Refused(OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_after=retry_after))


def test_a_refused_request_comes_again_when_it_was_told_to_and_not_all_at_once() -> None:
    pauses = [progress().pause_after(full(10.0)) for _ in range(200)]
    assert 10.0 <= min(pauses) < 10.5
    assert 14.5 < max(pauses) <= 15.0


def test_a_time_beyond_the_deadline_is_not_waited_for() -> None:
    with pytest.raises(TimeoutError, match="QUEUE_FULL: full"):
        progress().pause_after(full(61.0))
