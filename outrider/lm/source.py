"""MODEL: how people name a model on the command line."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from outrider.lm.engine import ModelRefused

# What marks a directory as a distilled draft.
DRAFT_FILE = "draft.json"


class SourceKind(Enum):
    """Where a model comes from."""

    HUB = "hub"
    DIRECTORY = "directory"
    GGUF = "gguf"
    SYNTHETIC = "synthetic"
    DISTILLED = "distilled"


@dataclass(frozen=True)
class ModelSource:
    """A parsed MODEL.

    Attributes:
        name: MODEL as given; the model id on the wire.
        location: hub id, directory, the GGUF file's path, or the settings after "synthetic:".
    """

    name: str
    kind: SourceKind
    location: str

    @property
    def portable_name(self) -> str:
        """MODEL without the directories of this machine."""
        if self.kind is SourceKind.GGUF:
            return f"gguf:{Path(self.location).name}"
        return Path(self.location).name if self.kind is SourceKind.DIRECTORY else self.name


def parse_source(model: str) -> ModelSource:
    """Parses `gguf:FILE`, `synthetic:KEY=VALUE,...`, a directory (a model's or a draft's), or a Hugging Face id.

    Raises ModelRefused when a file or directory that is named does not exist or the text can be none of them.
    """
    try:
        return _parsed(model)
    except (OSError, RuntimeError) as error:  # a name that is too long, may not be looked at, or has no home directory
        raise ModelRefused(f"model {model[:80]!r} cannot be looked for: {error.__class__.__name__}") from error


def _parsed(model: str) -> ModelSource:
    if model.startswith("synthetic:"):
        return ModelSource(model, SourceKind.SYNTHETIC, model.removeprefix("synthetic:"))
    if model.startswith("gguf:"):
        path = Path(model.removeprefix("gguf:")).expanduser()
        if not path.is_file():
            raise ModelRefused(f"model file {path} does not exist")
        return ModelSource(model, SourceKind.GGUF, str(path))
    path = Path(model).expanduser()
    if (path / DRAFT_FILE).is_file():
        return ModelSource(model, SourceKind.DISTILLED, str(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelRefused(f"model directory {path} has no config.json")
        return ModelSource(model, SourceKind.DIRECTORY, str(path))
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or not model.strip():
        raise ModelRefused(f"model directory {model!r} does not exist")
    return ModelSource(model, SourceKind.HUB, model)
