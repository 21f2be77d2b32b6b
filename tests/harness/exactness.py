"""Integrates the noise out of an acceptance rule, seen as a black box, and gets the law of its output in closed form.

Every decision of a rule is a threshold: an ACCEPT uniform against a probability, one race score against another, a
uniform against a cumulative weight. Bisection finds each threshold to the last bits of float64, so the law that the
code implements, rounding included, comes out without sampling. What is done with it is in `joint.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from orchestrator.acceptance import Outcome
from outrider.law.noise import Purpose
from outrider.law.sparse import SparseLaw

NEVER = 1e300  # the exponential of a runner that must not win
ALWAYS = 1e-300  # the exponential of a runner that must win
LARGEST = 1 - 2.0**-53

# Of (draft_tokens, draft_law, target_probs [lookahead + 1, vocab_size], noise).
Rule = Callable[[np.ndarray, SparseLaw, np.ndarray, "ScriptedNoise"], Outcome]


@dataclass
class ScriptedNoise:
    """Stands in for RoundNoise: says what it was told to say, by position and token."""

    base_length: int = 0
    accept: dict[int, float] = field(default_factory=dict)
    runners: dict[int, float] = field(default_factory=dict)
    tail_runner: float = NEVER
    tail_uniform: float = 0.5

    def uniforms(self, purpose, positions):
        assert purpose is Purpose.ACCEPT
        return np.array([self.accept[int(position)] for position in positions])

    def exponentials(self, purpose, position, token_ids):
        assert purpose is Purpose.RESAMPLE
        return np.array([self.runners.get(int(token), NEVER) for token in token_ids])

    def tail(self, purpose, position):
        assert purpose is Purpose.RESAMPLE
        return self.tail_runner, self.tail_uniform


def drawn_law(run: Callable[..., int], support: list[int], vocab_size: int) -> np.ndarray:
    """Law of a token drawn by a race of the support and a tail: [vocab_size] float64.

    `run` takes the runners' exponentials by token, the tail's exponential and (0.5 by default) the tail's uniform, and
    returns the token.
    """
    reference = _first_runner(run, support)
    rates = np.zeros(vocab_size)
    for token in support:
        rates[token] = 1.0 if token == reference else _relative_rate(run, token, reference)
    tail_rate = 1.0 if reference is None else _relative_rate(run, None, reference)
    if tail_rate:
        rates += tail_rate * _tail_law(lambda uniform: run({}, ALWAYS, uniform), vocab_size)
    return rates / rates.sum()


def _first_runner(run: Callable[..., int], support: list[int]) -> int | None:
    """A runner of the support with a rate above zero, or None when only the tail has one."""
    for token in support:
        if run({token: ALWAYS}, NEVER) == token:
            return token
    return None


def _relative_rate(run: Callable[..., int], runner: int | None, reference: int) -> float:
    """Rate of a runner (None: the tail) over that of the reference, whose exponential is 1."""

    def wins(log_exponential: float) -> bool:
        exponential = float(np.exp(log_exponential))
        if runner is None:
            return run({reference: 1.0}, exponential) != reference
        return run({reference: 1.0, runner: exponential}, NEVER) == runner

    if not wins(-60.0):
        return 0.0
    return float(np.exp(threshold(wins, -60.0, 60.0)))


def _tail_law(run: Callable[[float], int], vocab_size: int) -> np.ndarray:
    """Lengths of the intervals of the uniform that give each token; tokens ascend with it."""
    law, edge = np.zeros(vocab_size), 0.0
    while edge < 1.0:
        token = run(min(max(float(np.nextafter(edge, 1.0)), ALWAYS), LARGEST))
        last = run(LARGEST) <= token
        end = 1.0 if last else threshold(lambda uniform, token=token: run(uniform) <= token, 0.0, 1.0)
        law[token] += end - edge
        edge = max(end, float(np.nextafter(edge, 1.0)))
    return law


def threshold(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that holds on the left stops holding, to the last bits; `low` when it holds nowhere."""
    if low == 0.0 and not holds(ALWAYS):
        return low
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high if high == 1.0 and holds(LARGEST) else low
