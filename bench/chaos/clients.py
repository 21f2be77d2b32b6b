"""Clients that stream, one generation after the other, and keep count of what is not as it should be."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from outrider.client import AsyncClient
from outrider.client.request import Options
from outrider.net.arrays import int32s
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import GetSessionRequest

MOST_TOKENS = 240
_FEWEST_TOKENS = 40
# Of one generation; no fault lasts nearly as long.
_GENERATION_SECONDS = 300.0
_LOOK_SECONDS = 60.0
_PROMPTS = [(index, 1, 2) for index in range(6)]
_FIRST_LETTER = ord("a")


@dataclass(frozen=True)
class Ask:
    """What a client asks for.

    Attributes:
        prompt: token ids.
        rule: acceptance rule.
        seed: of `coupled`.
    """

    prompt: tuple[int, ...]
    rule: str
    seed: int = 0

    @property
    def repeatable(self) -> bool:
        """Whether every undisturbed run gives the same tokens, and so must every other."""
        return self.rule in ("greedy", "coupled")

    def options(self, tokens: int) -> Options:
        """For the client."""
        options: Options = {"max_tokens": tokens, "temperature": 0.0 if self.rule == "greedy" else 1.0}
        if self.rule == "coupled":
            options["seed"] = self.seed
        options["acceptance"] = self.rule  # type: ignore[typeddict-item]
        return options


ASKS = [
    *(Ask(prompt, "greedy") for prompt in _PROMPTS),
    *(Ask(prompt, "coupled", seed) for prompt in _PROMPTS[:3] for seed in (1, 2)),
    *(Ask(prompt, rule) for prompt in _PROMPTS for rule in ("ratio", "block")),
]


@dataclass
class Tally:
    """What all clients came to.

    Attributes:
        sessions: generations that ended.
        tokens: that came.
        lost: tokens of the stored sessions that did not come.
        repeated: tokens that came and are in no stored session.
        differing: generations whose tokens or text are not those of an undisturbed run, or not those of the store.
        errors: what was raised, and ends that are none, one line each.
    """

    sessions: int = 0
    tokens: int = 0
    lost: int = 0
    repeated: int = 0
    differing: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def faultless(self) -> bool:
        """Whether nothing was lost, repeated or different, and nobody saw an error."""
        return not (self.lost or self.repeated or self.differing or self.errors)


class Crowd:
    """So many clients, each with one generation after the other, until `leave`.

    Args:
        addresses: of the orchestrators.
        rng: what they ask for.

    Attributes:
        tally: what they came to so far.
        arrivals: tokens that each client got.
        longest_pause: that any of them saw between two tokens, or before a first one, since `watch`, in seconds.
    """

    def __init__(self, addresses: str, clients: int, rng: Random) -> None:
        self.tally = Tally()
        self.arrivals = [0] * clients
        self.longest_pause = 0.0
        self._client = AsyncClient(addresses)
        self._addresses = addresses.split(",")
        self._rng = rng
        self._expected: dict[Ask, list[int]] = {}
        self._last = [0.0] * clients
        self._leaving = False
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        """Runs everything that is repeatable once, undisturbed."""
        asks = [ask for ask in ASKS if ask.repeatable]
        streams = [self._client.generate(token_ids=ask.prompt, **ask.options(MOST_TOKENS)) for ask in asks]
        texts = await asyncio.gather(*(stream.text() for stream in streams))
        self._expected = {ask: _ids(text) for ask, text in zip(asks, texts, strict=True)}

    def come(self) -> None:
        """The clients begin."""
        self._tasks = [asyncio.create_task(self._stay(index)) for index in range(len(self.arrivals))]

    async def leave(self) -> None:
        """Returns when every client has finished what it was at."""
        self._leaving = True
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Ends them at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def watch(self) -> None:
        """Forgets pauses that are over; those that last count from their beginning."""
        self.longest_pause = 0.0

    async def until_all_went_on(self, tokens: int, within: float) -> bool:
        """Returns when each client got so many tokens more; False when one did not in time."""
        wanted = [count + tokens for count in self.arrivals]
        ends = time.monotonic() + within
        while any(count < least for count, least in zip(self.arrivals, wanted, strict=True)):
            if time.monotonic() > ends:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _stay(self, index: int) -> None:
        rng = Random(self._rng.getrandbits(64))
        while not self._leaving:
            await self._generation(index, rng.choice(ASKS), rng.randint(_FEWEST_TOKENS, MOST_TOKENS))

    async def _generation(self, index: int, ask: Ask, wanted: int) -> None:
        stream = self._client.generate(token_ids=ask.prompt, timeout=_GENERATION_SECONDS, **ask.options(wanted))
        tokens, text = [], ""
        self._last[index] = time.monotonic()
        try:
            async for token in stream:
                self._arrived(index)
                tokens.append(token.id)
                text += token.text
            stored = await self._stored(stream.session_id)
        except Exception as error:  # whatever it is, a client should not have seen it
            self.tally.errors.append(f"{ask.rule} after {len(tokens)} of {wanted} tokens: {error!r}")
            return
        tally = self.tally
        tally.sessions += 1
        tally.lost += max(0, len(stored) - len(tokens), wanted - len(tokens))
        tally.repeated += max(0, len(tokens) - len(stored), len(tokens) - wanted)
        tally.differing += tokens != stored or _ids(text) != tokens or not self._as_undisturbed(ask, tokens)
        finish: Any = stream.finish
        if (finish.reason, finish.usage.completion_tokens) != (orchestrator_pb2.FINISH_REASON_LENGTH, wanted):
            tally.errors.append(f"{ask.rule}: {wanted} tokens were wanted, the end was {finish}")

    def _as_undisturbed(self, ask: Ask, tokens: Sequence[int]) -> bool:
        return not ask.repeatable or list(tokens) == self._expected[ask][: len(tokens)]

    def _arrived(self, index: int) -> None:
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - self._last[index])
        self._last[index] = now
        self.arrivals[index] += 1
        self.tally.tokens += 1

    async def _stored(self, session_id: str) -> list[int]:
        """What the store has of a generation. Raises TimeoutError when no orchestrator says it."""
        request = GetSessionRequest(session_id=session_id)
        async with asyncio.timeout(_LOOK_SECONDS):
            while True:
                for address in self._addresses:
                    try:
                        record = await self._client.stub(address).GetSession(request, timeout=5.0)
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.2)
                    else:
                        return int32s(record.generated_tokens, "generated_tokens").tolist()


def _ids(text: str) -> list[int]:
    """Every token is a letter."""
    return [ord(letter) - _FIRST_LETTER for letter in text]
