"""Which call is next, and what the messages of several calls come to."""

import pytest

from outrider.client.progress import Progress
from outrider.net.errors import OutriderError
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
