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


def _weighted(laws, weights):
    return weights[laws.support.owners] * laws.target


def _tails_of_last_rows(laws):
    return np.where(laws.support.sizes > 0, 0.0, laws.tails)


def _residual_of_target(laws, weights):
    return laws.target, laws.tails


def _residual_swapped(laws, weights):
    return np.maximum(laws.draft - _weighted(laws, weights), 0), _tails_of_last_rows(laws)


def _residual_outside_the_support(laws, weights):
    return np.zeros_like(laws.target), laws.tails


def _residual_without_tail(laws, weights):
    return np.maximum(_weighted(laws, weights) - laws.draft, 0), _tails_of_last_rows(laws)


def _residual_without_clamp(laws, weights):
    return np.abs(_weighted(laws, weights) - laws.draft), weights * laws.tails


def _residual_without_weight(laws, weights):
    return np.maximum(laws.target - laws.draft, 0), laws.tails


def _residual_with_weight_on_support_only(laws, weights):
    return np.maximum(_weighted(laws, weights) - laws.draft, 0), laws.tails


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
    return weights


def _keep_by_residual_alone(both, weights):
    return np.where(both.last, weights, np.minimum(1, block.residual_masses(both, weights)))


def _keep_whole_block_always(both, weights):
    return np.where(both.last, 1.0, _keep(both, weights))


def _masses_with_weight_on_support_only(both, weights):
    return _masses(both, weights) + (1 - weights) * both.rows.tails


def _masses_without_tail(both, weights):
    return _masses(both, weights) - weights * both.rows.tails


def _masses_one_row_early(both, weights):
    return np.roll(_masses(both, weights), 1)


_keep, _masses = block.keep_probabilities, block.residual_masses

# Those of the weights are for one block alone.
BLOCK_MUTANTS = {
    "weight_forgotten_in_the_residual": Mutant(laws, "residual", _residual_without_weight),
    "weight_forgotten_in_the_tail": Mutant(laws, "residual", _residual_with_weight_on_support_only),
    "weight_forgotten_in_the_tail_mass": Mutant(block, "residual_masses", _masses_with_weight_on_support_only),
    "tail_mass_dropped": Mutant(block, "residual_masses", _masses_without_tail),
    "residual_mass_of_the_row_before": Mutant(block, "residual_masses", _masses_one_row_early),
    "clamp_dropped": Mutant(block, "running_weights", lambda both: np.append(1.0, np.cumprod(both.ratios[:-1]))),
    "clamp_at_the_end_only": Mutant(
        block, "running_weights", lambda both: np.append(1.0, np.minimum(1, np.cumprod(both.ratios[:-1])))
    ),
    "weights_of_single_tokens": Mutant(
        block, "running_weights", lambda both: np.append(1.0, np.minimum(1, both.ratios[:-1]))
    ),
    "prefix_kept_by_its_weight": Mutant(block, "keep_probabilities", _keep_by_weight),
    "prefix_kept_by_its_residual_alone": Mutant(block, "keep_probabilities", _keep_by_residual_alone),
    "whole_block_always_kept": Mutant(block, "keep_probabilities", _keep_whole_block_always),
}
