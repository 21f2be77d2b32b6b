"""GenerateRequest from what was typed: only what the wire cannot carry fails here, ranges are the orchestrator's."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from google.protobuf.message import Message

from outrider.cli.run import Failure
from outrider.v1 import orchestrator_pb2 as pb


def set_fields(message: Message, values: Mapping[str, object]) -> None:
    """Sets the fields that are not None. Raises Failure naming the option whose value the field cannot hold."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except (ValueError, TypeError):
            option = name.replace("_", "-")
            raise Failure(f"{option} cannot be {value!r}: outside the range of the field") from None


def set_input(request: pb.GenerateRequest, prompt: str, *, chat: bool, system: str) -> None:
    """A conversation of an optional system message and one user message, or raw text. Raises Failure."""
    if system and not chat:
        raise Failure("--system needs --chat: raw text has no messages")
    try:
        if chat:
            request.chat.messages.extend(_messages(prompt, system))
        else:
            request.prompt = prompt
    except UnicodeEncodeError:
        raise Failure("the prompt is not valid UTF-8") from None


def set_grammar(request: pb.GenerateRequest, *, json_schema: Path | None, regex: str | None, lark: Path | None) -> None:
    """The language of the output: at most one. Raises Failure when there are more, or a file cannot be read."""
    if sum(given is not None for given in (json_schema, regex, lark)) > 1:
        raise Failure("--json-schema, --regex and --lark exclude each other: an output has one grammar")
    if json_schema is not None:
        request.grammar.json_schema = _text(json_schema)
    if regex is not None:
        request.grammar.regex = regex
    if lark is not None:
        request.grammar.lark = _text(lark)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Failure(f"{path} is not valid UTF-8") from None


def set_tokens(
    request: pb.GenerateRequest,
    *,
    bias: Iterable[str],
    allowed: Iterable[int],
    banned: Iterable[int],
    stop: Iterable[int],
) -> None:
    """What is asked of single tokens; biases as ID=VALUE. Raises Failure."""
    for each in bias:
        token, _, value = each.partition("=")
        try:
            request.sampling.logit_bias[int(token)] = float(value)
        except ValueError:
            raise Failure(f"--logit-bias {each!r} is not ID=VALUE, a token id and a number") from None
    lists = {
        "--allow-token": (request.sampling.allowed_token_ids, allowed),
        "--ban-token": (request.sampling.banned_token_ids, banned),
        "--stop-token": (request.stop.token_ids, stop),
    }
    for option, (ids, given) in lists.items():
        try:
            ids.extend(given)
        except ValueError:
            raise Failure(f"{option} cannot be {list(given)}: outside the range of the field") from None


def set_prediction(request: pb.GenerateRequest, path: Path | None) -> None:
    """The text of a file as what the output is expected to be. Raises Failure when it cannot be read."""
    if path is None:
        return
    request.speculation.prediction = _text(path)


def _messages(prompt: str, system: str) -> Iterable[pb.ChatMessage]:
    if system:
        yield pb.ChatMessage(role="system", content=system)
    yield pb.ChatMessage(role="user", content=prompt)
