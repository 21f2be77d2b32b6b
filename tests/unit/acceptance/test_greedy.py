import numpy as np
import pytest
import torch

from orchestrator.acceptance import Outcome, accept, greedy
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.rows import Sample, sample_rows
from outrider.law.sparse import SparseLaw
from outrider.law.transforms import RowContext, law_probs
from outrider.v1.orchestrator_pb2 import Acceptance, TokenOrigin
from tests.harness.rows import law_rows

RECOVERED, BONUS, PLAIN = (
    TokenOrigin.TOKEN_ORIGIN_RECOVERED,
    TokenOrigin.TOKEN_ORIGIN_BONUS,
    TokenOrigin.TOKEN_ORIGIN_PLAIN,
)


@pytest.mark.parametrize(
    ("block", "target", "outcome"),
    [
        ([1, 2, 3], [1, 2, 3, 4], Outcome(3, 4, BONUS)),
        ([1, 2, 3], [1, 2, 5, 4], Outcome(2, 5, RECOVERED)),
        ([1, 2, 3], [0, 2, 3, 4], Outcome(0, 0, RECOVERED)),
        ([], [4], Outcome(0, 4, PLAIN)),
    ],
)
def test_the_longest_prefix_that_the_target_agrees_with_is_kept(block, target, outcome):
    assert greedy(np.array(block, np.int32), np.array(target, np.int32)) == outcome


def test_a5_a_draft_token_that_is_not_the_targets_argmax_is_never_kept():
    """p(a) = .3, p(b) = .5, q(a) = .2: a ratio above 1 is no reason to keep a at temperature 0."""
    logits = torch.log(torch.tensor([[0.3, 0.5, 0.2]] * 2))
    contexts = [RowContext(LawParams(temperature=0.0), np.zeros(length, np.int32)) for length in (1, 2)]
    target = law_probs(logits, contexts, 3)
    law = SparseLaw.concatenate([(np.array([0, 1], np.int32), np.array([0.2, 0.8], np.float32))])
    noise = RoundNoise(1, 1)
    (argmax,) = sample_rows(target, [Sample(noise, 2)])
    for rule, rows in (
        (Acceptance.ACCEPTANCE_GREEDY, argmax),
        (Acceptance.ACCEPTANCE_COUPLED, argmax),
        (Acceptance.ACCEPTANCE_RATIO, law_rows(target, law, noise)),
        (Acceptance.ACCEPTANCE_BLOCK, law_rows(target, law, noise)),
    ):
        assert accept(rule, np.array([0], np.int32), law, rows, noise) == Outcome(0, 1, RECOVERED)


def test_rows_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="one row more"):
        greedy(np.array([1, 2], np.int32), np.array([1, 2], np.int32))
