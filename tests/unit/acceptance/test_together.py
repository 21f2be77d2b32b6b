"""Blocks that are judged in one call say what they say alone, to the last bit, and so does the audit."""

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.acceptance import Block, Outcome, accept, accept_each
from outrider.law.audit import Claim, audit, audit_each
from outrider.v1.orchestrator_pb2 import Acceptance
from tests.harness.blocks import VOCAB, random_block

RULES = pytest.mark.parametrize("rule", [Acceptance.ACCEPTANCE_RATIO, Acceptance.ACCEPTANCE_BLOCK])


def broken(block: Block, rng: np.random.Generator) -> Block:
    """One that is refused."""
    law, rows, lookahead = block.law, block.rows, len(block.tokens)
    bad = [np.nan, -1.0, np.inf][rng.integers(3)]
    masses = np.where(np.arange(lookahead + 1) == rng.integers(lookahead + 1), bad, rows.tail_masses)
    changes = [
        replace(block, rows=replace(rows, tail_masses=masses)),
        replace(block, rows=replace(rows, tail_masses=rows.tail_masses[:-1])),
        replace(block, rows=replace(rows, tail_tokens=np.append(rows.tail_tokens, np.int32(1)))),
        replace(block, rows=replace(rows, probs=np.append(rows.probs, np.float32(0.5)))),
        replace(block, rows=replace(rows, probs=0 * rows.probs, tail_masses=0 * rows.tail_masses)),
        replace(block, tokens=np.append(block.tokens, np.int32(3))),
        replace(block, law=replace(law, probs=np.append(law.probs, np.float32(0.1)))),
    ]
    if lookahead:
        changes += [
            replace(block, tokens=np.full(lookahead, VOCAB + 7, np.int32)),
            replace(block, law=replace(law, sizes=law.sizes * 0)),
            replace(block, law=replace(law, sizes=law.sizes + np.int32(2**31 - 1000))),
            replace(block, law=replace(law, probs=law.probs * bad)),
            replace(block, law=replace(law, token_ids=law.token_ids * 0 + block.tokens[0])),
        ]
    return changes[rng.integers(len(changes))]


def alone(rule, block: Block) -> Outcome | str:
    try:
        return accept(rule, block.tokens, block.law, block.rows, block.noise)
    except ValueError as error:
        return str(error)


def together(rule, blocks: list[Block]) -> list[Outcome | str]:
    return [str(each) if isinstance(each, ValueError) else each for each in accept_each(rule, blocks)]


@RULES
def test_blocks_are_judged_as_if_alone(rule):
    rng = np.random.default_rng(1)
    blocks = [random_block(rng) for _ in range(200)]
    expected = [alone(rule, block) for block in blocks]
    assert {type(each) for each in expected} == {Outcome}
    assert len({(each.accepted, each.origin) for each in expected}) > 15
    assert together(rule, blocks) == expected
    for _ in range(20):
        some = rng.permutation(200)[: rng.integers(1, 30)].tolist()
        assert together(rule, [blocks[index] for index in some]) == [expected[index] for index in some]
    assert together(rule, []) == []


@RULES
def test_a_round_without_a_block_has_a_short_way_to_the_same_outcome(rule):
    rng = np.random.default_rng(4)
    blocks = [block for block in (random_block(rng) for _ in range(400)) if not len(block.tokens)]
    blocks += [broken(block, rng) for block in blocks]
    expected = together(rule, blocks)
    assert {type(each) for each in expected} == {Outcome, str}
    assert [alone(rule, block) for block in blocks] == expected


@RULES
def test_a_block_that_is_refused_harms_no_neighbour(rule):
    rng = np.random.default_rng(2)
    refusals = set()
    for _ in range(30):
        blocks = [random_block(rng) for _ in range(12)]
        for index in rng.permutation(12)[: rng.integers(1, 7)]:
            blocks[index] = broken(blocks[index], rng)
        expected = [alone(rule, block) for block in blocks]
        assert together(rule, blocks) == expected
        refusals |= {each.split()[0] for each in expected if isinstance(each, str)}
    assert len(refusals) >= 4


def claim(block: Block) -> Claim:
    return Claim(block.tokens, block.law, block.noise, VOCAB)


def lie(honest: Claim, rng: np.random.Generator) -> Claim:
    """One that the audit finds out, except where a block of no tokens has nothing to lie about."""
    law, tokens, at = honest.law, honest.tokens.copy(), rng.integers(max(1, len(honest.law.token_ids)))
    ids, probs = law.token_ids.copy(), law.probs.copy()
    if len(tokens):
        tokens[rng.integers(len(tokens))] += rng.integers(1, VOCAB)
        ids[at] = rng.choice([-1, VOCAB, 2**31 - 1, ids[at - 1]])
        probs[at] = rng.choice([np.nan, -1.0, 0.0, np.inf, probs[at] + 0.1])
    changes = [
        replace(honest, tokens=tokens),
        replace(honest, vocab_size=VOCAB - 1),
        replace(honest, law=replace(law, token_ids=ids)),
        replace(honest, law=replace(law, probs=probs)),
        replace(honest, law=replace(law, token_ids=ids, probs=probs)),
        replace(honest, law=replace(law, sizes=law.sizes[:-1])),
        replace(honest, law=replace(law, sizes=law.sizes + np.int32(2**31 - 1000))),
        replace(honest, law=replace(law, probs=law.probs[:-1])),
        replace(honest, noise=replace(honest.noise, base_length=7)),
    ]
    return changes[rng.integers(len(changes))]


def test_blocks_are_audited_as_if_alone_whatever_lies_beside_them():
    rng = np.random.default_rng(3)
    faults = set()
    for _ in range(40):
        claims = [claim(random_block(rng)) for _ in range(20)]
        # float32 rows of 300 numbers that had something added do not all sum to 1 closely enough.
        assert audit_each(claims) == [audit(*vars(each).values()) for each in claims]
        for index in rng.permutation(20)[: rng.integers(1, 9)]:
            claims[index] = lie(claims[index], rng)
        expected = [audit(*vars(each).values()) for each in claims]
        assert audit_each(claims) == expected
        faults |= {tuple(each.split()[:3]) for each in expected if each is not None}
        assert None in expected
    assert len(faults) >= 8
    assert audit_each([]) == []
