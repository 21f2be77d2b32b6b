"""Every outcome of a short generation enumerated: its probability under the target's law, and whether samples fit.

The law is written down here a second time, with transformers' own warpers and plain arithmetic in float64: nothing of
outrider/law is used.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from scipy import optimize, stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.lm.engine import Engine, Segment

# Of the tests that mutants must fail, and of the right rule: it is held to more than the mutants, so that a fault is
# not taken for chance, and its seeds are fixed.
ALPHA, RIGHT = 1e-4, 1e-3
POWER = 0.999
_LEAST_EXPECTED = 5.0


@dataclass(frozen=True)
class Sampling:
    """The parameters of a request, as `ask` takes them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


def law_after(engine: Engine, prompt: Sequence[int], said: Sequence[int], sampling: Sampling) -> np.ndarray:
    """[vocab] float64: the law of the token after prompt and said tokens."""
    whole = np.array([*prompt, *said], np.int32)
    sequence = engine.open(whole)
    (row,) = engine.forward([Segment(sequence, whole, 1)])
    sequence.free()
    ids, scores = torch.from_numpy(whole.astype(np.int64))[None], row.double()
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token, count in Counter(said).items():
        scores[0, token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    for token, bias in sampling.logit_bias.items():
        scores[0, token] += bias if bias > -100 else -torch.inf
    return _warped(ids, scores, sampling).softmax(dim=1)[0].numpy()  # type: ignore[no-any-return]


def _warped(ids: torch.Tensor, scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(ids, scores)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Outcomes:
    """The first tokens of a generation.

    Attributes:
        conditional: for each beginning, the law of the next token; beginnings of probability 0 are left out.
        law: [vocab, ..., vocab] float64, the joint law.
    """

    conditional: Mapping[tuple[int, ...], np.ndarray]
    law: np.ndarray


def enumerate_outcomes(engine: Engine, prompt: Sequence[int], sampling: Sampling, length: int) -> Outcomes:
    """All outcomes of the first `length` tokens."""
    vocab_size = engine.info.vocab_size
    conditional: dict[tuple[int, ...], np.ndarray] = {}
    law = np.zeros((vocab_size,) * length)
    for beginning, probability in _beginnings(vocab_size, length, conditional, law):
        conditional[beginning] = law_after(engine, prompt, beginning, sampling)
        if len(beginning) == length - 1:
            law[beginning] = probability * conditional[beginning]
    return Outcomes(conditional, law)


def _beginnings(
    vocab_size: int, length: int, conditional: Mapping[tuple[int, ...], np.ndarray], law: np.ndarray
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Shorter ones first, each with its probability, by the laws that the consumer has filled in."""
    for size in range(length):
        for beginning in product(range(vocab_size), repeat=size):
            probability = 1.0
            for at, token in enumerate(beginning):
                probability *= conditional[beginning[:at]][token] if probability else 0.0
            if probability:
                yield beginning, probability


def p_value(law: np.ndarray, said: Sequence[Sequence[int]]) -> float:
    """Of Pearson's chi-square of the outcomes seen; 0 when one was seen that cannot be. Rare outcomes share a cell."""
    seen = np.zeros(law.shape)
    for outcome in said:
        seen[tuple(outcome)] += 1
    if seen[law == 0].any():
        return 0.0
    expected = law[law > 0] * len(said)
    observed = seen[law > 0]
    rare = expected < _LEAST_EXPECTED
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    return float(stats.chisquare(observed, expected).pvalue)


def samples_for(effect: float, cells: int) -> int:
    """Samples at which a chi-square divergence of the outcomes is seen at level ALPHA with probability POWER."""
    critical = stats.chi2.isf(ALPHA, cells - 1)
    noncentrality = optimize.brentq(lambda size: stats.ncx2.sf(critical, cells - 1, size) - POWER, 1, 10_000)
    return int(np.ceil(noncentrality / effect))


def _kept_and_drawn(keep: np.ndarray, draft: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The law of a block's first token: kept with probability `keep`, else drawn from the residual."""
    kept = draft * keep
    return kept + (1 - kept.sum()) * residual / residual.sum()


def _keep(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, np.divide(target, draft, out=np.ones_like(target), where=draft > 0))


# What the mutants of tests/harness/mutants.py make of the first token of a block, given both laws [vocab].
FAULTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "accept_everything": lambda target, draft: draft,
    "squared_acceptance": lambda target, draft: _kept_and_drawn(
        _keep(target, draft) ** 2, draft, np.maximum(target - draft, 0)
    ),
    "target_and_draft_swapped_in_acceptance": lambda target, draft: _kept_and_drawn(
        _keep(draft, target), draft, np.maximum(target - draft, 0)
    ),
    "residual_from_target": lambda target, draft: _kept_and_drawn(_keep(target, draft), draft, target),
    "target_and_draft_swapped_in_residual": lambda target, draft: _kept_and_drawn(
        _keep(target, draft), draft, np.maximum(draft - target, 0)
    ),
}


def samples_against(fault: str, target: Outcomes, draft_law: Callable[[tuple[int, ...]], np.ndarray]) -> int:
    """Samples at which a fault is found out with probability POWER.

    Args:
        fault: one of FAULTS.
        draft_law: beginning -> [vocab], the draft's law of the next token.

    Counted is what the second token shows, the first of a block; the first token of all is drawn without a block. What
    the third shows comes on top.
    """
    effect = impossible = 0.0
    for token, probability in enumerate(target.conditional[()]):
        if probability:
            right = target.conditional[(token,)]
            wrong = FAULTS[fault](right, draft_law((token,)))
            possible = right > 0
            impossible += probability * wrong[~possible].sum()
            effect += probability * ((wrong - right)[possible] ** 2 / right[possible]).sum()
    cells = int((target.law > 0).sum())
    needed = min(samples_for(effect, cells), _samples_that_show(impossible) if impossible > 1e-9 else 10**9)
    # With fewer, rare outcomes share one cell and the chi-square loses what the calculation counts on.
    return max(needed, 3 * cells)


def _samples_that_show(mass: float) -> int:
    """Samples of which one is in a set of this probability, with probability POWER."""
    return int(np.ceil(np.log(1 - POWER) / np.log1p(-mass)))
