"""Trees at the target: every row is that of its path alone, in every format, and the accepted path stays cached."""

from typing import Any

import numpy as np
import pytest

from outrider.law.answer import Question, answer
from outrider.law.language import Language
from outrider.law.noise import RoundNoise
from outrider.law.params import LawParams
from outrider.law.rows import SupportRows
from outrider.law.tree import Tree
from outrider.lm.engine import Engine, Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import sample_from_message, support_from_message, to_bytes
from outrider.v1 import target_pb2
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_SAMPLE, ROW_FORMAT_SUPPORT
from tests.harness.engines_lm import served_tiny_engine
from tests.harness.workers import error_of, int32, reason, rows_of, start_target
from tests.integration.test_target_rows import LAW, SEED, compact_item

SPEC = SyntheticSpec(vocab_size=13, padded_vocab_size=16, order=3, context_length=256)
FORMATS = [ROW_FORMAT_LOGITS, ROW_FORMAT_SUPPORT, ROW_FORMAT_SAMPLE]
VOCAB = 13


def random_block(seed: int, count: int = 9) -> tuple[list[int], Tree, list[list[int]]]:
    """(tokens, shape, support of each row but the last)."""
    rng = np.random.default_rng(seed)
    while True:
        shape = Tree.of(np.sort([rng.integers(0, token + 1) for token in range(count)]).astype(np.int32))
        if shape is not None:
            break
    tokens: list[int] = []
    support: list[list[int]] = []
    for row in range(count):
        children = len(shape.children(row))
        ids = rng.permutation(VOCAB)[: children + 2].tolist() if children else []
        support.append(ids)
        tokens += ids[:children]
    return tokens, shape, support


def tree_item(session: str, committed: list[int], block: Any, row_format: Any, **options: Any) -> target_pb2.VerifyItem:
    tokens, shape, support = block
    given = {"support": support} if row_format == ROW_FORMAT_SUPPORT else {}
    item = compact_item(session, committed, tokens, row_format, **given, **options)
    item.draft_parents = to_bytes(shape.parents)
    return item


def of_path(engine: Engine, committed: list[int], block: Any, row: int, row_format: Any, law: LawParams) -> Any:
    """What a chain along the row's path says there: logits, (probs, tail mass, tail token), or a token."""
    tokens, shape, support = block
    path = shape.path(row)
    rows = [0, *(token + 1 for token in path)]
    # One token more, so that the last row may have a support too.
    whole = int32([*committed, *(tokens[token] for token in path), 0])
    (logits,) = engine.forward([Segment(engine.open(whole), whole, len(rows) + 1)])
    if row_format == ROW_FORMAT_LOGITS:
        return logits[-2].tolist()
    ids = [support[it] if it < len(support) else [] for it in rows]
    wanted = (int32([len(it) for it in ids]), int32([it for row in ids for it in row]))
    question = Question(
        law, RoundNoise(SEED, len(committed)), whole, wanted if row_format == ROW_FORMAT_SUPPORT else None
    )
    (made,) = answer([(logits, question)], engine.info.vocab_size)
    if isinstance(made, SupportRows):
        entries = len(ids[-1])
        probs = made.probs[len(made.probs) - entries :].tolist()
        return probs, float(made.tail_masses[-2]), int(made.tail_tokens[-2])
    return int(made[-2])


def said(result: target_pb2.VerifyResult, block: Any, row: int, row_format: Any, vocab_size: int) -> Any:
    tokens, _, support = block
    count = len(tokens)
    if row_format == ROW_FORMAT_LOGITS:
        return rows_of(result, count + 1)[row].tolist()
    if row_format == ROW_FORMAT_SAMPLE:
        return int(sample_from_message(result.sample, count, vocab_size)[row])
    rows = support_from_message(result.support, sum(map(len, support)), count, vocab_size)
    sizes = [len(it) for it in support] + [0]
    start = sum(sizes[:row])
    return rows.probs[start : start + sizes[row]].tolist(), float(rows.tail_masses[row]), int(rows.tail_tokens[row])


LAWS = {
    "penalties": LAW,
    "greedy": LawParams(temperature=0.0, frequency_penalty=1.5, prompt_length=2),
    "plain": LawParams(),
}


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("token_budget", [4096, 4])
async def test_every_row_is_that_of_its_path(row_format: Any, law: str, token_budget: int) -> None:
    """Many sessions with different trees in a pass, and cut into several by a small budget; penalties see the path."""
    async with start_target(SyntheticEngine(SPEC), token_budget=token_budget) as target:
        sessions = {f"{index}": ([1, 2, 3 + index, *range(index)], random_block(index)) for index in range(5)}
        items = [tree_item(name, *it, row_format, law=LAWS[law]) for name, it in sessions.items()]
        results = await target.verify(*items)
        for result, (committed, block) in zip(results, sessions.values(), strict=True):
            assert result.status.code == 0, result.status
            for row in range(len(block[0]) + 1):
                expected = of_path(SyntheticEngine(SPEC), committed, block, row, row_format, LAWS[law])
                assert said(result, block, row, row_format, VOCAB) == expected


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
async def test_an_accepted_path_is_not_computed_again(architecture: str) -> None:
    """Over a real model: round after round a path of the last tree is committed, and only what is new is computed."""
    engine = served_tiny_engine(architecture)
    async with start_target(engine) as target:
        committed, new = [1, 2, 3, 4, 5], 5
        for seed in range(6):
            block = random_block(seed)
            tokens, shape, _ = block
            law = None if seed else LAW
            item = tree_item("s", committed, block, ROW_FORMAT_SAMPLE, law=law, new=new)
            (result,) = await target.verify(item)
            assert result.status.code == 0, result.status
            # Of what was committed since the last tree only the token drawn at its end.
            assert result.timing.computed_tokens == (5 if seed == 0 else 1) + len(tokens)
            for row in range(len(tokens) + 1):
                alone = of_path(served_tiny_engine(architecture), committed, block, row, ROW_FORMAT_SAMPLE, LAW)
                assert said(result, block, row, ROW_FORMAT_SAMPLE, engine.info.vocab_size) == alone
            path = [tokens[token] for token in shape.path(shape.leaves()[seed % len(shape.leaves())])]
            committed, new = [*committed, *path, 7], len(path) + 1


