"""How a tree of candidates grows: level by level, under a budget of tokens, where the target will most likely go on.

Every candidate has a *worth*, how likely a round is to keep it as far as the draft knows, and the tree is made of those
with the largest. A worth is known before its candidate is drawn, and is never above those of its parent and of the
siblings before it. So whether a candidate belongs to the tree never depends on what token it turns out to be, nor on
anything that comes after it: that is what acceptance asks of a tree (docs/exactness.md).

The idea of growing by joint probability is that of Li et al. 2024, "EAGLE-2: faster inference of language models with
dynamic draft trees", which ranks drawn tokens; here places are ranked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.law.noise import RoundNoise
from outrider.law.sparse import Float32Array, Int32Array

Row = tuple[Int32Array, Float32Array]

_NOTHING: Row = np.empty(0, np.int32), np.empty(0, np.float32)

# A first candidate that is drawn is kept at least this often: acceptance makes draft and target agree more often than
# two draws of one law would.
_AGREEMENT = 0.5


@dataclass(eq=False)
class Node:
    """A candidate, or the prefix.

    Attributes:
        parent: what it follows; None for the prefix.
        token: it; -1 for the prefix.
        depth: candidates of its path.
        worth: how likely a round keeps it.
        noise: of what follows it.
        place: in the session, once it is there.
        row: the law of what follows it, once something was drawn from it.
    """

    parent: "Node | None"
    token: int
    depth: int
    worth: float
    noise: RoundNoise
    place: int
    row: Row = _NOTHING


class Growth:
    """A tree in the making.

    Attributes:
        level: the nodes whose laws the next pass gives.

    Args:
        noise: of the round.
        nodes: most candidates.
        depth: of the longest path.
    """

    def __init__(self, noise: RoundNoise, nodes: int, depth: int) -> None:
        self._nodes, self._depth = nodes, depth
        self._base_length = noise.base_length
        self._root = Node(None, -1, 0, 1.0, noise, noise.base_length - 1)
        # Largest worth first; among equals parents before children, and siblings as they were drawn.
        self._kept: list[Node] = []
        self.level = [self._root]

    def branch(self, node: Node, row: Row, tokens: Sequence[int], chances: Iterator[float]) -> None:
        """Gives a node of the level its candidates, as many as belong to the tree so far.

        Args:
            row: their law.
            tokens: in the order in which they are drawn.
            chances: how likely each is kept when the node is.
        """
        worth = node.worth
        position = self._base_length + node.depth
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=False)):
            worth = min(worth, node.worth * chance)
            if worth <= self._least:
                break
            node.row = row
            noise = node.noise.branch(position, rank)
            self._kept.append(Node(node, token, node.depth + 1, worth, noise, -1))
            if len(self._kept) > self._nodes:
                self._prune()

    def next_level(self, ends: Sequence[int]) -> list[Node]:
        """Moves on: the nodes to be computed next, which need their places; none when the tree is done. Nothing follows
        the tokens of `ends`."""
        self._prune()
        depth = self.level[0].depth + 1
        at_depth = [node for node in self._kept if node.depth == depth and node.token not in ends]
        # What follows a node is worth no more than it.
        self.level = [node for node in at_depth if node.worth > self._least] if depth < self._depth else []
        return self.level

    def result(self) -> tuple[list[int], Int32Array, list[Row]]:
        """(tokens, the row that each follows, the laws after each row but the last)."""
        children: dict[Node, list[Node]] = {}
        for node in self._kept:
            assert node.parent is not None
            children.setdefault(node.parent, []).append(node)
        rows, parents = [self._root], list[int]()
        for number, row in enumerate(rows):
            following = children.get(row, [])
            rows += following
            parents += [number] * len(following)
        laws = [row.row if row in children else _NOTHING for row in rows[:-1]]
        return [node.token for node in rows[1:]], np.array(parents, np.int32), laws

    @property
    def _least(self) -> float:
        """A worth below which, and at which, nothing more belongs to the tree."""
        return min(node.worth for node in self._kept) if len(self._kept) >= self._nodes else 0.0

    def _prune(self) -> None:
        self._kept.sort(key=lambda node: -node.worth)
        del self._kept[self._nodes :]


def chances_drawn(probs: Sequence[float]) -> Iterator[float]:
    """How likely each candidate is kept, of those drawn one after another without replacement.

    Args:
        probs: [n] of all tokens of the law, in the order in which they are drawn. A chance depends on what was drawn
            before its candidate, and not on it.

    A first candidate agrees with the target by the rule's own doing, or else by chance, as often as two draws of the
    law do; a later one, once those before it were rejected, by chance.
    """
    mass, squares, left = float(sum(probs)), float(sum(prob * prob for prob in probs)), 1.0
    for rank, prob in enumerate(probs):
        if mass <= 0.0:
            return
        agree = min(1.0, max(0.0, squares) / mass**2)
        chance = agree if rank else _AGREEMENT + (1.0 - _AGREEMENT) * agree
        yield left * chance
        left *= 1.0 - chance
        mass, squares = mass - prob, squares - prob * prob
