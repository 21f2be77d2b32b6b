"""From places where the last tokens stood before to a block: what followed there most often, as far as it is trusted.

After SuffixDecoding (Oliaro et al. 2024): continuations are weighed by how often they followed, and the longer the
match, the longer the block.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# A place whose match is so much shorter than the longest one counts so many times less, for each token.
_FADING = 0.5
# After a match of m tokens the next one is another with probability A / m**B: what the demo's target was seen to do on
# chat, code and quotations (python -m bench.copied).
_A, _B = 1.35, 1.25
# A block ends where less than this is left of the trust that all of it is right: a position of a pass costs less.
TRUST = 0.05


@dataclass(frozen=True)
class Copied:
    """A block.

    Attributes:
        tokens: of it.
        expected: how many of them are expected to be right, in order.
    """

    tokens: list[int]
    expected: float


@dataclass(frozen=True)
class Place:
    """Somewhere that the last tokens stood before.

    Attributes:
        text: what it is in.
        after: index of what followed them.
        matched: how many they are.
    """

    text: "array[int]"
    after: int
    matched: int


def continued(places: Sequence[Place], own: "array[int]", limit: int, trust: float = TRUST) -> Copied:
    """At most `limit` tokens, none where there is no place.

    Args:
        places: newest first, which decides among continuations of equal weight.
        own: the text that goes on; a copy that reaches its end goes on with what it has copied.
        trust: what is to be left of the trust in the block, its last token included.
    """
    longest = max((place.matched for place in places), default=0)
    live = [(place, _FADING ** (longest - place.matched)) for place in places]
    block: list[int] = []
    left, expected = 1.0, 0.0
    while len(block) < limit:
        said = [(_following(place, own, block), place, weight) for place, weight in live]
        votes: dict[int, float] = {}
        for token, _, weight in said:
            if token >= 0:
                votes[token] = votes.get(token, 0.0) + weight
        if not votes:
            break
        best = max(votes, key=votes.__getitem__)
        matched = longest + len(block)
        left *= votes[best] / sum(votes.values()) * (1.0 - _A * matched**-_B)
        if left < trust:
            break
        block.append(best)
        expected += left
        live = [(place, weight) for token, place, weight in said if token == best]
    return Copied(block, expected)


def _following(place: Place, own: "array[int]", block: Sequence[int]) -> int:
    """The token that followed at a place after as many as the block has; negative where nothing did."""
    at = place.after + len(block)
    if at < len(place.text):
        return place.text[at]
    return block[at - len(own)] if place.text is own else -1
