import pytest

from outrider.net.errors import CODES, OutriderError, from_status, reason_name, to_status
from outrider.v1 import types_pb2

REASONS = [reason for reason in types_pb2.ErrorReason.values() if reason]


def test_every_reason_has_a_code() -> None:
    assert set(CODES) == set(REASONS)


@pytest.mark.parametrize("reason", REASONS, ids=reason_name)
def test_errors_survive_the_wire(reason: types_pb2.ErrorReason.ValueType) -> None:
    error = from_status(to_status(OutriderError(reason, "what", retry_after=1.25)))
    assert (error.reason, error.message, error.retry_after) == (reason, "what", 1.25)


def test_a_status_without_our_details_is_an_engine_failure() -> None:
    status = to_status(OutriderError(types_pb2.ERROR_REASON_QUEUE_FULL, "x"))
    del status.details[:]
    assert from_status(status).reason == types_pb2.ERROR_REASON_ENGINE_FAILED
