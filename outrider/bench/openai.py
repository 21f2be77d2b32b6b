"""Any endpoint that speaks OpenAI's HTTP API, streamed."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError

from outrider.bench.prompts import Prompt, PromptSet
from outrider.bench.sample import Asked, Sample
from outrider.cli.run import Failure

_DONE = "[DONE]"
_CONNECT_SECONDS = 10.0


class _Delta(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    text: str = ""


class _Usage(BaseModel):
    completion_tokens: int


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


@dataclass(frozen=True)
class Endpoint:
    """An endpoint as a Way.

    Attributes:
        name: of the way.
        client: with the base URL and the key, if any.
        model: that is asked for.
        asked: what every request asks for.
    """

    name: str
    client: httpx2.AsyncClient
    model: str
    asked: Asked

    def declines(self, prompts: PromptSet, concurrency: int) -> str:
        """Never."""
        return ""

    async def answer(self, prompts: PromptSet, index: int, max_tokens: int) -> Sample:
        """One streamed completion. Raises Failure when the endpoint fails, or does not count its tokens."""
        prompt = prompts.prompts[index]
        sample, usage = Sample(index), None
        began = time.perf_counter()
        with _told(self.name):
            async for chunk in self._stream(prompt, max_tokens):
                if any(choice.delta.content or choice.text for choice in chunk.choices):
                    sample.arrivals.append(time.perf_counter() - began)
                usage = chunk.usage or usage
        sample.seconds = sample.stats.seconds = time.perf_counter() - began
        if usage is None:
            raise Failure(f"{self.name} does not say how many tokens it made (stream_options.include_usage)")
        sample.tokens = sample.stats.tokens = usage.completion_tokens
        return sample

    async def _stream(self, prompt: Prompt, max_tokens: int) -> AsyncIterator[_Chunk]:
        path = "chat/completions" if prompt.messages else "completions"
        async with self.client.stream("POST", path, json=self._body(prompt, max_tokens)) as response:
            await _check(response)
            async for event in httpx2.EventSource(response):
                if event.data == _DONE:
                    return
                yield _Chunk.model_validate_json(event.data)

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        asked = self.asked
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": asked.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.messages:
            body["messages"] = [message.model_dump() for message in prompt.messages]
        else:
            body["prompt"] = prompt.prompt
        if asked.seed is not None:
            body["seed"] = asked.seed
        if asked.ignore_eos:  # not OpenAI's own; vLLM, llama.cpp and SGLang know it
            body["ignore_eos"] = True
        return body


@asynccontextmanager
async def endpoint(url: str, model: str, key: str, asked: Asked, seconds: float) -> AsyncIterator[Endpoint]:
    """An endpoint at a base URL such as http://127.0.0.1:8000/v1.

    Args:
        model: that is asked for; empty takes the first that the endpoint lists.
        key: bearer token; empty sends none.
        seconds: longest silence of an answer.

    Raises Failure with one sentence when it does not answer or lists no model.
    """
    name = f"openai {url}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS)
    limits = httpx2.Limits(max_connections=None)
    with _told(name):
        client = httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)
    async with client:
        yield Endpoint(name, client, model or await _first_model(client, name), asked)


async def _first_model(client: httpx2.AsyncClient, name: str) -> str:
    with _told(name):
        response = await client.get("models")
        await _check(response)
        models = _Models.model_validate_json(response.content).data
    if not models:
        raise Failure(f"{name} lists no model")
    return models[0].id


async def _check(response: httpx2.Response) -> None:
    if response.is_success:
        return
    words = (await response.aread()).decode(errors="replace")
    raise Failure(f"{response.request.url} answered {response.status_code}: {words[:200]}")


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Failure(f"{name}: {str(error) or type(error).__name__}") from None
    except ValidationError as error:
        raise Failure(f"{name} does not speak OpenAI's protocol: {error.errors()[0]['msg']}") from None
