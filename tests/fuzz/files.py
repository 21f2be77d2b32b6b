"""Files that somebody else may have written: a line that names the kind, and what stands in the file."""

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save

from orchestrator.tenants import load_tenants
from outrider.lm.distilled import WEIGHTS_FILE, DistilledDraft
from outrider.lm.engine import ModelRefused
from outrider.lm.source import DRAFT_FILE
from outrider.net.tokens import Keys, KeysError
from tests.fuzz.case import Harness, Target, join, split

_KEYS = f"# tokens\nacme:{'0' * 64}\nb-2:{'a' * 64} # old\n"
_TENANTS = """[default]
max_sessions = 4
[tenants.acme]
weight = 2.5
tokens_per_second = 100
burst = 1e3
"""
_DRAFT = {"format": 1, "target": "org/target", "layers": 2, "vocab_fingerprint": "x"}
_JUNK = (
    "",
    "\0",
    "\xff",
    "\n",
    "[" * 20_000,
    '{"x":' * 20_000,
    "nan",
    "inf",
    "-1",
    "1e999",
    '"',
    "=",
    ":",
    "9" * 5000,
    "\r",
    "null",
)


@cache
def file_seeds() -> list[bytes]:
    """One good file of each kind."""
    tensors = {"kept": torch.arange(4, dtype=torch.int32), "norm.weight": torch.ones(2)}
    return [
        join("keys", _KEYS.encode()),
        join("tenants", _TENANTS.encode()),
        join("draft", json.dumps(_DRAFT).encode()),
        join("weights", save(tensors)),
    ]


def draw_file(dice: Random) -> bytes:
    """A file with some bytes replaced, cut out, doubled or put in."""
    head, body = split(dice.choice(file_seeds()))
    for _ in range(dice.randint(1, 3)):
        start = dice.randrange(len(body) + 1)
        end = min(len(body), start + dice.choice((0, 1, 2, 8, 64)))
        junk = dice.choice(_JUNK).encode("latin-1")
        middle = dice.choice((junk, body[start:end] * 2, b"", bytes([dice.randrange(256)])))
        body = body[:start] + middle + body[end:]
    return join(head, body)


@dataclass
class _Files(Harness):
    directory: Path

    async def run(self, case: bytes) -> str:
        return read_file(case, self.directory)

    async def golden(self) -> None:
        for case in file_seeds():
            assert read_file(case, self.directory) == "read"


def read_file(case: bytes, directory: Path) -> str:
    """Reads the case as its service does. Raises what is no refusal in one line."""
    kind, body = split(case)
    path = directory / "file"
    path.write_bytes(body)
    try:
        if kind == "keys":
            Keys(file=str(path)).tenant_of("outrider_x")
        elif kind == "tenants":
            load_tenants(str(path)).limits("acme")
        elif kind in ("draft", "weights"):
            good = {name: split(one)[1] for name, one in zip(("draft", "weights"), file_seeds()[2:], strict=True)}
            for name, place in (("draft", DRAFT_FILE), ("weights", WEIGHTS_FILE)):
                (directory / place).write_bytes(body if name == kind else good[name])
            DistilledDraft.load(directory).base("")
        else:
            return "no case"
    except (KeysError, ModelRefused) as refusal:
        return _refused(refusal, directory)
    except ValueError as refusal:
        if type(refusal) is not ValueError:
            raise
        return _refused(refusal, directory)
    return "read"


def _refused(refusal: Exception, directory: Path) -> str:
    assert str(directory) in str(refusal) or "target" in str(refusal), refusal
    assert "\n" not in str(refusal), refusal
    return "refused"


@asynccontextmanager
async def _files() -> AsyncIterator[Harness]:
    with tempfile.TemporaryDirectory() as directory:
        yield _Files(Path(directory))


FILES = {"files": Target(file_seeds, draw_file, _files)}
