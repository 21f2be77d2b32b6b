"""What a round adds to a session."""

from dataclasses import dataclass

import numpy as np

from outrider.law.noise import Int64Array
from outrider.law.sparse import Int32Array
from outrider.v1.orchestrator_pb2 import (
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
    TokenOrigin,
)


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
        return TOKEN_ORIGIN_RECOVERED
    return TOKEN_ORIGIN_BONUS if lookahead else TOKEN_ORIGIN_PLAIN


def outcomes(accepted: Int64Array, tokens: Int32Array, lookaheads: Int64Array) -> list[Outcome]:
    """Of many blocks: arrays [blocks] of how many draft tokens are kept, the token after them, and the lookahead."""
    each = zip(accepted.tolist(), tokens.tolist(), lookaheads.tolist(), strict=True)
    return [Outcome(count, token, origin_after(count, lookahead)) for count, token, lookahead in each]


def follow(draft_tokens: Int32Array, target_tokens: Int32Array) -> Outcome:
    """Keeps draft tokens [lookahead] as long as each is the target's token [lookahead + 1]; then the target's own.

    Raises ValueError when there is not one target token more than draft tokens.
    """
    if len(target_tokens) != len(draft_tokens) + 1:
        raise ValueError(f"{len(draft_tokens)} draft tokens need one row more, not {len(target_tokens)}")
    wrong = np.flatnonzero(target_tokens[:-1] != draft_tokens)
    accepted = int(wrong[0]) if len(wrong) else len(draft_tokens)
    return Outcome(accepted, int(target_tokens[accepted]), origin_after(accepted, len(draft_tokens)))
