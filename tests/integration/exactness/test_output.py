"""What is delivered, and where it ends: rows D of shared/FAILURES.md through the services."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from outrider.lm.tokenizer import load_tokenizer, vocabulary_of
from outrider.v1.orchestrator_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, StopConditions
from tests.harness import tiny_tokenizers
from tests.harness.engines import Script, ScriptedEngine, next_token_script
from tests.harness.models import tiny_config
from tests.harness.orchestrator import Generation, ask
from tests.harness.system import start_system, synthetic
from tests.harness.tiny_tokenizers import MIXED, text_after
from tests.harness.wrappers import ChangedEngine, served_as

GREEDY = {"temperature": 0.0}
# The counters of Usage that count delivered tokens.
BY_ORIGIN = ("accepted_tokens", "recovered_tokens", "bonus_tokens", "plain_tokens")


def assert_counts_what_was_delivered(one: Generation) -> None:
    usage = one.finish.usage
    assert usage.completion_tokens == len(one.tokens)
    assert sum(getattr(usage, name) for name in BY_ORIGIN) == usage.completion_tokens
    assert usage.prompt_tokens == one.started.prompt_tokens
    assert usage.rounds == len(one.rounds)
    assert one.accepted >= usage.accepted_tokens


async def test_d1_nothing_follows_an_end_of_sequence_inside_a_block() -> None:
    """The token that stands at each place of the output in turn is the model's end of sequence."""
    async with start_system(synthetic(), synthetic()) as system:
        free = (await system.generate(ask(max_tokens=14, lookahead=5, **GREEDY))).ids
    for token in {*free[1:13]}:
        async with start_system(synthetic(eos=token), synthetic(eos=token)) as system:
            one = await system.generate(ask(max_tokens=14, lookahead=5, **GREEDY))
            ignoring = StopConditions(ignore_eos=True)
            ignored = await system.generate(ask(max_tokens=14, lookahead=5, stop=ignoring, **GREEDY))
        assert one.ids == free[: free.index(token) + 1]
        assert one.tokens[-1].text == ""
        assert one.finish.reason == FINISH_REASON_STOP
        assert_counts_what_was_delivered(one)
        assert ignored.ids == free


@pytest.mark.parametrize("noise", [0.0, 0.7])
async def test_d1_nothing_follows_a_stop_token_inside_a_block(noise: float) -> None:
    async with start_system(synthetic(), synthetic(noise=noise)) as system:
        free = (await system.generate(ask(max_tokens=14, lookahead=5, **GREEDY))).ids
        for end in range(1, 13):
            stop = StopConditions(token_ids=[free[end], free[0]], min_tokens=2)
            expected = await system.generate(ask(max_tokens=14, lookahead=0, stop=stop, **GREEDY))
            one = await system.generate(ask(max_tokens=14, lookahead=5, stop=stop, **GREEDY))
            assert one.ids == expected.ids
            assert one.finish.reason == expected.finish.reason
            assert not {*one.ids[2:-1]} & {*stop.token_ids}
            assert_counts_what_was_delivered(one)


@pytest.mark.parametrize("noise", [0.0, 0.7])
async def test_d3_d6_exactly_max_tokens_are_delivered_and_counted(noise: float) -> None:
    async with start_system(synthetic(), synthetic(noise=noise)) as system:
        shapes = list(itertools.product(range(1, 21), range(1, 9)))
        requests = (ask(max_tokens=size, lookahead=lookahead, seed=size, **GREEDY) for size, lookahead in shapes)
        for (size, _), one in zip(shapes, await system.generate_all(requests), strict=True):
            assert len(one.ids) == size
            assert one.finish.reason == FINISH_REASON_LENGTH
            assert_counts_what_was_delivered(one)


async def test_d3_the_end_of_the_context_is_a_length() -> None:
    """No limit given: the output ends where the target's context does, blocks or not."""
    async with start_system(synthetic(context_length=40), synthetic(context_length=40)) as system:
        for lookahead in (0, 1, 4, 8):
            request = ask((1, 2, 3), lookahead=lookahead, **GREEDY)
            request.stop.ClearField("max_tokens")
            one = await system.generate(request)
            assert len(one.ids) == 37
            assert one.finish.reason == FINISH_REASON_LENGTH
            assert_counts_what_was_delivered(one)


