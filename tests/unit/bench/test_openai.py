"""An OpenAI-compatible endpoint as a way, against a real HTTP server."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from outrider.bench.openai import endpoint
from outrider.bench.prompts import Message, Prompt, PromptSet
from outrider.bench.sample import Asked, Sample
from outrider.cli.run import Failure
from tests.harness.openai_server import MODEL, echo_server

PROMPTS = PromptSet("set", (Prompt(messages=(Message(role="user", content="one two three"),)), Prompt(prompt="raw")))
ASKED = Asked(max_tokens=5, ignore_eos=True, temperature=0.5, seed=7)


async def answer(url: str, *, index: int = 0, model: str = "", key: str = "", tokens: int = 5) -> Sample:
    async with endpoint(url, model, key, ASKED, seconds=30.0) as way:
        return await way.answer(PROMPTS, index, tokens)


async def test_chat_and_raw_prompts_are_streamed_and_counted() -> None:
    with echo_server(token_seconds=0.25) as server:
        chat, raw = await answer(server.url), await answer(server.url, index=1, tokens=2)
    assert (chat.tokens, raw.tokens) == (5, 2)
    assert (len(chat.arrivals), len(raw.arrivals)) == (5, 2)
    # Text is seen as it comes, not at the end.
    assert chat.arrivals[0] < chat.arrivals[-1] - 0.05
    assert chat.arrivals[-1] <= chat.seconds
    (chat_path, body), (raw_path, raw_body) = server.requests
    assert (chat_path, raw_path) == ("/v1/chat/completions", "/v1/completions")
    assert body["messages"] == [{"role": "user", "content": "one two three"}]
    assert raw_body["prompt"] == "raw"
    assert [body[name] for name in ("model", "max_tokens", "temperature", "seed")] == [MODEL, 5, 0.5, 7]
    assert body["stream"]
    assert body["ignore_eos"]


async def test_requests_run_beside_each_other() -> None:
    with echo_server(together=6) as server:
        async with endpoint(server.url, MODEL, "", ASKED, seconds=30.0) as way:
            await asyncio.gather(*(way.answer(PROMPTS, 0, 5) for _ in range(6)))
    assert server.most_at_once == 6


async def test_key_is_sent() -> None:
    with echo_server(key="secret") as server:
        assert (await answer(server.url, model=MODEL, key="secret")).tokens == 5
        with pytest.raises(Failure, match=r"answered 401: .*no such key"):
            await answer(server.url, model=MODEL)


async def test_wrong_model_is_told_in_the_words_of_the_server() -> None:
    with echo_server() as server:
        with pytest.raises(Failure, match=r"answered 404: .*'other' does not exist"):
            await answer(server.url, model="other")


async def test_without_usage_nothing_is_guessed() -> None:
    with echo_server(counts=False) as server:
        with pytest.raises(Failure, match="does not say how many tokens"):
            await answer(server.url)


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


@pytest.mark.parametrize("url", [closed_port, lambda: "http://[bad/v1", lambda: "no-url"])
async def test_unreachable_endpoint_is_one_sentence(url: Callable[[], str]) -> None:
    where = url()
    with pytest.raises(Failure) as failure:
        await answer(where)
    assert str(failure.value).startswith(f"openai {where}: ")


async def test_another_protocol_is_told() -> None:
    with echo_server() as server:
        with pytest.raises(Failure, match="answered 404"):
            await answer(server.url.removesuffix("/v1"))
