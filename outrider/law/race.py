"""The exponential race: a draw from a law that can be repeated, audited, and run in pieces."""

import numpy as np
import numpy.typing as npt

from outrider.law.noise import Float64Array


def scores(probs: npt.NDArray[np.floating], exponentials: Float64Array) -> Float64Array:
    """exponentials / probs in float64, infinite where the probability is zero. The smallest score wins."""
    rates = probs.astype(np.float64, copy=False)
    result: Float64Array = np.full(rates.shape, np.inf)
    return np.divide(exponentials, rates, out=result, where=rates > 0)


def race(probs: npt.NDArray[np.floating], exponentials: Float64Array) -> int:
    """Index of the winner of argmin exponentials / probs; the lowest index among equals.

    With independent exponentials of rate 1, index i wins with probability probs[i] / sum(probs).
    Raises ValueError when no probability is positive, or one is not finite.
    """
    if not (np.isfinite(probs).all() and (probs > 0).any()):
        raise ValueError("a race needs finite probabilities and one above zero")
    return int(np.argmin(scores(probs, exponentials)))
