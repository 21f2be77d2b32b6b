"""Layer 2 of exactness: chi-square through a draft-accept loop, and mutants that must fail it.

A session says three tokens of a four-token Markov chain in rounds of lookahead 2, so that accepted, recovered and bonus
tokens stand at every position; the 64 outcomes are enumerated. The noise of thousands of sessions is computed in one
call of `philox`, which is what RoundNoise would have said (checked below). Seeds are fixed: nothing here is a gamble.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from orchestrator.acceptance import Outcome, ratio
from outrider.law.draft import propose, truncate
from outrider.law.noise import Purpose, RoundNoise, exponential_of, philox, uniform_of
from outrider.law.params import LawParams
from outrider.law.sparse import SparseLaw
from outrider.law.transforms import RowContext, law_probs
from tests.harness.exactness import Block, output_law
from tests.harness.mutants import RULE_MUTANTS, module

VOCAB, LENGTH, LOOKAHEAD, START = 4, 3, 2, 0
BASES, POSITIONS = np.arange(1, 1 + LENGTH), np.arange(1, 1 + LENGTH + LOOKAHEAD)
TAIL_TOKEN = 0xFFFFFFFF
ALPHA = 1e-4  # of the test; a right rule fails it in one of 10 000 choices of seeds
RIGHT = 1e-3  # what the right rule is held to


@dataclass(frozen=True)
class Chain:
    target: np.ndarray  # [state, vocab] float32
    draft: list  # [state] of (token_ids, probs): what is shipped
    drawn: list  # [state] of (token_ids, probs): what is drawn from


def make_chain():
    rng = np.random.default_rng(11)
    target = rng.dirichlet(np.full(VOCAB, 4.0), VOCAB).astype(np.float32)
    draft = torch.from_numpy(rng.dirichlet(np.full(VOCAB, 4.0), VOCAB).astype(np.float32))
    rows = truncate(draft, 3)
    return Chain(target, rows, rows)


@dataclass(frozen=True)
class Tables:
    """What RoundNoise says to many sessions: [session, base, position(, token or word)]."""

    accept: np.ndarray
    propose: np.ndarray
    resample: np.ndarray
    tail: np.ndarray


def make_tables(sessions, first_seed=0):
    seeds = np.arange(first_seed, first_seed + sessions)[:, None, None, None]
    bases, positions, tokens = BASES[:, None, None], POSITIONS[:, None], np.arange(VOCAB)

    def words(purpose, token):
        return philox((np.asarray(token), positions, bases, np.array([int(purpose)])), (seeds, np.zeros_like(seeds)))

    accept = uniform_of(*words(Purpose.ACCEPT, 0)[:2])[..., 0]
    tail = words(Purpose.RESAMPLE, TAIL_TOKEN)
    return Tables(
        accept,
        exponential_of(*words(Purpose.PROPOSE, tokens)[:2]),
        exponential_of(*words(Purpose.RESAMPLE, tokens)[:2]),
        np.concatenate([exponential_of(*tail[:2]), uniform_of(*tail[2:])], axis=-1),
    )


@dataclass(frozen=True)
class TableNoise:
    tables: Tables
    session: int
    base_length: int

    def _at(self, table, position):
        return table[self.session, self.base_length - 1, position - 1]

    def uniform(self, purpose, position):
        return self._at(self.tables.accept, position)

    def exponentials(self, purpose, position, token_ids):
        table = self.tables.propose if purpose is Purpose.PROPOSE else self.tables.resample
        return self._at(table, position)[token_ids]

    def tail(self, purpose, position):
        return tuple(self._at(self.tables.tail, position))


def speak(chain, rule, noise_at, length=LENGTH, lookahead=LOOKAHEAD):
    """One session: rounds of draft, accept, commit, until `length` tokens are said."""
    said = [START]
    while len(said) <= length:
        noise, block, rows = noise_at(len(said)), [], []
        for index in range(lookahead):
            state = block[-1] if block else said[-1]
            block.append(propose(*chain.drawn[state], noise, noise.base_length + index))
            rows.append(chain.draft[state])
        states = [said[-1], *block]
        outcome = rule(np.array(block, np.int32), SparseLaw.concatenate(rows), chain.target[states], noise)
        said += [*block[: outcome.accepted], outcome.token]
    return said[1 : length + 1]


def runner_and_tail_chain():
    """After a rejection of token 0, token 1 races against a tail of two tokens."""
    target = np.array([[0.15, 0.45, 0.2, 0.2]] * VOCAB, dtype=np.float32)
    rows = [(np.array([0, 1], np.int32), np.array([0.7, 0.3], np.float32))] * VOCAB
    return Chain(target, rows, rows)


def p_value(chain, rule, tables):
    seen = np.zeros((VOCAB,) * LENGTH)
    for session in range(len(tables.accept)):
        seen[tuple(speak(chain, rule, lambda base, session=session: TableNoise(tables, session, base)))] += 1
    law = chain.target.astype(np.float64)
    law /= law.sum(axis=1, keepdims=True)
    joint = law[START][:, None, None] * law[:, :, None] * law[None, :, :]
    return stats.chisquare(seen.ravel(), joint.ravel() * seen.sum()).pvalue


def sessions_for(effect):
    """Sessions at which an effect, the chi-square divergence of what is said from the target, is seen with power 0.999.

    The effect of the first token alone is a lower bound of that of all three.
    """
    degrees = VOCAB**LENGTH - 1
    critical = stats.chi2.isf(ALPHA, degrees)
    noncentrality = optimize.brentq(lambda size: stats.ncx2.sf(critical, degrees, size) - 0.999, 1, 1000)
    return max(1500, int(np.ceil(noncentrality / effect)))


def first_token_effect(chain, rule):
    (ids, probs), target = chain.drawn[START], chain.target[START].astype(np.float64)
    drawn = np.zeros((1, VOCAB))
    drawn[0, ids] = probs / probs.sum(dtype=np.float64)
    block = Block(drawn, lambda tokens: SparseLaw.concatenate([chain.draft[START]]), chain.target[[START, START]])
    return float((((output_law(rule, block)[0] - target) ** 2) / target).sum())


CHAIN, TAIL_CHAIN = make_chain(), runner_and_tail_chain()


def test_the_tables_hold_what_round_noise_says():
    tables, tokens = make_tables(5, first_seed=123), np.arange(VOCAB, dtype=np.int32)
    for session in range(5):
        for base in BASES:
            noise, table = RoundNoise(123 + session, int(base)), TableNoise(tables, session, int(base))
            for position in POSITIONS.tolist():
                assert table.uniform(Purpose.ACCEPT, position) == noise.uniform(Purpose.ACCEPT, position)
                for purpose in (Purpose.PROPOSE, Purpose.RESAMPLE):
                    theirs = noise.exponentials(purpose, position, tokens)
                    assert table.exponentials(purpose, position, tokens).tolist() == theirs.tolist()
                assert table.tail(Purpose.RESAMPLE, position) == pytest.approx(
                    noise.tail(Purpose.RESAMPLE, position), rel=1e-15
                )


@pytest.mark.parametrize("chain", [CHAIN, TAIL_CHAIN])
def test_the_right_rule_says_what_the_target_would(chain):
    assert p_value(chain, ratio, make_tables(20_000)) > RIGHT


def test_a4_a_draft_that_says_its_argmax_says_what_the_target_would():
    logits = torch.tensor([[2, 1.5, 1, 0.5]])
    target = logits.softmax(dim=1).numpy().repeat(VOCAB, axis=0)
    rows = truncate(logits.softmax(dim=1), 1) * VOCAB
    assert p_value(Chain(target, rows, rows), ratio, make_tables(20_000)) > RIGHT


@pytest.mark.parametrize("mutant", RULE_MUTANTS)
def test_a_mutant_of_the_rule_fails(mutant, monkeypatch):
    monkeypatch.setattr(module, *RULE_MUTANTS[mutant])
    sessions = sessions_for(first_token_effect(TAIL_CHAIN, ratio))
    assert sessions < 20_000, "the laws are too close to tell"
    assert p_value(TAIL_CHAIN, ratio, make_tables(sessions)) < ALPHA


def test_a_draft_temperature_lied_about_fails():
    hotter = [(ids, ((law := probs**0.5) / law.sum()).astype(np.float32)) for ids, probs in CHAIN.draft]
    liar = replace(CHAIN, drawn=hotter)
    sessions = sessions_for(first_token_effect(liar, ratio))
    assert sessions < 20_000
    assert p_value(liar, ratio, make_tables(sessions)) < ALPHA


# Mutants that no law of a single token shows: the noise is at fault, or a token is lost.


def one_uniform_a_round(tables):
    """The same ACCEPT uniform for both draft tokens of a round."""
    accept = tables.accept.copy()
    for base in range(LENGTH):
        accept[:, base] = accept[:, base, base : base + 1]
    return replace(tables, accept=accept)


def resample_with_the_drafts_noise(tables):
    return replace(tables, resample=tables.propose)


def accept_with_the_drafts_noise(tables):
    return replace(tables, accept=1 - np.exp(-tables.propose[..., 0]))


def one_draw_for_runner_and_tail(tables):
    """The tail's inverse distribution function is fed with the exponential that made the tail win."""
    return replace(tables, tail=np.stack([tables.tail[..., 0], np.exp(-tables.tail[..., 0])], axis=-1))