async def test_d4_d6_a_stop_string_is_found_wherever_blocks_and_rounds_cut_it() -> None:
    """The target says "bcdefghijklmnop"; every string of it is a stop string in turn, at lookahead 8 and at 2."""
    said = "bcdefghijklmno"
    engines = (ScriptedEngine(next_token_script(16)) for _ in range(2))
    async with start_system(*engines) as system:
        cases = [
            (said[start:end], lookahead)
            for start in range(len(said))
            for end in range(start + 1, min(start + 7, len(said) + 1))
            for lookahead in (2, 8)
        ]
        requests = (
            ask((0,), max_tokens=14, lookahead=lookahead, stop=StopConditions(strings=[string]), **GREEDY)
            for string, lookahead in cases
        )
        for (string, _), one in zip(cases, await system.generate_all(requests), strict=True):
            assert one.text == said[: said.index(string)]
            assert (one.finish.reason, one.finish.matched_stop) == (FINISH_REASON_STOP, string)
            assert len(one.ids) == said.index(string) + len(string)
            assert_counts_what_was_delivered(one)


async def test_d4_text_that_only_begins_a_stop_string_is_delivered() -> None:
    engines = (ScriptedEngine(next_token_script(16)) for _ in range(2))
    async with start_system(*engines) as system:
        stop = StopConditions(strings=["efgx", "no!"])
        one = await system.generate(ask((0,), max_tokens=14, lookahead=8, stop=stop, **GREEDY))
        assert one.text == "bcdefghijklmno"
        assert one.finish.reason == FINISH_REASON_LENGTH


def says(text: list[int], after: int, vocab_size: int) -> Script:
    """After a prompt of so many tokens, the text."""

    def script(prefix: tuple[int, ...]) -> list[float]:
        logits = [0.0] * vocab_size
        logits[text[(len(prefix) - after) % len(text)]] = 9.0
        return logits

    return script


@pytest.mark.parametrize(
    "build", [tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback, tiny_tokenizers.gemma_like]
)
async def test_d7_characters_of_many_tokens_stream_whole(
    build: Callable[[], PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    """Hangul, ZWJ emoji, accents, composed and not, cut by blocks of every size."""
    build().save_pretrained(tmp_path)
    tiny_config("llama").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    prompt = tokenizer("The dog").input_ids
    text = tokenizer(MIXED, add_special_tokens=False).input_ids
    vocabulary = vocabulary_of(tokenizer)

    def engine() -> ChangedEngine:
        inner = ScriptedEngine(says(text, len(prompt), vocabulary.size), vocab_size=vocabulary.size)
        return ChangedEngine(inner, info=served_as(inner.info, vocabulary))

    async with start_system(engine(), engine(), tokenizer=str(tmp_path)) as system:
        requests = (ask(prompt, max_tokens=len(text), lookahead=lookahead, **GREEDY) for lookahead in range(9))
        for lookahead, one in enumerate(await system.generate_all(requests)):
            assert one.ids == text
            assert one.text == text_after(tokenizer, prompt, text)
            assert "�" not in one.text
            assert lookahead == 0 or one.accepted == one.drafted > 0
            assert_counts_what_was_delivered(one)


async def test_d6_usage_tells_tokens_by_their_origin() -> None:
    async with start_system(synthetic(), synthetic(noise=0.7)) as system:
        one = await system.generate(ask(max_tokens=60, lookahead=4, temperature=1.0, seed=1))
        usage = one.finish.usage
        assert (usage.accepted_tokens, usage.completion_tokens) == (one.accepted, 60)
        assert usage.plain_tokens == sum(each.drafted == 0 for each in one.rounds)
        assert usage.bonus_tokens == sum(each.drafted == each.accepted > 0 for each in one.rounds)
        assert usage.recovered_tokens == sum(each.accepted < each.drafted for each in one.rounds)
