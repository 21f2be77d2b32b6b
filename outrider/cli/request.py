"""GenerateRequest from what was typed: only what the wire cannot carry fails here, ranges are the orchestrator's."""

from collections.abc import Iterable, Mapping

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


def _messages(prompt: str, system: str) -> Iterable[pb.ChatMessage]:
    if system:
        yield pb.ChatMessage(role="system", content=system)
    yield pb.ChatMessage(role="user", content=prompt)
