"""How far blocks get: the acceptance rate of each position, of one session or of all that share a draft."""

import math

# What a pool believes of a draft that it has not seen, and the number of tokens that this belief weighs.
_FIRST_GUESS, _GUESS_WEIGHT = 0.7, 2.0


class Survival:
    """Acceptance of all sessions that share a draft: by position, given that the positions before were accepted.

    The first position is shrunk to a guess and every further one to the one before it; old blocks fade.

    Args:
        memory: blocks after which an observation weighs 1/e.
        weight: observations that the belief before any weighs.
    """

    def __init__(self, *, memory: float = 512.0, weight: float = 16.0) -> None:
        self._weight = weight
        self._keep = math.exp(-1.0 / memory)
        # As long as the longest block so far.
        self._reached: list[float] = []
        self._kept: list[float] = []

    def observe(self, asked: int, accepted: int) -> None:
        """A block of `asked` tokens was wanted, of which `accepted` were kept; one that did not come has none."""
        missing = [0.0] * (asked - len(self._reached))
        self._reached += missing
        self._kept += missing
        # Also where nothing was tried: what is believed there must not stay what it was long ago.
        self._reached = [self._keep * each for each in self._reached]
        self._kept = [self._keep * each for each in self._kept]
        for position in range(min(accepted + 1, asked)):
            self._reached[position] += 1.0
            self._kept[position] += position < accepted

    def rates(self, count: int, errors: float = 0.0) -> list[float]:
        """Acceptance of the first `count` positions, each given the ones before; and so many standard errors more."""
        rates: list[float] = []
        believed, weight = _FIRST_GUESS, _GUESS_WEIGHT
        for position in range(count):
            weighs = weight
            if position < len(self._reached):
                weighs, weight = self._reached[position] + weight, self._weight
                believed += (self._kept[position] - self._reached[position] * believed) / weighs
            error = math.sqrt(max(0.0, believed * (1.0 - believed)) / weighs)
            rates.append(min(1.0, believed + errors * error))
        return rates


class SessionSurvival:
    """Acceptance of one session: the pool's, with the risk of a rejection so many times as high at every position.

    That factor is believed to be 1 before anything was seen (gamma prior, Poisson rejections): one number for all
    positions, because a session's few rejections tell no more.

    Args:
        memory: blocks after which an observation weighs 1/e.
        weight: rejections that the belief before any weighs.
    """

    def __init__(self, pool: Survival, *, memory: float = 64.0, weight: float = 4.0) -> None:
        self._pool, self._weight = pool, weight
        self._keep = math.exp(-1.0 / memory)
        self._rejected = self._expected = 0.0

    def observe(self, asked: int, accepted: int) -> None:
        """As in Survival."""
        reached = min(accepted + 1, asked)
        self._expected = self._keep * self._expected + sum(1.0 - rate for rate in self._pool.rates(reached))
        self._rejected = self._keep * self._rejected + (accepted < asked)

    def rates(self, count: int, errors: float = 0.0) -> list[float]:
        """As in Survival."""
        factor = (self._rejected + self._weight) / (self._expected + self._weight)
        return [max(0.0, 1.0 - factor * (1.0 - rate)) for rate in self._pool.rates(count, errors)]


def expected_tokens(rates: list[float]) -> list[float]:
    """[len(rates) + 1] tokens that a round is expected to give with a block of 0, 1, ... tokens."""
    tokens, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        tokens.append(tokens[-1] + reach)
    return tokens
