"""Ways to get acceptance wrong, most of them shipped elsewhere: each replaces one part of a rule."""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

ratio = importlib.import_module("orchestrator.acceptance.ratio")
block = importlib.import_module("orchestrator.acceptance.block")
laws = importlib.import_module("orchestrator.acceptance.laws")


@dataclass(frozen=True)
class Mutant:
    """`module.attribute` replaced."""

    module: Any
    attribute: str
    replacement: Any

    def install(self, monkeypatch) -> None:
        monkeypatch.setattr(self.module, self.attribute, self.replacement)


def _entries(both, index):
    row = both.row(index)
    return both.target[row], both.draft[row], float(both.tails[index])


def _residual_of_target(both, index, weight):
    target, _, tail = _entries(both, index)
    return target, tail


def _residual_swapped(both, index, weight):
    target, draft, tail = _entries(both, index)
    return (np.maximum(draft - weight * target, 0), 0.0) if len(target) else (target, tail)


def _residual_outside_the_support(both, index, weight):
    target, _, tail = _entries(both, index)
    return np.zeros_like(target), tail


def _residual_without_tail(both, index, weight):
    target, draft, tail = _entries(both, index)
    return np.maximum(weight * target - draft, 0), 0.0 if len(target) else tail


def _residual_without_clamp(both, index, weight):
    target, draft, tail = _entries(both, index)
    return np.abs(weight * target - draft), weight * tail


def _residual_without_weight(both, index, weight):
    target, draft, tail = _entries(both, index)
    return np.maximum(target - draft, 0), tail


def _residual_with_weight_on_support_only(both, index, weight):
    target, draft, tail = _entries(both, index)
    return np.maximum(weight * target - draft, 0), tail


# Parts that `ratio` and `block` share.
SHARED_MUTANTS = {
    "residual_from_target": Mutant(laws, "residual", _residual_of_target),
    "target_and_draft_swapped_in_residual": Mutant(laws, "residual", _residual_swapped),
    "residual_from_outside_the_support": Mutant(laws, "residual", _residual_outside_the_support),
    "residual_without_tail": Mutant(laws, "residual", _residual_without_tail),
    "residual_without_clamp": Mutant(laws, "residual", _residual_without_clamp),
}

RATIO_MUTANTS = {
    "accept_everything": Mutant(ratio, "keep_probabilities", lambda both: np.ones(len(both.ratios))),
    "squared_acceptance": Mutant(ratio, "keep_probabilities", lambda both: np.minimum(1, both.ratios) ** 2),
    "target_and_draft_swapped_in_acceptance": Mutant(
        ratio, "keep_probabilities", lambda both: np.minimum(1, 1 / np.maximum(both.ratios, 1e-30))
    ),
}


def _keep_by_weight(both, weights):
    return weights[1:]


def _keep_by_residual_alone(both, weights):
    return np.append(np.minimum(1, block.residual_masses(both, weights)[1:]), weights[-1])


def _keep_whole_block_always(both, weights):
    return np.append(_keep(both, weights)[:-1], 1.0)


def _masses_with_weight_on_support_only(both, weights):
    return _masses(both, weights) + (1 - weights[:-1]) * both.tails[:-1]


def _masses_without_tail(both, weights):
    return _masses(both, weights) - weights[:-1] * both.tails[:-1]


def _masses_one_row_early(both, weights):
    return np.roll(_masses(both, weights), 1)


_keep, _masses = block.keep_probabilities, block.residual_masses

BLOCK_MUTANTS = {
    "weight_forgotten_in_the_residual": Mutant(laws, "residual", _residual_without_weight),
    "weight_forgotten_in_the_tail": Mutant(laws, "residual", _residual_with_weight_on_support_only),
    "weight_forgotten_in_the_tail_mass": Mutant(block, "residual_masses", _masses_with_weight_on_support_only),
    "tail_mass_dropped": Mutant(block, "residual_masses", _masses_without_tail),
    "residual_mass_of_the_row_before": Mutant(block, "residual_masses", _masses_one_row_early),
    "clamp_dropped": Mutant(block, "running_weights", lambda ratios: np.append(1.0, np.cumprod(ratios))),
    "clamp_at_the_end_only": Mutant(
        block, "running_weights", lambda ratios: np.append(1.0, np.minimum(1, np.cumprod(ratios)))
    ),
    "weights_of_single_tokens": Mutant(block, "running_weights", lambda ratios: np.append(1.0, np.minimum(1, ratios))),
    "prefix_kept_by_its_weight": Mutant(block, "keep_probabilities", _keep_by_weight),
    "prefix_kept_by_its_residual_alone": Mutant(block, "keep_probabilities", _keep_by_residual_alone),
    "whole_block_always_kept": Mutant(block, "keep_probabilities", _keep_whole_block_always),
}
