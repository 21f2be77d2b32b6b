"""How far blocks get: the acceptance rate of each position, of one session or of all that share a draft."""

import math

# Positions that are told apart: the wire's limit on a block.
POSITIONS = 64
# What a pool believes of a draft that it has not seen, and the number of tokens that this belief weighs.
_FIRST_GUESS, _GUESS_WEIGHT = 0.7, 2.0


class Survival:
    """Acceptance by position, given that the positions before were accepted; old rounds fade.

    Args:
        pool: what a young session is shrunk to; None for the pool itself, whose first position is shrunk to a guess and
            every further one to the one before it.
        memory: rounds after which an observation weighs 1/e.
        weight: observations that the belief before any weighs.
    """

    def __init__(self, pool: "Survival | None" = None, *, memory: float = 32.0, weight: float = 8.0) -> None:
        self._pool, self._weight = pool, weight
        self._keep = math.exp(-1.0 / memory)
        self._reached = [0.0] * POSITIONS
        self._kept = [0.0] * POSITIONS

    def observe(self, asked: int, accepted: int) -> None:
        """A block of `asked` tokens was wanted, of which `accepted` were kept; one that did not come has none."""
        for position in range(min(accepted + 1, asked)):
            self._reached[position] = self._keep * self._reached[position] + 1.0
            self._kept[position] = self._keep * self._kept[position] + (position < accepted)

    def rates(self, count: int) -> list[float]:
        """Acceptance of the first `count` positions, each given the ones before it."""
        pool = self._pool.rates(count) if self._pool is not None else None
        rates: list[float] = []
        for position in range(count):
            believed, weight = self._believed(rates, pool)
            rates.append((self._kept[position] + weight * believed) / (self._reached[position] + weight))
        return rates

    def _believed(self, rates: list[float], pool: list[float] | None) -> tuple[float, float]:
        """What is believed of the next position, and the observations that this weighs."""
        position = len(rates)
        if pool is None:
            return (rates[-1], self._weight) if rates else (_FIRST_GUESS, _GUESS_WEIGHT)
        if not rates:
            return pool[0], self._weight
        # Half of what the pool has there, half of what the session has one position before.
        return 0.5 * (pool[position] + rates[-1]), self._weight


def expected_tokens(rates: list[float]) -> list[float]:
    """[len(rates) + 1] tokens that a round is expected to give with a block of 0, 1, ... tokens."""
    tokens, reach = [1.0], 1.0
    for rate in rates:
        reach *= rate
        tokens.append(tokens[-1] + reach)
    return tokens