async def test_a_chain_may_follow_a_tree_and_a_tree_a_chain() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        block = random_block(3)
        tokens, shape, _ = block
        await target.verify(tree_item("s", [1, 2, 3], block, ROW_FORMAT_SAMPLE))
        path = [tokens[token] for token in shape.path(len(tokens))]
        committed = [1, 2, 3, *path, 9]
        chain = compact_item("s", committed, [4, 5], ROW_FORMAT_SAMPLE, law=None, new=len(path) + 1)
        (result,) = await target.verify(chain)
        assert result.timing.computed_tokens == 3
        again = tree_item("s", [*committed, 4, 5, 6], block, ROW_FORMAT_SAMPLE, law=None, new=1)
        (result,) = await target.verify(again)
        assert result.timing.computed_tokens == 1 + len(tokens)
        for row in range(len(tokens) + 1):
            alone = of_path(SyntheticEngine(SPEC), [*committed, 4, 5, 6], block, row, ROW_FORMAT_SAMPLE, LAW)
            assert said(result, block, row, ROW_FORMAT_SAMPLE, VOCAB) == alone


async def test_a_message_that_builds_on_tokens_of_a_tree_is_told_to_bring_them() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        block = random_block(3)
        await target.verify(tree_item("s", [1, 2, 3], block, ROW_FORMAT_SAMPLE))
        for committed, new in (([1, 2, 3, block[0][0], 8], 1), ([1, 2, 3, 9, 9, 9], 2)):
            (result,) = await target.verify(compact_item("s", committed, [], ROW_FORMAT_SAMPLE, law=None, new=new))
            assert error_of(result).reason == reason("SESSION_NOT_FOUND")
        (result,) = await target.verify(compact_item("s", [1, 2, 3, 9], [], ROW_FORMAT_SAMPLE, law=None, new=1))
        assert result.status.code == 0


async def test_each_branch_stands_where_it_leads_in_the_grammar() -> None:
    """Letters: what a row allows is what it allows when its path is a block by itself."""
    spec = SyntheticSpec(vocab_size=27, order=2, eos=26)
    law = LawParams(grammar=Language("regex", "(abc*|b(a|c)+)d"), prompt_length=2, stop_token_ids=(26,))
    tokens, shape = [0, 1, 1, 3, 0, 2, 2, 2, 3], Tree.of(int32([0, 0, 1, 1, 2, 2, 3, 5, 8]))
    assert shape is not None
    async with start_target(SyntheticEngine(spec)) as target:
        item = compact_item("s", [9, 9], tokens, ROW_FORMAT_SAMPLE, law=law)
        item.draft_parents = to_bytes(shape.parents)
        rows = sample_from_message((await target.verify(item))[0].sample, 9, 27)
        seen = set()
        for row in range(10):
            path = [tokens[token] for token in shape.path(row)]
            (alone,) = await target.verify(compact_item(f"{row}", [9, 9], path, ROW_FORMAT_SAMPLE, law=law))
            assert rows[row] == sample_from_message(alone.sample, len(path), 27)[-1]
            seen.add(int(rows[row]))
        assert len(seen) > 3


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (b"\1\0", "not a multiple of 4"),
        (to_bytes(int32([0])), "1 rows for 2 draft tokens"),
        (to_bytes(int32([0, 2])), "follows a row before it"),
        (to_bytes(int32([0, -1])), "follows a row before it"),
    ],
)
async def test_what_is_no_tree_is_refused_and_its_neighbours_are_not(parents: bytes, message: str) -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        bad = compact_item("bad", [1, 2, 3], [4, 5], ROW_FORMAT_SAMPLE)
        bad.draft_parents = parents
        refused, good = await target.verify(bad, compact_item("good", [1, 2, 3], [4, 5], ROW_FORMAT_SAMPLE))
        assert error_of(refused).reason == reason("INVALID_FIELD")
        assert message in error_of(refused).message
        assert good.status.code == 0


async def test_the_context_holds_the_longest_path_and_not_all_paths() -> None:
    async with start_target(SyntheticEngine(SPEC)) as target:
        committed = [1 + index % 12 for index in range(254)]
        item = compact_item("s", committed, [4, 5, 6, 7], ROW_FORMAT_SAMPLE)
        item.draft_parents = to_bytes(int32([0, 0, 0, 1]))
        assert (await target.verify(item))[0].status.code == 0
        item.draft_parents = to_bytes(int32([0, 0, 1, 3]))
        assert error_of((await target.verify(item))[0]).reason == reason("CONTEXT_EXCEEDED")


async def test_the_worker_says_how_large_a_tree_may_be() -> None:
    async with start_target(SyntheticEngine(SPEC), max_lookahead=7) as target:
        info = await target.info()
        assert info.max_tree_nodes == 7
        item = tree_item("s", [1, 2, 3], random_block(1), ROW_FORMAT_SAMPLE)
        assert "limit 7" in error_of((await target.verify(item))[0]).message
