"""The drafts that come with the sources."""

import json
from pathlib import Path

import outrider
from outrider.lm.engine import ModelRefused
from outrider.lm.source import DRAFT_FILE, parse_source

MODELS = Path(outrider.__file__).resolve().parents[1] / "models"


def shipped_draft(target: str, models: Path = MODELS) -> str:
    """MODEL of the draft that was distilled for this one; "" when there is none."""
    try:
        name = parse_source(target).portable_name
    except ModelRefused:  # its service says why
        return ""
    files = sorted(models.glob(f"*/{DRAFT_FILE}"))
    return next((str(file.parent) for file in files if json.loads(file.read_text())["target"] == name), "")
