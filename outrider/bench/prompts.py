"""What is asked: small sets that come with the package, and files of a user's own."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.cli.run import Failure

BUILT_IN = ("chat", "code", "quoting")
_DEFAULT_SET = "prompts"


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str = Field(min_length=1)
    content: str


class Prompt(BaseModel):
    """One line of a prompts file: `prompt` (raw text to go on with) or `messages` (a conversation to answer).

    Attributes:
        set: which set it belongs to; each is measured by itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    set: str = Field(_DEFAULT_SET, min_length=1)
    prompt: str = ""
    messages: tuple[Message, ...] = ()

    @model_validator(mode="after")
    def _one_of_two(self) -> "Prompt":
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("exactly one of `prompt` and `messages` is needed, and not empty")
        return self


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are measured together.

    Attributes:
        name: of the set.
        prompts: at least one.
    """

    name: str
    prompts: tuple[Prompt, ...]


def built_in(names: tuple[str, ...] = BUILT_IN) -> list[PromptSet]:
    """The package's own sets."""
    text = (files("outrider.bench") / "prompts.jsonl").read_text(encoding="utf-8")
    return [each for each in _parse(text, "prompts.jsonl") if each.name in names]


def read_prompts(path: Path) -> list[PromptSet]:
    """The sets of a file of JSON lines; empty lines are skipped.

    Raises Failure with one sentence: the file cannot be read or holds no prompt, or which line is wrong and how.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Failure(f"{path} is not valid UTF-8 at byte {error.start}") from None
    return _parse(text, str(path))


def _parse(text: str, name: str) -> list[PromptSet]:
    sets: dict[str, list[Prompt]] = {}
    # Not splitlines(): it also splits at characters that JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = Prompt.model_validate_json(line)
        except ValidationError as error:
            raise Failure(f"{name}, line {number}: {_sentence(error)}") from None
        sets.setdefault(prompt.set, []).append(prompt)
    if not sets:
        raise Failure(f"{name} holds no prompt: one JSON object a line is expected")
    return [PromptSet(each, tuple(prompts)) for each, prompts in sets.items()]


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")
