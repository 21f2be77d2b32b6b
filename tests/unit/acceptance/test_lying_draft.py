"""How far `ratio` and `block` trust a draft: one that shapes its laws to the noise, which it knows, passes the audit.

docs/threat-model.md says so; this test holds it to its words, in both directions.
"""

import numpy as np
import pytest

from orchestrator.acceptance import BY_LAW, accept
from outrider.law.audit import audit
from outrider.law.noise import Purpose, RoundNoise
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array, SparseLaw

VOCAB, WANTED, TOP = 1_000, 7, 32
ROUNDS = 100


def shaped(noise: RoundNoise) -> tuple[Int32Array, SparseLaw]:
    """The law that gives the wanted token as little as it can and still says that it was drawn: the rest lies on the
    tokens whose noise is worst."""
    ids = np.arange(VOCAB, dtype=np.int32)
    score = noise.exponentials(Purpose.PROPOSE, noise.base_length, ids)
    worst = np.array([token for token in np.argsort(-score) if token != WANTED][: TOP - 1], np.int32)
    odds = 1.02 * score[WANTED] / score[worst].sum()
    wanted = odds / (1 + odds)
    probs = np.append(score[worst] / score[worst].sum() * (1 - wanted), wanted).astype(np.float32)
    law = SparseLaw(np.array([TOP], np.int32), np.append(worst, np.int32(WANTED)), probs)
    return np.array([WANTED], np.int32), law


def forced(rule: int, chance: float) -> int:
    """In how many rounds the wanted token, which the target gives such a chance, was the output's next."""
    target = np.zeros(VOCAB)
    target[VOCAB // 2 :] = (1 - chance) / (VOCAB // 2)
    target[WANTED] = chance
    count = 0
    for seed in range(ROUNDS):
        noise = RoundNoise(seed, 40)
        tokens, law = shaped(noise)
        assert audit(tokens, law, noise, VOCAB) is None
        outside = next(token for token in range(VOCAB // 2, VOCAB) if token not in law.token_ids)
        tails = np.array([1 - target[law.token_ids].sum(), 1.0])
        rows = SupportRows(target[law.token_ids].astype(np.float32), tails, np.array([outside] * 2, np.int32))
        outcome = accept(rule, tokens, law, rows, noise)
        count += outcome.accepted == 1 or outcome.token == WANTED
    return count


@pytest.mark.parametrize("rule", BY_LAW)
def test_a_shaped_law_forces_a_token_that_the_target_finds_possible(rule: int) -> None:
    assert forced(rule, 0.05) >= 0.9 * ROUNDS, "honestly it would be one round in twenty"


@pytest.mark.parametrize("rule", BY_LAW)
def test_no_law_forces_a_token_that_the_target_finds_impossible(rule: int) -> None:
    assert forced(rule, 0.0) == 0
