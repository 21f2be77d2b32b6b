"""The parameters of a law, their ranges, and the wire's view of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.law.language import Language, from_grammar, to_grammar

if TYPE_CHECKING:
    from outrider.v1.types_pb2 import LawSpec, SamplingParams

# Below this temperature sampling is greedy: the law is one-hot at the argmax (lowest id among equals).
GREEDY_TEMPERATURE = 1e-5

# Changes whenever the same logits, parameters and seed would give other probabilities or another draw.
LAW_VERSION = 4

# A bias of this value bans the token outright.
BAN = -100.0

MAX_LOGIT_BIAS = 1024
MAX_TOP_K = 1 << 20
MAX_STOP_TOKENS = 64
MAX_LISTED_TOKENS = 65_536


@dataclass(frozen=True)
class SeededLaw:
    """What a worker keeps of a LawSpec: the law's parameters and the seed of the session's noise."""

    params: "LawParams"
    seed: int


class ParamError(ValueError):
    """A parameter outside its range.

    Attributes:
        field: dotted name of the field as the protos spell it, for example "sampling.top_p".
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


@dataclass(frozen=True)
class LawParams:
    """Everything but the prefix that shapes logits into a law. Fields and ranges as in types.proto.

    Attributes:
        logit_bias: (token id, value) pairs, ids distinct; -100 bans the token outright.
        allowed_token_ids: the only tokens that may be drawn, all when empty.
        banned_token_ids: never drawn.
        stop_token_ids: masked while fewer than min_tokens were generated.
        prompt_length: presence and frequency penalty count tokens from this position on.
        grammar: language of the output, counted from prompt_length on; None allows every text.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    prompt_length: int = 0
    stop_token_ids: tuple[int, ...] = field(default=())
    min_tokens: int = 0
    grammar: Language | None = None
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()

    @cached_property
    def allowed(self) -> npt.NDArray[np.int64]:
        """allowed_token_ids, distinct, ascending; made once for all rows of the session."""
        return np.unique(np.array(self.allowed_token_ids, dtype=np.int64))

    @cached_property
    def banned(self) -> npt.NDArray[np.int64]:
        """banned_token_ids, distinct, ascending; made once for all rows of the session."""
        return np.unique(np.array(self.banned_token_ids, dtype=np.int64))

    @property
    def greedy(self) -> bool:
        """Whether the law is one-hot at the argmax."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether the law depends on which tokens the prefix holds."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def check(params: LawParams, vocab_size: int) -> None:
    """Checks every range. Raises ParamError naming the field and its limit."""
    _in_range("sampling.repetition_penalty", params.repetition_penalty, 0.0, 100.0, low_open=True)
    _in_range("sampling.presence_penalty", params.presence_penalty, -2.0, 2.0)
    _in_range("sampling.frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _in_range("sampling.temperature", params.temperature, 0.0, 100.0)
    _in_range("sampling.top_k", params.top_k, 0, MAX_TOP_K)
    _in_range("sampling.top_p", params.top_p, 0.0, 1.0, low_open=True)
    _in_range("sampling.min_p", params.min_p, 0.0, 1.0)
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise ParamError("sampling.logit_bias", f"has {len(params.logit_bias)} entries, limit {MAX_LOGIT_BIAS}")
    for token, value in params.logit_bias:
        _in_range("sampling.logit_bias id", token, 0, vocab_size - 1)
        _in_range(f"sampling.logit_bias[{token}]", value, -100.0, 100.0)
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise ParamError("law.stop_token_ids", f"has {len(params.stop_token_ids)} entries, limit {MAX_STOP_TOKENS}")
    for token in params.stop_token_ids:
        _in_range("law.stop_token_ids", token, 0, vocab_size - 1)
    _check_listed("sampling.allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_listed("sampling.banned_token_ids", params.banned_token_ids, vocab_size)
    _check_something_left(params, vocab_size)


def _check_listed(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if len(ids) > MAX_LISTED_TOKENS:
        raise ParamError(name, f"has {len(ids)} entries, limit {MAX_LISTED_TOKENS}")
    for token in (min(ids), max(ids)) if ids else ():
        _in_range(name, token, 0, vocab_size - 1)


def _check_something_left(params: LawParams, vocab_size: int) -> None:
    """Some token may be drawn at every position, the first ones included, where stop tokens are masked."""
    masked = {*params.banned_token_ids, *(token for token, value in params.logit_bias if value <= BAN)}
    if params.min_tokens:
        masked.update(params.stop_token_ids)
    if params.allowed_token_ids and masked.issuperset(params.allowed_token_ids):
        raise ParamError("sampling.allowed_token_ids", "names only tokens that are banned or come too early")
    if len(masked) >= vocab_size:
        raise ParamError("sampling.banned_token_ids", "and what else is masked leave no token of the vocabulary")


def _in_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    below = value <= low if low_open else value < low
    if math.isnan(value) or below or value > high:
        left = "(" if low_open else "["
        raise ParamError(name, f"is {value}, must be in {left}{low}, {high}]")


def from_sampling(message: "SamplingParams") -> LawParams:
    """The client's part of a law. Unset fields take their defaults; ranges are not checked here."""
    defaults = LawParams()
    bias: Mapping[int, float] = message.logit_bias

    def optional(name: str) -> float:
        return float(getattr(message, name)) if message.HasField(name) else float(getattr(defaults, name))  # type: ignore[arg-type]

    return LawParams(
        repetition_penalty=optional("repetition_penalty"),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(bias.items())),
        temperature=optional("temperature"),
        top_k=message.top_k,
        top_p=optional("top_p"),
        min_p=message.min_p,
        allowed_token_ids=tuple(message.allowed_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
    )


def to_law_spec(params: LawParams, seed: int) -> "LawSpec":
    """The message that makes a worker's law equal to `params`."""
    from outrider.v1.types_pb2 import LawSpec, SamplingParams

    sampling = SamplingParams(
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
    )
    return LawSpec(
        sampling=sampling,
        prompt_length=params.prompt_length,
        stop_token_ids=np.asarray(params.stop_token_ids, dtype="<i4").tobytes(),
        min_tokens=params.min_tokens,
        seed=seed,
        grammar=to_grammar(params.grammar) if params.grammar is not None else None,
    )


def from_law_spec(message: "LawSpec") -> tuple[LawParams, int]:
    """The inverse of `to_law_spec`: (params, seed). Ranges are not checked here.

    Raises ParamError when stop_token_ids is no int32 array, or the grammar names no language.
    """
    from dataclasses import replace

    if len(message.stop_token_ids) % 4:
        raise ParamError("law.stop_token_ids", f"has {len(message.stop_token_ids)} bytes, not a multiple of 4")
    params = replace(
        from_sampling(message.sampling),
        prompt_length=message.prompt_length,
        stop_token_ids=tuple(np.frombuffer(message.stop_token_ids, dtype="<i4").tolist()),
        min_tokens=message.min_tokens,
        grammar=from_grammar(message.grammar) if message.HasField("grammar") else None,
    )
    if message.HasField("grammar") and params.grammar is None:
        raise ParamError("law.grammar", "names no language")
    return params, message.seed
