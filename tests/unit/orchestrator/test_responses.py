"""A message with many tokens becomes messages with few."""

import pytest

from orchestrator.responses import in_parts
from outrider.v1 import orchestrator_pb2 as pb


@pytest.mark.parametrize("tokens", range(8))
@pytest.mark.parametrize("most", [1, 3, 7])
def test_parts_hold_every_token_once_and_the_last_holds_the_rest(tokens: int, most: int) -> None:
    whole = pb.GenerateResponse(
        tokens=[pb.Token(id=index) for index in range(tokens)],
        round=pb.Round(base_length=5),
        finish=pb.Finish(reason=pb.FINISH_REASON_STOP),
    )
    parts = list(in_parts(whole, most))
    assert [token.id for part in parts for token in part.tokens] == list(range(tokens))
    assert all(1 <= len(part.tokens) <= most for part in parts[:-1])
    assert len(parts) == max(1, -(-tokens // most))
    assert [part.HasField("finish") for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.HasField("round") for part in parts] == [False] * (len(parts) - 1) + [True]
