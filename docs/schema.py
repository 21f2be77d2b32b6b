"""Writes docs/benchmark.schema.json from the classes of the report: `python docs/schema.py` (or `make docs`)."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider.bench.report import Report

FILE = Path(__file__).with_name("benchmark.schema.json")


def page() -> str:
    """The whole file."""
    return json.dumps(Report.model_json_schema(mode="serialization"), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(page())
