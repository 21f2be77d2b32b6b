"""The output of one generation: which tokens of a round to keep, and the text that they add."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from orchestrator.logprobs import TokenLogprobs
from orchestrator.text.detokenizer import Detokenizer, Spelling
from orchestrator.text.stopping import LENGTH, Finish, StopMatcher, StopRules, stopped_by
from outrider.law.sparse import Int32Array
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import TokenOrigin


class RoundToken(NamedTuple):
    """A token that a round made, in the order of the round."""

    id: int
    origin: "TokenOrigin.ValueType"
    logprobs: TokenLogprobs | None = None


class EmittedToken(NamedTuple):
    """A committed token with the text that it adds, and its log probability where that is wanted."""

    id: int
    text: str
    origin: "TokenOrigin.ValueType"
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Emission:
    """What to send to the client after a commit. No tokens at all while their text may begin a stop string."""

    tokens: tuple[EmittedToken, ...]
    finish: Finish | None


@dataclass(frozen=True)
class Kept:
    """The part of a round to commit. Made by `Output.keep`, spent by `Output.emit`.

    Attributes:
        tokens: [n] int32, n >= 1, up to and including the token that finishes the generation.
        finish: why the generation ends with these tokens, or None.
    """

    tokens: Int32Array
    finish: Finish | None
    _before: "_State" = field(repr=False)
    _after: "_State" = field(repr=False)
    _emission: Emission = field(repr=False)


@dataclass
class _State:
    """Everything that changes from token to token."""

    detokenizer: Detokenizer
    matcher: StopMatcher
    # Tokens whose text, or the text of a token before them, may belong to a stop string.
    held: list[EmittedToken] = field(default_factory=list)
    held_characters: int = 0
    generated: int = 0
    delivered: dict["TokenOrigin.ValueType", int] = field(default_factory=dict)
    finish: Finish | None = None

    def fork(self) -> "_State":
        return _State(
            self.detokenizer.fork(),
            self.matcher.fork(),
            self.held.copy(),
            self.held_characters,
            self.generated,
            self.delivered.copy(),
            self.finish,
        )

    def hold(self, token: EmittedToken) -> None:
        self.held.append(token)
        self.held_characters += len(token.text)

    def release(self) -> list[EmittedToken]:
        """Takes out the leading tokens whose text no stop string can reach any more; all of them at the end."""
        reach = 0 if self.finish else self.matcher.held
        count = 0
        while count < len(self.held) and self.held_characters - len(self.held[count].text) >= reach:
            self.held_characters -= len(self.held[count].text)
            count += 1
        released, self.held = self.held[:count], self.held[count:]
        return released

    def cut(self, length: int) -> None:
        """Shortens the held text to its first `length` characters; the tokens stay."""
        tokens, self.held = self.held, []
        self.held_characters = 0
        for token in tokens:
            self.hold(token._replace(text=token.text[: length - self.held_characters]))


class Output:
    """One generation's output.

    Usage, once a round:
        kept = output.keep(tokens)                 # changes nothing: a failed commit can be repeated or dropped
        await store.commit(..., kept.tokens, ...)
        emission = output.emit(kept)               # what keep computed, word for word

    State depends on the committed tokens alone, not on how rounds cut them: `emit(keep(all))` on a new Output resumes.
    """

    def __init__(self, rules: StopRules, spelling: Spelling, prompt: Int32Array) -> None:
        self._rules = rules
        self._spelling = spelling
        self._prompt_tokens = len(prompt)
        self._state = _State(spelling.detokenizer(prompt), StopMatcher(rules.strings))

    @property
    def generated(self) -> int:
        """Number of committed generated tokens, those included whose text is held back."""
        return self._state.generated

    @property
    def finish(self) -> Finish | None:
        """Why the generation ended, or None while it runs."""
        return self._state.finish

    def keep(self, tokens: Sequence[RoundToken]) -> Kept:
        """Decides how much of a round becomes output. Raises ValueError on an empty round or after the end."""
        if not tokens:
            raise ValueError("a round without tokens")
        if self._state.finish is not None:
            raise ValueError("the generation has ended")
        state = self._state.fork()
        kept: list[int] = []
        for token in tokens:
            self._append(state, token)
            kept.append(token.id)
            if state.finish is not None:
                break
        emission = self._release(state)
        return Kept(np.array(kept, dtype=np.int32), state.finish, self._state, state, emission)

    def emit(self, kept: Kept) -> Emission:
        """The emission of tokens now committed. Raises ValueError unless `kept` was made from the present state."""
        if kept._before is not self._state:
            raise ValueError("emit needs what the last keep returned, once")
        self._state = kept._after
        return kept._emission

    def usage(self, rounds: int) -> orchestrator_pb2.Usage:
        """What was delivered so far, by origin."""
        delivered = self._state.delivered
        return orchestrator_pb2.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(delivered.values()),
            accepted_tokens=delivered.get(orchestrator_pb2.TOKEN_ORIGIN_ACCEPTED, 0),
            recovered_tokens=delivered.get(orchestrator_pb2.TOKEN_ORIGIN_RECOVERED, 0),
            bonus_tokens=delivered.get(orchestrator_pb2.TOKEN_ORIGIN_BONUS, 0),
            plain_tokens=delivered.get(orchestrator_pb2.TOKEN_ORIGIN_PLAIN, 0),
            replayed_tokens=delivered.get(orchestrator_pb2.TOKEN_ORIGIN_REPLAYED, 0),
            rounds=rounds,
        )

    def _append(self, state: _State, token: RoundToken) -> None:
        watched = state.generated >= self._rules.min_tokens
        stop_token = watched and token.id in self._rules.token_ids
        state.generated += 1
        last = stop_token or state.generated >= self._rules.max_tokens
        # A stop token has no text of its own; the last token carries what an unfinished character leaves.
        text = "" if stop_token else state.detokenizer.push(token.id)
        text += state.detokenizer.flush() if last else ""
        state.hold(EmittedToken(token.id, text, token.origin, token.logprobs))
        match = state.matcher.feed(text) if watched else None
        if match is not None:
            state.cut(state.held_characters - (len(text) - match.end) - len(match.string))
            state.finish = stopped_by(match.string)
        elif last:
            state.finish = stopped_by(self._spelling.name(token.id)) if stop_token else LENGTH

    def _release(self, state: _State) -> Emission:
        released = state.release()
        for token in released:
            state.delivered[token.origin] = state.delivered.get(token.origin, 0) + 1
        return Emission(tuple(released), state.finish)
