"""Rows from a dense law, written as plainly as can be: the reference for `outrider.law.rows`. And rules made dense."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from orchestrator.acceptance import Block, Outcome
from orchestrator.acceptance.laws import side_by_side
from outrider.law.noise import Purpose
from outrider.law.rows import Support, SupportRows, support_rows
from outrider.law.sparse import SparseLaw

NOBODY = np.empty(0, np.int32)


def reference_rows(target_probs, draft_law: SparseLaw, noise) -> SupportRows:
    """Of target_probs [lookahead + 1, vocab_size] float32, over the support of draft_law [lookahead]."""
    probs, masses, tokens = [], [], []
    for index, row in enumerate(target_probs):
        ids = draft_law.row(index)[0] if index < len(draft_law.sizes) else NOBODY
        outside = row.astype(np.float64)
        outside[ids] = 0
        mass = np.cumsum(outside)
        _, uniform = noise.tail(Purpose.RESAMPLE, noise.base_length + index)
        probs.append(row[ids])
        masses.append(mass[-1])
        tokens.append(np.searchsorted(mass, uniform * mass[-1], side="right") if mass[-1] > 0 else 0)
    return SupportRows(np.concatenate(probs).astype(np.float32), np.array(masses), np.array(tokens, np.int32))


def law_rows(target_probs, draft_law: SparseLaw, noise) -> SupportRows:
    """`support_rows` of one block; arguments as in `reference_rows`."""
    block = Support(noise, draft_law.sizes, draft_law.token_ids)
    (rows,) = support_rows(torch.asarray(target_probs).contiguous(), [block])
    return rows


class EachNoise:
    """BatchNoise from noise that answers for one round at a time, whatever it is: the plainest there can be."""

    def __init__(self, noises: Sequence) -> None:
        self.noises = noises
        self.base_lengths = np.array([noise.base_length for noise in noises])

    def uniforms(self, purpose, rounds, positions):
        return self._each(rounds, lambda noise, at: noise.uniforms(purpose, positions[at]))

    def exponentials(self, purpose, rounds, positions, token_ids):
        def of(noise, at):
            here = positions[at]
            assert (here == here[:1]).all()
            return noise.exponentials(purpose, int(here[0]), token_ids[at]) if len(here) else []

        return self._each(rounds, of)

    def tails(self, purpose, rounds, positions):
        return self._each(rounds, lambda noise, at: [noise.tail(purpose, int(it))[0] for it in positions[at]])

    def _each(self, rounds, ask):
        if len(self.noises) == 1:
            return np.asarray(ask(self.noises[0], slice(None)), float)
        result = np.empty(len(rounds))
        for number in np.unique(rounds):
            result[rounds == number] = ask(self.noises[number], rounds == number)
        return result


def alone(rule) -> Callable[..., Outcome]:
    """The rule as a function of (draft_tokens, draft_law, rows, noise), with noise of any kind."""

    def one(draft_tokens, draft_law, rows, noise) -> Outcome:
        (outcome,) = rule(side_by_side([Block(draft_tokens, draft_law, rows, noise)]), EachNoise([noise]))
        return outcome

    return one


def over_rows(rule, rows: Callable = reference_rows) -> Callable[..., Outcome]:
    """The rule as a function of (draft_tokens, draft_law, target_probs [lookahead + 1, vocab_size], noise)."""

    def dense(draft_tokens, draft_law, target_probs, noise) -> Outcome:
        return alone(rule)(draft_tokens, draft_law, rows(target_probs, draft_law, noise), noise)

    return dense
