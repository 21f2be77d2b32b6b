"""Trees from the draft worker: bounded, audited, and from a session that holds one the next is that of a fresh one."""

from typing import Any

import numpy as np
import pytest

from outrider.law.audit import audit
from outrider.law.language import Language
from outrider.law.noise import Purpose, RoundNoise
from outrider.law.params import LawParams
from outrider.law.race import scores
from outrider.law.transforms import RowContext, law_probs
from outrider.lm.engine import Segment
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.v1 import draft_pb2
from tests.harness.engines_lm import served_tiny_engine
from tests.harness.workers import (
    advance_command,
    block_of,
    draft_error,
    int32,
    open_command,
    reason,
    shape_of,
    start_draft,
)
from tests.harness.wrappers import RecordingEngine

SPEC = SyntheticSpec(vocab_size=13, padded_vocab_size=16, order=3, context_length=256)
RICH = LawParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, prompt_length=2)
GREEDY = LawParams(temperature=0.0, frequency_penalty=0.7, prompt_length=2)


def law_of(law: LawParams, prefix: list[int]) -> np.ndarray:
    engine = SyntheticEngine(SPEC)
    tokens = int32(prefix)
    (logits,) = engine.forward([Segment(engine.open(tokens), tokens, 1)])
    return law_probs(logits, [RowContext(law, tokens)], SPEC.vocab_size)[0].numpy()


@pytest.mark.parametrize("law", [LawParams(), RICH])
async def test_a_tree_is_drawn_from_the_laws_that_it_ships(law: LawParams) -> None:
    shapes = set()
    async with start_draft(SyntheticEngine(SPEC)) as draft:
        stream = draft.stream()
        for seed in range(12):
            tokens = [1, 2, 3 + seed % 9]
            event = await stream.ask(open_command(f"{seed}", tokens, 4, law=law, seed=seed, nodes=9))
            drawn, shipped = block_of(event)
            shape = shape_of(event)
            assert audit(int32(drawn), shipped, RoundNoise(seed, 3), 13, shape) is None
            assert len(drawn) == 9
            assert event.block.timing.passes <= 4
            if shape is None:
                continue
            assert shape.depth <= 4
            for row in set(shape.parents.tolist()):
                ids, probs = shipped.row(row)
                path = [drawn[token] for token in shape.path(row)]
                np.testing.assert_allclose(probs, law_of(law, tokens + path)[ids], atol=1e-6)
            shapes.add(shape.parents.tobytes())
    assert len(shapes) > 3


def sessions(law: LawParams, coupled: bool) -> Any:
    def opened(name: str, tokens: list[int], nodes: int) -> draft_pb2.DraftCommand:
        command = open_command(name, tokens, 4, law=law, nodes=nodes)
        command.open.coupled, command.open.omit_law = coupled, coupled or law.greedy
        return command

    return opened


@pytest.mark.parametrize(("law", "coupled"), [(RICH, False), (RICH, True), (GREEDY, False)])
@pytest.mark.parametrize("engine", ["synthetic", "llama"])
async def test_after_any_path_the_next_block_is_that_of_a_fresh_draft(
    law: LawParams, coupled: bool, engine: str
) -> None:
    """Trees and chains in turn; the tokens of an Advance begin where the tree before it did."""

    def make() -> Any:
        return SyntheticEngine(SPEC) if engine == "synthetic" else served_tiny_engine("llama")

    opened, rng = sessions(law, coupled), np.random.default_rng(4)
    async with start_draft(make()) as draft, start_draft(make(), ahead_blocks=0) as fresh:
        stream, other = draft.stream(), fresh.stream()
        committed, new, seen = [1, 2, 3], 3, 0
        for number in range(8):
            nodes = 0 if number in (3, 5) else 10
            if number:
                event = await stream.ask(advance_command("s", committed, 4, new=new, nodes=nodes), committed)
            else:
                event = await stream.ask(opened("s", committed, nodes))
            expected = await other.ask(opened(f"{number}", committed, nodes))
            assert event.block.tokens == expected.block.tokens
            assert event.block.parents == expected.block.parents
            if not coupled and not law.greedy:
                shipped, right = block_of(event)[1], block_of(expected)[1]
                assert shipped.sizes.tolist() == right.sizes.tolist()
                # A cached prefix changes the last bits of a real model's logits.
                np.testing.assert_allclose(np.sort(shipped.probs), np.sort(right.probs), atol=1e-5)
            drawn, shape = int32s_of(event), shape_of(event)
            seen += shape is not None
            row = int(rng.integers(0, len(drawn) + 1))
            path = list(range(row)) if shape is None else list(shape.path(row))
            committed = [*committed, *(drawn[token] for token in path), 5]
            new = len(path) + 1
        assert seen >= 4


def int32s_of(event: draft_pb2.DraftEvent) -> list[int]:
    return np.frombuffer(event.block.tokens, "<i4").tolist()


