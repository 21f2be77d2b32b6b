"""Writes docs/configuration.md from the settings classes: `python docs/configuration.py` (or `make docs`)."""

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic.fields import FieldInfo

from draft_service.config import DraftConfig
from orchestrator.config import OrchestratorConfig
from outrider.config import ServiceConfig, WorkerConfig
from target_service.config import TargetConfig

PAGE = Path(__file__).with_suffix(".md")

_HEAD = """\
# Configuration

Each service takes flags and environment variables; a flag wins over its variable, a variable over the default. Values
are checked once, at start: what is wrong is one line that names the flag, and exit code 2. `outrider up` sets the flags
that it needs itself and hands its environment on, so that a variable reaches the services behind it as well.

This page is written by `make docs` from the classes that the services read; a test fails when it is not up to date.
"""

_TAIL = """\
## The command line

| variable | default | what |
| --- | --- | --- |
| `OUTRIDER_ADDRESS` | 127.0.0.1:7800 | orchestrator that `outrider generate`, `info` and `doctor` call |
| `OUTRIDER_TOKEN` | | bearer token that they send; `--token-file` is another way |
| `OUTRIDER_CLIENT_TLS_CA`, `_CERT`, `_KEY` | | PEM files, as `--tls-ca`, `--tls-cert` and `--tls-key` |
| `OUTRIDER_CACHE` | `.cache` beside the sources | where the demo keeps its model |
| `OUTRIDER_KERNELS` | | `0` or `off` leaves everything on a CPU to torch (performance.md) |
| `NO_COLOR` | | when set, tokens are not coloured |

Models from the Hugging Face Hub follow the variables of `huggingface_hub`: `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
`outrider COMMAND --help` lists the flags of the commands.
"""


def page() -> str:
    """The whole page."""
    sections = [
        ("Every service", ServiceConfig, None),
        ("Both workers", WorkerConfig, ServiceConfig),
        ("Target worker: `python -m target_service`", TargetConfig, WorkerConfig),
        ("Draft worker: `python -m draft_service`", DraftConfig, WorkerConfig),
        ("Orchestrator: `python -m orchestrator`", OrchestratorConfig, ServiceConfig),
    ]
    return "\n".join([_HEAD, *(_section(*section) for section in sections), _TAIL])


def _section(title: str, config: type[ServiceConfig], above: type[ServiceConfig] | None) -> str:
    """The settings of a class that the class above it does not have, or has with another default."""
    known = above.model_fields if above else {}
    own = {name: field for name, field in config.model_fields.items() if _changed(field, known.get(name))}
    rows = [_row(name, field) for name, field in own.items()]
    return "\n".join([f"## {title}\n", "| flag | variable | default | values | what |", "| --- " * 5 + "|", *rows, ""])


def _changed(field: FieldInfo, above: FieldInfo | None) -> bool:
    return above is None or (field.default, field.description) != (above.default, above.description)


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else str(field.default) or "none"
    cells = (f"`--{name.replace('_', '-')}`", f"`OUTRIDER_{name.upper()}`", default, _values(field), field.description)
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _values(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(get_args(field.annotation))
    limits: dict[str, Any] = {}
    for limit in field.metadata:
        limits |= {key: getattr(limit, key) for key in ("ge", "gt", "le") if hasattr(limit, key)}
    words = {"ge": "at least", "gt": "above", "le": "at most"}
    if {"ge", "le"} <= limits.keys():
        return f"{limits['ge']} to {limits['le']}"
    return ", ".join(f"{words[key]} {value}" for key, value in limits.items()) or "text"


if __name__ == "__main__":
    PAGE.write_text(page())