def propose_without_position(tables):
    return replace(tables, propose=np.broadcast_to(tables.propose[:, :, :1], tables.propose.shape))


def draft_says_its_argmax_beside_its_law(tables):
    return replace(tables, propose=np.ones_like(tables.propose))


def seed_ignored(tables):
    return replace(tables, accept=np.broadcast_to(tables.accept[:1], tables.accept.shape))


@pytest.mark.parametrize(
    ("mutated", "chain", "sessions"),
    [
        (one_uniform_a_round, CHAIN, 4000),
        (resample_with_the_drafts_noise, CHAIN, 18_000),
        (accept_with_the_drafts_noise, CHAIN, 4000),
        (one_draw_for_runner_and_tail, TAIL_CHAIN, 4000),
        (propose_without_position, CHAIN, 4000),
        (draft_says_its_argmax_beside_its_law, CHAIN, 4000),
        (seed_ignored, CHAIN, 4000),
    ],
)
def test_noise_that_is_shared_fails(mutated, chain, sessions):
    """Measured over 20 000 other seeds, each has a noncentrality above 130 here; 118 is seen with power 0.999."""
    assert p_value(chain, ratio, mutated(make_tables(sessions))) < ALPHA


def bonus_dropped(tokens, law, target_probs, noise):
    """After a block accepted whole the round ends without a token of its own; the next one begins after the block."""
    outcome = ratio(tokens, law, target_probs, noise)
    if outcome.accepted < len(tokens):
        return outcome
    return Outcome(len(tokens) - 1, int(tokens[-1]), outcome.origin)


