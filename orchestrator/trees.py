"""Trees instead of chains: whether the next block is one, and how deep, by what rounds of each way gave.

A tree costs the target more positions than a chain as deep, and the draft larger passes; it is never drafted ahead; and
how far it gets depends on how its tokens are spread over its depth. So nothing is inferred of one way from another:
rounds are measured as they are, those of the chain control together and those with trees by their depth.
"""

import math
from dataclasses import dataclass, field

# How deep trees may be.
_DEPTHS = (2, 4, 8, 16, 32, 64)
# Rounds after which a way is compared with others; so many are enough where it is clearly worse.
_YOUNG, _FEWEST, _CLEARLY = 8, 3, 0.9
# Rounds after which a way's means forget.
_MEMORY = 64.0
# Ways that were seen less often are thought better than they look by so many standard errors.
_ERRORS = 1.0
# By which part trees must be better than chains.
_BETTER = 0.02
# Trees that are by so much less deep than they may be are as deep as they get.
_SHORT = 0.5
# One block in so many goes another way: what that gives may have changed.
_RETRIES = 200
# A round that takes so many times as long as others was stalled.
_STALLED = 8.0


@dataclass
class Way:
    """Rounds of one kind.

    Attributes:
        rounds: seen, as far as they are remembered.
        reach: how many tokens their blocks could keep, on average.
    """

    rounds: float = 0.0
    reach: float = 0.0
    _tokens: float = 0.0
    _squares: float = 0.0
    _seconds: float = 0.0

    @property
    def young(self) -> bool:
        """Whether too few were seen."""
        return self.rounds < _YOUNG

    def observe(self, tokens: int, seconds: float, reach: int = 0) -> None:
        """One more, which gave and took so much, with a block that could keep so many tokens."""
        if not self.young and seconds > _STALLED * self._seconds:
            return
        self.rounds = min(self.rounds + 1.0, _MEMORY)
        self._tokens += (tokens - self._tokens) / self.rounds
        self._squares += (tokens * tokens - self._squares) / self.rounds
        self._seconds += (seconds - self._seconds) / self.rounds
        if reach:
            self.reach += (reach - self.reach) / self.rounds

    def forget(self) -> None:
        """What was seen long ago counts for little from now on."""
        self.rounds = min(self.rounds, _YOUNG)

    def worse(self, goodput: float) -> bool:
        """Whether the first rounds are enough to say that it is worse than this."""
        return self.rounds >= _FEWEST and self.goodput() < goodput

    def goodput(self) -> float:
        """Tokens a second, as far as they may well be; 0 before there was a round."""
        if not self._seconds:
            return 0.0
        error = math.sqrt(max(0.0, self._squares - self._tokens * self._tokens) / self.rounds)
        return (self._tokens + _ERRORS * error) / self._seconds


@dataclass
class TreeHistory:
    """What the sessions of one kind of proposer of one draft worker, judged by one rule, learn together of trees of one
    size, and of chains beside them.

    Attributes:
        chains: rounds that the chain control chose, plain ones among them.
        trees: by depth.
        chosen: whether trees are better at present.
    """

    chains: Way = field(default_factory=Way)
    trees: dict[int, Way] = field(default_factory=dict)
    chosen: bool = False
    _choices: int = 0

    def choose(self, limit: int) -> int:
        """How deep the next block's tree is, at most `limit`; 0 for what the chain control says. Chains are known
        first."""
        if self.chains.young:
            return 0
        ways = self._ways(limit)
        if not ways:
            return 0
        depths = list(ways)
        self._choices += 1
        if self._open(ways[depths[-1]]):
            # In turn with chains, which may be new to what is said now.
            return depths[-1] if self._choices % 2 else 0
        best = max(depths, key=lambda depth: ways[depth].goodput())
        self.chosen = ways[best].goodput() > (1.0 + _BETTER) * self.chains.goodput()
        if self._choices % _RETRIES:
            return best if self.chosen else 0
        again = 0 if self.chosen else depths[self._choices // _RETRIES % len(depths)]
        (ways[again] if again else self.chains).forget()
        return again

    def observe(self, depth: int, tokens: int, seconds: float, reach: int = 0) -> None:
        """A round with a tree that was to be so deep, and could keep so many tokens; with what the chain control chose
        where `depth` is 0."""
        way = self.trees.setdefault(depth, Way()) if depth else self.chains
        way.observe(tokens, seconds, reach)

    def _ways(self, limit: int) -> dict[int, Way]:
        """By depth, up to the first that is not known yet. Beyond a depth that trees do not reach, for their tokens are
        few, they are the same trees."""
        ways: dict[int, Way] = {}
        for depth in (each for each in _DEPTHS if each <= limit):
            way = ways[depth] = self.trees.setdefault(depth, Way())
            if self._open(way) or way.reach < depth - _SHORT:
                break
        return ways

    def _open(self, way: Way) -> bool:
        """Whether more is to be seen of it before it is compared."""
        return way.young and not way.worse(_CLEARLY * self.chains.goodput())
