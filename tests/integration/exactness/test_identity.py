"""Layer 3 of exactness: what must be so to the last token, whatever the models say.

A draft that is its target is accepted whole; one that is always wrong gives one token a round; and neither changes what
is said.
"""

import itertools

import pytest

from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    PLAIN_REASON_DRAFT_ERROR,
    PLAIN_REASON_LAST_TOKEN,
    PLAIN_REASON_PREFILL,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
)
from tests.harness.engines import ScriptedEngine
from tests.harness.orchestrator import Generation, ask
from tests.harness.system import RunningSystem, start_system, synthetic
from tests.harness.wrappers import always_wrong

LOOKAHEADS = range(1, 9)
PROMPTS = [(0, 1, 2), (5,), (3, 3, 3, 3), tuple(range(16)), (15, 0) * 20]
TOKENS = 24
GREEDY = {"temperature": 0.0}


async def plain(system: RunningSystem, tokens: int = TOKENS) -> list[list[int]]:
    """What the target says greedily to each prompt without speculation."""
    requests = (ask(prompt, max_tokens=tokens, lookahead=0, **GREEDY) for prompt in PROMPTS)
    generations = await system.generate_all(requests)
    assert all(one.drafted == 0 for one in generations)
    return [one.ids for one in generations]


def assert_every_round_has_its_block(generation: Generation) -> None:
    """No round but the first, and one that has room for a single token, went without."""
    first, *rounds = generation.rounds
    assert first.plain_reason == PLAIN_REASON_PREFILL
    assert all(one.drafted or one.plain_reason == PLAIN_REASON_LAST_TOKEN for one in rounds)


@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1.0}, {"temperature": 0.7, "frequency_penalty": 0.5}])
async def test_c2_f4_the_targets_own_draft_is_accepted_whole(sampling: dict[str, float]) -> None:
    """Every lookahead at every concurrency; sampling goes by `ratio`, with a draft law that nothing was cut from."""
    async with start_system(synthetic(), synthetic()) as system:
        expected = await plain(system) if sampling == GREEDY else None
        rule = ACCEPTANCE_GREEDY if sampling == GREEDY else ACCEPTANCE_RATIO
        for concurrency in (1, 4, 16, 64):
            shapes = [(index, LOOKAHEADS[index % 8]) for index in range(max(8, concurrency))]
            requests = [
                ask(
                    PROMPTS[index % len(PROMPTS)],
                    max_tokens=TOKENS,
                    lookahead=lookahead,
                    seed=index,
                    acceptance=rule,
                    **sampling,
                )
                for index, lookahead in shapes
            ]
            for (index, lookahead), one in zip(shapes, await system.generate_all(requests, concurrency), strict=True):
                assert one.accepted == one.drafted > 0, (concurrency, lookahead)
                assert_every_round_has_its_block(one)
                assert len(one.rounds) == 1 + -(-(TOKENS - 1) // (lookahead + 1))
                assert expected is None or one.ids == expected[index % len(PROMPTS)]


async def test_a12_a13_a_draft_that_is_always_wrong_gives_one_token_a_round() -> None:
    async with start_system(synthetic(), always_wrong(synthetic())) as system:
        expected = await plain(system)
        for lookahead in (1, 3, 8):
            requests = (ask(prompt, max_tokens=TOKENS, lookahead=lookahead, **GREEDY) for prompt in PROMPTS)
            for one, ids in zip(await system.generate_all(requests), expected, strict=True):
                assert one.ids == ids
                assert one.accepted == 0
                assert len(one.rounds) == TOKENS
                assert_every_round_has_its_block(one)
                assert {token.origin for token in one.tokens[1:-1]} == {TOKEN_ORIGIN_RECOVERED}


@pytest.mark.parametrize("lookahead", [1, 8])
async def test_a12_a_first_draft_token_that_is_wrong_is_not_committed(lookahead: int) -> None:
    """Only the first: those after it are what the target would say next, and must fall with it."""
    vocab_size = 16

    def target(prefix: tuple[int, ...]) -> list[float]:
        """Says the last token plus three."""
        return [5.0 if token == (prefix[-1] + 3) % vocab_size else 0.0 for token in range(vocab_size)]

    def draft(prefix: tuple[int, ...]) -> list[float]:
        """After committed tokens, which step by three, it steps by one; after that it is the target."""
        committed = len(prefix) < 2 or (prefix[-1] - prefix[-2]) % vocab_size == 3
        wanted = (prefix[-1] + (1 if committed else 3)) % vocab_size
        return [5.0 if token == wanted else 0.0 for token in range(vocab_size)]

    async with start_system(ScriptedEngine(target), ScriptedEngine(draft)) as system:
        one = await system.generate(ask((2, 5), max_tokens=30, lookahead=lookahead, **GREEDY))
        assert one.ids == [(5 + 3 * step) % vocab_size for step in range(1, 31)]
        assert one.accepted == 0


async def test_a13_every_token_of_a_block_and_the_bonus_are_committed() -> None:
    """100 tokens at lookahead 4: the first with the prompt, then 19 rounds of 5, then the last 4."""
    async with start_system(synthetic(), synthetic()) as system:
        one = await system.generate(ask(max_tokens=100, lookahead=4, **GREEDY))
        assert [each.accepted for each in one.rounds] == [0] + [4] * 19 + [3]
        bases = [each.base_length for each in one.rounds]
        assert [after - before for before, after in itertools.pairwise(bases)] == [1] + [5] * 19
        origins = [token.origin for token in one.tokens]
        assert origins[0] == TOKEN_ORIGIN_PLAIN
        assert origins[5::5] == [TOKEN_ORIGIN_BONUS] * 19
        assert sum(each.target_passes for each in one.rounds[1:]) == 20


@pytest.mark.parametrize("noise", [0.0, 1.0, 100.0])
async def test_a21_a_greedy_output_does_not_change_with_speculation(noise: float) -> None:
    """A draft that is the target, one that resembles it and one that does not, at every lookahead, all at once."""
    async with start_system(synthetic(), synthetic(noise=noise)) as system:
        expected = await plain(system)
        cases = [
            (prompt, ids, lookahead) for prompt, ids in zip(PROMPTS, expected, strict=True) for lookahead in LOOKAHEADS
        ]
        requests = (ask(prompt, max_tokens=TOKENS, lookahead=lookahead, **GREEDY) for prompt, _, lookahead in cases)
        generations = await system.generate_all(requests)
        assert [one.ids for one in generations] == [ids for _, ids, _ in cases]
        accepted = sum(one.accepted for one in generations) / sum(one.drafted for one in generations)
        assert {0.0: accepted == 1.0, 1.0: 0.2 < accepted < 0.95, 100.0: accepted < 0.3}[noise], accepted


@pytest.mark.parametrize("proposer", ["prompt_lookup", "suffix"])
async def test_a21_what_is_copied_changes_nothing_either(proposer: str) -> None:
    async with start_system(synthetic(), synthetic(), proposers=proposer) as system:
        expected = await plain(system, 60)
        requests = (ask(prompt, max_tokens=60, lookahead=5, **GREEDY) for prompt in PROMPTS)
        generations = await system.generate_all(requests)
        assert [one.ids for one in generations] == expected
        # The worker holds what it proposed: it never has to be told again.
        reasons = {each.plain_reason for one in generations for each in one.rounds}
        assert PLAIN_REASON_DRAFT_ERROR not in reasons
        # Greedy text over 16 tokens soon repeats itself.
        assert sum(one.accepted for one in generations) > 20
