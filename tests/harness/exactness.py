"""Integrates the noise out of an acceptance rule, seen as a black box, and gets the law of its output in closed form.

Every decision of a rule is a threshold: an ACCEPT uniform against a probability, one race score against another, a
uniform against a cumulative weight. Bisection finds each threshold to the last bits of float64, so the law that the
code implements, rounding included, comes out without sampling.
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

Rule = Callable[[np.ndarray, SparseLaw, np.ndarray, "ScriptedNoise"], Outcome]


@dataclass
class ScriptedNoise:
    """Stands in for RoundNoise: says what it was told to say, by position and token."""

    base_length: int = 0
    accept: dict[int, float] = field(default_factory=dict)
    runners: dict[int, float] = field(default_factory=dict)
    tail_runner: float = NEVER
    tail_uniform: float = 0.5

    def uniform(self, purpose, position):
        assert purpose is Purpose.ACCEPT
        return self.accept[position]

    def exponentials(self, purpose, position, token_ids):
        assert purpose is Purpose.RESAMPLE
        return np.array([self.runners.get(int(token), NEVER) for token in token_ids])

    def tail(self, purpose, position):
        assert purpose is Purpose.RESAMPLE
        return self.tail_runner, self.tail_uniform


@dataclass(frozen=True)
class Block:
    """A block as the rule gets it, and the laws that its tokens were really drawn from."""

    drawn: np.ndarray  # [lookahead, vocab] float64
    shipped: Callable[[np.ndarray], SparseLaw]  # draft tokens -> the law beside them
    target_probs: np.ndarray  # [lookahead + 1, vocab] float32


def output_law(rule: Rule, block: Block) -> np.ndarray:
    """The law of each position's token, given that all draft tokens before were kept.

    Returns [positions, vocab] float64; fewer than lookahead + 1 positions when no draft token of one can be kept.
    """
    lookahead, vocab_size = block.drawn.shape
    overlap = np.minimum(block.drawn, block.target_probs[:-1])
    keepable = np.where(overlap.any(axis=1), overlap.argmax(axis=1), block.drawn.argmax(axis=1)).astype(np.int32)
    law = np.zeros((lookahead + 1, vocab_size))
    for index in range(lookahead):
        for token in np.flatnonzero(block.drawn[index]):
            tokens = keepable.copy()
            tokens[index] = token
            law[index] += block.drawn[index, token] * _position(rule, block, tokens, index)
        if not overlap[index].any():
            return law[: index + 1]
    law[lookahead] = _drawn_token(rule, block, keepable, lookahead, dict.fromkeys(range(lookahead), ALWAYS))
    return law


def _position(rule: Rule, block: Block, tokens: np.ndarray, index: int) -> np.ndarray:
    """Law of the token at `index`, given the draft token there and all before kept."""

    def run(uniform: float) -> Outcome:
        accept = {position: ALWAYS if position < index else uniform for position in range(len(tokens))}
        return rule(tokens, block.shipped(tokens), block.target_probs, ScriptedNoise(accept=accept))

    result = np.zeros(block.drawn.shape[1])
    # The smallest uniform that rejects is the probability to keep.
    kept = _threshold(lambda uniform: run(uniform).accepted > index, 0.0, 1.0)
    result[tokens[index]] = kept
    if run(LARGEST).accepted > index:
        return result
    accept = {position: ALWAYS if position < index else LARGEST for position in range(len(tokens))}
    return result + (1 - kept) * _drawn_token(rule, block, tokens, index, accept)


def _drawn_token(rule: Rule, block: Block, tokens: np.ndarray, index: int, accept: dict[int, float]) -> np.ndarray:
    """Law of the token that the rule draws at `index`: race rates by bisection, the tail by its uniform."""
    shipped = block.shipped(tokens)

    def run(runners: dict[int, float], tail: float, uniform: float = 0.5) -> int:
        outcome = rule(tokens, shipped, block.target_probs, ScriptedNoise(0, accept, runners, tail, uniform))
        assert outcome.accepted == index, "the rule stopped elsewhere"
        return outcome.token

    support = shipped.row(index)[0].tolist() if index < len(tokens) else []
    reference = _first_runner(run, support)
    rates = np.zeros(block.drawn.shape[1])
    for token in support:
        rates[token] = 1.0 if token == reference else _relative_rate(run, token, reference)
    tail_rate = 1.0 if reference is None else _relative_rate(run, None, reference)
    if tail_rate:
        rates += tail_rate * _tail_law(lambda uniform: run({}, ALWAYS, uniform), len(rates))
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
    return float(np.exp(_threshold(wins, -60.0, 60.0)))


def _tail_law(run: Callable[[float], int], vocab_size: int) -> np.ndarray:
    """Lengths of the intervals of the uniform that give each token; tokens ascend with it."""
    edges = [0.0]
    for token in range(vocab_size):
        reached = run(LARGEST) <= token
        edges.append(1.0 if reached else _threshold(lambda uniform, token=token: run(uniform) <= token, 0.0, 1.0))
    return np.diff(edges)


def _threshold(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition that holds on the left stops holding, to the last bits; `low` when it holds nowhere."""
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high if high == 1.0 and holds(LARGEST) else low
