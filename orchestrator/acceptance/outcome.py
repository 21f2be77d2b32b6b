"""What a round adds to a session."""

from dataclasses import dataclass

from outrider.v1.orchestrator_pb2 import TokenOrigin


@dataclass(frozen=True)
class Outcome:
    """The draft tokens kept, and the one token that follows them.

    Attributes:
        accepted: how many leading draft tokens are kept.
        token: the token after them.
        origin: of that token: recovered, bonus or plain.
    """

    accepted: int
    token: int
    origin: "TokenOrigin.ValueType"


def origin_after(accepted: int, lookahead: int) -> "TokenOrigin.ValueType":
    """Where the token after `accepted` of `lookahead` draft tokens comes from."""
    if accepted < lookahead:
        return TokenOrigin.TOKEN_ORIGIN_RECOVERED
    return TokenOrigin.TOKEN_ORIGIN_BONUS if lookahead else TokenOrigin.TOKEN_ORIGIN_PLAIN