def test_a_dropped_bonus_costs_passes_and_not_the_law():
    """Only tokens per round show it: an identity probe, draft equal to target, must say lookahead + 1 a round."""
    rows = truncate(torch.from_numpy(CHAIN.target), VOCAB)
    same = Chain(CHAIN.target, rows, rows)
    tables = make_tables(50)

    def rounds(rule):
        calls = []
        for session in range(50):
            speak(
                same,
                lambda *block: calls.append(1) or rule(*block),
                lambda base, s=session: TableNoise(tables, s, base),
            )
        return len(calls)

    assert rounds(ratio) == 50
    assert rounds(bonus_dropped) > 50


def test_one_long_session_says_what_the_target_would():
    """RoundNoise, law_probs with parameters on both sides, truncation, lookahead 4: every transition of 6000 tokens."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(10, 10, generator=generator) * 1.5
    tokens = np.empty(0, np.int32)
    target = law_probs(logits, [RowContext(LawParams(temperature=0.8, top_p=0.95), tokens)] * 10, 10)
    noisy = logits + torch.randn(10, 10, generator=generator) * 0.7
    rows = truncate(law_probs(noisy, [RowContext(LawParams(temperature=1.3, top_k=9), tokens)] * 10, 10), 6)
    chain = Chain(target.numpy(), rows, rows)
    said = speak(chain, ratio, lambda base: RoundNoise(2026, base), length=6000, lookahead=4)
    seen = np.zeros((10, 10))
    np.add.at(seen, (np.array([START, *said[:-1]]), np.array(said)), 1)
    expected = seen.sum(axis=1, keepdims=True) * chain.target.astype(np.float64)
    assert not seen[expected == 0].any()
    common = expected >= 5
    statistic = ((seen - expected)[common] ** 2 / expected[common]).sum()
    degrees = int((common.sum(axis=1) - 1).clip(0).sum())
    assert stats.chi2.sf(statistic, degrees) > RIGHT
