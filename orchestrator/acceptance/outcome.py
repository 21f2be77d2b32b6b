"""What a round adds to a session."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.law.noise import Int64Array
from outrider.law.sparse import Int32Array
from outrider.law.tree import Tree
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
        accepted: how many draft tokens are kept.
        token: the token after them.
        origin: of that token: recovered, bonus or plain.
        path: where the kept ones stand in a block that is a tree; None in a chain: they are its first.
    """

    accepted: int
    token: int
    origin: "TokenOrigin.ValueType"
    path: tuple[int, ...] | None = None

    def kept(self, draft_tokens: Int32Array) -> Int32Array:
        """The draft tokens that are kept, in order."""
        return draft_tokens[: self.accepted] if self.path is None else draft_tokens[list(self.path)]

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """[accepted + 1] the rows that the round's tokens were judged by."""
        if self.path is None:
            return np.arange(self.accepted + 1)
        return np.array([0, *(token + 1 for token in self.path)])


def origin_after(accepted: int, lookahead: int) -> "TokenOrigin.ValueType":
    """Where the token after `accepted` of `lookahead` draft tokens comes from."""
    if accepted < lookahead:
        return TOKEN_ORIGIN_RECOVERED
    return TOKEN_ORIGIN_BONUS if lookahead else TOKEN_ORIGIN_PLAIN


def outcomes(accepted: Int64Array, tokens: Int32Array, lookaheads: Int64Array) -> list[Outcome]:
    """Of many blocks: arrays [blocks] of how many draft tokens are kept, the token after them, and the lookahead."""
    each = zip(accepted.tolist(), tokens.tolist(), lookaheads.tolist(), strict=True)
    return [Outcome(count, token, origin_after(count, lookahead)) for count, token, lookahead in each]


def follow(draft_tokens: Int32Array, target_tokens: Int32Array, tree: Tree | None = None) -> Outcome:
    """Keeps draft tokens [lookahead] as long as each is the target's token [lookahead + 1]; then the target's own. In a
    tree one of several candidates may be it.

    Raises ValueError when there is not one target token more than draft tokens.
    """
    if len(target_tokens) != len(draft_tokens) + 1:
        raise ValueError(f"{len(draft_tokens)} draft tokens need one row more, not {len(target_tokens)}")
    if tree is not None:
        return _follow_tree(draft_tokens, target_tokens, tree)
    wrong = np.flatnonzero(target_tokens[:-1] != draft_tokens)
    accepted = int(wrong[0]) if len(wrong) else len(draft_tokens)
    return Outcome(accepted, int(target_tokens[accepted]), origin_after(accepted, len(draft_tokens)))


def _follow_tree(draft_tokens: Int32Array, target_tokens: Int32Array, tree: Tree) -> Outcome:
    row, path = 0, list[int]()
    while True:
        children = tree.children(row)
        token = int(target_tokens[row])
        same = [child for child in children if draft_tokens[child] == token]
        if not same:
            return outcome_of_path(path, token, children)
        path.append(same[0])
        row = same[0] + 1


def outcome_of_path(path: list[int], token: int, children: range) -> Outcome:
    """Of a tree: `children` are the candidates after the path, of which none was kept."""
    origin = TOKEN_ORIGIN_RECOVERED if children else TOKEN_ORIGIN_BONUS
    return Outcome(len(path), token, origin, tuple(path))
