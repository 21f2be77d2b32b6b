"""Ways to get `ratio` wrong that have been shipped elsewhere: each replaces one part of the rule."""

import importlib

import numpy as np

module = importlib.import_module("orchestrator.acceptance.ratio")
_keep = module.keep_probability


def _keep_squared(*arguments):
    return _keep(*arguments) ** 2


def _keep_inverted(token, token_ids, draft_row, target_row):
    drafted = float(draft_row[token_ids == token].sum())
    return min(1.0, drafted / max(float(target_row[token]), 1e-30))


def _residual_of_target(target_row, token_ids, draft_row):
    return target_row.astype(np.float64)


def _residual_swapped(target_row, token_ids, draft_row):
    weights = np.zeros(len(target_row))
    weights[token_ids] = np.maximum(draft_row - target_row[token_ids], 0)
    return weights


def _residual_outside_the_support(target_row, token_ids, draft_row):
    weights = target_row.astype(np.float64)
    weights[token_ids] = 0
    return weights


# name -> (attribute of orchestrator.acceptance.ratio, what replaces it)
RULE_MUTANTS = {
    "accept_everything": ("keep_probability", lambda *_: 1.0),
    "squared_acceptance": ("keep_probability", _keep_squared),
    "target_and_draft_swapped_in_acceptance": ("keep_probability", _keep_inverted),
    "residual_from_target": ("residual", _residual_of_target),
    "target_and_draft_swapped_in_residual": ("residual", _residual_swapped),
    "residual_from_outside_the_support": ("residual", _residual_outside_the_support),
}
