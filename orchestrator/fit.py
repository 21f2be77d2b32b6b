"""A linear fit that follows what it fits: recursive least squares, robust, keeping what is not measured any more."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

# Residuals count up to this many times their usual size: one pass behind a stalled machine must not move the fit.
_CLIP = 3.0
# ... and always up to this part of what was expected.
_FLOOR = 0.25
# Observations before residuals have a usual size.
_YOUNG = 8


class LinearFit:
    """y ≈ coefficients · x, old observations fading. Information never falls below a floor: where all x are alike,
    coefficients move along that x alone, and what was learned in other directions stays.

    Args:
        scales: [n] the usual size of each feature.
        memory: observations after which an older one weighs 1/e.
        doubt: the floor, and the weight of the first belief, that all coefficients are 0.

    Attributes:
        coefficients: [n].
        count: observations so far.
    """

    def __init__(self, scales: Sequence[float], *, memory: float = 32.0, doubt: float = 0.01) -> None:
        self._scales: Vector = np.array(scales, np.float64)
        self._keep = 1.0 - 1.0 / memory
        self._doubt = doubt * np.eye(len(scales))
        self._information = self._doubt.copy()
        self._theta: Vector = np.zeros(len(scales))
        self._spread = 0.0
        self.coefficients: list[float] = [0.0] * len(scales)
        self.count = 0

    def observe(self, features: Sequence[float], value: float) -> None:
        """One more observation."""
        x = np.array(features, np.float64) / self._scales
        self._information = self._keep * self._information + (1.0 - self._keep) * self._doubt + np.outer(x, x)
        expected = float(self._theta @ x)
        residual = self._clipped(value - expected, abs(expected))
        self._theta = self._theta + np.linalg.solve(self._information, x) * residual
        self.coefficients = [float(each) for each in self._theta / self._scales]
        self.count += 1

    def _clipped(self, residual: float, size: float) -> float:
        limit = math.inf if self.count < _YOUNG else max(_CLIP * self._spread, _FLOOR * size)
        # The usual size may double: a lasting change is followed within a few observations.
        self._spread += (min(abs(residual), 2.0 * limit) - self._spread) / min(self.count + 1, 16)
        return min(max(residual, -limit), limit)
