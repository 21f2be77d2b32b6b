"""D9: clients that take a message for a token get the very tokens, texts and ends that the others get."""

import pytest

from outrider.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse, StopConditions
from tests.harness.orchestrator import DEADLINE, Generation, ask
from tests.harness.system import RunningSystem, start_system, synthetic


async def messages(system: RunningSystem, request: GenerateRequest) -> list[GenerateResponse]:
    return [message async for message in system.orchestrator.stub.Generate(request, timeout=DEADLINE)]


def collected(stream: list[GenerateResponse], choice: int = 0) -> Generation:
    generation = Generation()
    for message in stream:
        if message.choice == choice:
            generation.add(message)
    return generation


def same(one: Generation, other: Generation) -> bool:
    return (one.tokens, one.finish) == (other.tokens, other.finish)


@pytest.mark.parametrize("lookahead", range(6))
async def test_d9_one_token_a_message_is_the_same_stream(lookahead: int) -> None:
    """Rounds commit lookahead + 1 tokens; the stop string begins and ends inside of one."""
    async with start_system(synthetic(), synthetic()) as system:
        plain = collected(await messages(system, ask(max_tokens=40, lookahead=0, seed=5)))
        assert max(one.accepted for one in plain.rounds) == 0
        marker = plain.text[17:20]
        for stop in (StopConditions(), StopConditions(strings=[marker])):
            request = ask(max_tokens=40, lookahead=lookahead, seed=5, stop=stop)
            by_round = await messages(system, request)
            request.token_by_token = True
            by_token = await messages(system, request)
            assert all(len(message.tokens) <= 1 for message in by_token)
            # With a stop string, held tokens come together even without a block.
            assert any(len(message.tokens) > 1 for message in by_round) == (lookahead > 0 or bool(stop.strings))
            whole = collected(by_round)
            assert same(collected(by_token), whole)
            assert len(collected(by_token).rounds) == len(whole.rounds) == whole.finish.usage.rounds
            assert sum(message.HasField("round") for message in by_token) == len(whole.rounds)
            assert by_token[0].HasField("started")
            assert by_token[-1].HasField("finish")
            # A marker ends the text just before it, wherever the rounds cut the tokens.
            expected = plain.text.partition(marker)[0] if stop.strings else plain.text
            assert whole.text == expected


async def test_d9_choices_keep_their_messages_apart() -> None:
    async with start_system(synthetic(), synthetic()) as system:
        request = ask(max_tokens=20, lookahead=3, seed=5)
        request.n = 3
        by_round = await messages(system, request)
        request.token_by_token = True
        by_token = await messages(system, request)
        assert all(len(message.tokens) <= 1 for message in by_token)
        for choice in range(3):
            assert same(collected(by_token, choice), collected(by_round, choice))
