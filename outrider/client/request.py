"""GenerateRequest from keyword arguments. Ranges are the orchestrator's to check."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from google.protobuf.message import Message as ProtoMessage

from outrider.v1 import draft_pb2, orchestrator_pb2
from outrider.v1.orchestrator_pb2 import ChatMessage, GenerateRequest


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Options(TypedDict, total=False):
    """What can be asked of a generation; names, ranges and defaults are those of the fields of GenerateRequest."""

    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    seed: int
    logprobs: int
    json_schema: str
    regex: str
    lark: str
    lookahead: int
    max_nodes: int
    acceptance: Literal["greedy", "ratio", "block", "coupled"]
    proposer: Literal["model", "early_exit", "prompt_lookup", "prediction", "suffix", "suffix_or_model", "auto"]
    prediction: str


# Options whose names say more than those of their fields.
_RENAMED = {"stop": "strings", "stop_token_ids": "token_ids"}
# Options that name a value of an enum, and how its names begin.
_NAMED = {"acceptance": (orchestrator_pb2.Acceptance, "ACCEPTANCE"), "proposer": (draft_pb2.Proposer, "PROPOSER")}


def make_request(
    prompt: str | None, messages: Sequence[Message] | None, token_ids: Sequence[int] | None, options: Options
) -> GenerateRequest:
    """A request for exactly one input. Raises TypeError or ValueError naming an argument that cannot be one."""
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise TypeError("exactly one of prompt, messages and token_ids is required")
    request = GenerateRequest()
    if prompt is not None:
        request.prompt = prompt
    if messages is not None:
        request.chat.messages.extend(ChatMessage(**message) for message in messages)
    if token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    for name, value in options.items():
        _set(request, name, value)
    return request


def _set(request: GenerateRequest, name: str, value: object) -> None:
    if name not in Options.__annotations__:
        raise TypeError(f"{name} is no option of a generation")
    field = _RENAMED.get(name, name)
    message = _part(request, field)
    try:
        if name in _NAMED:
            enum, prefix = _NAMED[name]
            value = enum.Value(f"{prefix}_{str(value).upper()}")
        if isinstance(value, Mapping):
            getattr(message, field).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{name} cannot be {value!r}: {error}") from None


def _part(request: GenerateRequest, field: str) -> ProtoMessage:
    """The part of the request that has the field."""
    parts = (request.stop, request.sampling, request.speculation, request.grammar, request)
    return next(part for part in parts if field in part.DESCRIPTOR.fields_by_name)
