"""The language that an output must belong to, as data: what travels and what a law's parameters hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.v1.types_pb2 import Grammar

# The fields of the message's oneof.
KINDS = ("json_schema", "regex", "lark")


@dataclass(frozen=True)
class Language:
    """A formal language over text.

    Attributes:
        kind: how it is written, one of KINDS; fields of types.proto's Grammar.
        text: the schema, the regular expression or the grammar.
    """

    kind: str
    text: str


def from_grammar(message: "Grammar") -> Language | None:
    """The language of a message; None when it names none."""
    kind = message.WhichOneof("language")
    return Language(kind, getattr(message, kind)) if kind is not None else None


def to_grammar(language: Language) -> "Grammar":
    """The inverse of `from_grammar`."""
    from outrider.v1.types_pb2 import Grammar

    message = Grammar()
    setattr(message, language.kind, language.text)
    return message