async def test_what_was_computed_of_an_accepted_path_is_not_computed_again() -> None:
    engine = RecordingEngine(served_tiny_engine("llama"))
    async with start_draft(engine, ahead_blocks=0) as draft:
        stream = draft.stream()
        event = await stream.ask(sessions(GREEDY, False)("s", [1, 2, 3], 12))
        drawn, shape = int32s_of(event), shape_of(event)
        assert shape is not None
        row = int(shape.depths.argmax())
        path = [drawn[token] for token in shape.path(row)]
        del engine.fed[:]
        await stream.ask(advance_command("s", [1, 2, 3, *path, 4], 1, new=len(path) + 1))
        # The end of the path may have been drawn and never fed.
        (fed,) = engine.fed
        assert fed.tokens in ((4,), (path[-1], 4))
        assert fed.start + len(fed.tokens) == 3 + len(path) + 1


async def test_coupled_candidates_are_the_first_winners_of_the_targets_race() -> None:
    async with start_draft(SyntheticEngine(SPEC)) as draft:
        event = await draft.stream().ask(sessions(LawParams(), True)("s", [1, 2, 3], 9))
    drawn, shape = int32s_of(event), shape_of(event)
    assert shape is not None
    for row in set(shape.parents.tolist()):
        path = [drawn[token] for token in shape.path(row)]
        law = law_of(LawParams(), [1, 2, 3, *path])
        noise = RoundNoise(7, 3).exponentials(Purpose.COUPLE, 3 + len(path), np.arange(13, dtype=np.int32))
        children = [drawn[token] for token in shape.children(row)]
        assert children == scores(law, noise).argsort()[: len(children)].tolist()


async def test_a_tree_ends_at_stop_tokens_and_keeps_to_its_grammar() -> None:
    spec = SyntheticSpec(vocab_size=27, order=2, eos=26)
    law = LawParams(grammar=Language("regex", "(ab?|b[ac]+)d*"), prompt_length=2, stop_token_ids=(26,))
    legal = {"": "ab", "a": "bd", "ab": "d", "b": "ac"}
    async with start_draft(SyntheticEngine(spec)) as draft:
        event = await draft.stream().ask(open_command("s", [9, 9], 4, law=law, nodes=16))
    (drawn, _), shape = block_of(event), shape_of(event)
    assert shape is not None
    for token in range(len(drawn)):
        path = [drawn[it] for it in shape.path(token + 1)]
        text = "".join(chr(97 + it) for it in path[:-1])
        assert 26 not in path[:-1]
        following = legal.get(text, "acd" if text.startswith("b") and "d" not in text else "d")
        assert path[-1] == 26 or chr(97 + path[-1]) in following
    assert 26 in drawn


async def test_nothing_is_drafted_ahead_of_a_tree_and_a_chain_goes_on_ahead() -> None:
    async with start_draft(SyntheticEngine(SPEC)) as draft:
        stream = draft.stream()
        await stream.ask(open_command("tree", [1, 2, 3], 3, nodes=8))
        await stream.ask(open_command("chain", [1, 2, 3], 3))
        assert (await stream.push()).session_id == "chain"
        assert (await stream.push()).session_id == "chain"
        # The chain is left for a tree, which has nothing to do with what was ahead.
        event = await stream.ask(advance_command("chain", [1, 2, 3, 4], 3, nodes=8), [1, 2, 3, 4])
        fresh = await stream.ask(open_command("fresh", [1, 2, 3, 4], 3, nodes=8))
        assert (event.block.tokens, event.block.parents) == (fresh.block.tokens, fresh.block.parents)
        assert not [it for it in stream.pushed if it.session_id == "tree"]


async def test_what_is_out_of_range_is_refused_and_proposers_of_one_text_make_chains() -> None:
    async with start_draft(SyntheticEngine(SPEC), proposers="model,prompt_lookup") as draft:
        stream = draft.stream()
        error = draft_error(await stream.ask(open_command("s", [1, 2, 3], 4, nodes=65)))
        assert error.reason == reason("INVALID_FIELD")
        assert "max_nodes is 65, limit 64" in error.message
        repeated = [1, 2, 3, 4, 5, 6, 1, 2, 3]
        lookup = draft_pb2.PROPOSER_PROMPT_LOOKUP
        event = await stream.ask(open_command("copy", repeated, 3, proposer=lookup, nodes=9))
        assert int32s_of(event) == [4, 5, 6]
        assert not event.block.parents


async def test_many_trees_and_chains_share_passes_and_do_not_change_each_other() -> None:
    async with start_draft(SyntheticEngine(SPEC), ahead_blocks=0) as draft:
        stream, alone = draft.stream(), {}
        commands = [open_command(f"{n}", [1, 2, 3 + n], 3, seed=n, nodes=(0, 7, 11)[n % 3]) for n in range(9)]
        for command in commands:
            alone[command.session_id] = (await stream.ask(command)).block
        await stream.send(*commands)
        for _ in commands:
            event = await stream.event()
            expected = alone[event.session_id]
            assert (event.block.tokens, event.block.parents, event.block.law) == (
                expected.tokens,
                expected.parents,
                expected.law,
            )
