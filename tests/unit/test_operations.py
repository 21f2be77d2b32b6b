"""docs/operations.md: its table of reasons is that of the code, and its example is what the command prints."""

import re
import shlex

from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.client.progress import _RETRIED
from outrider.net.errors import CODES, reason_name
from outrider.v1 import types_pb2
from tests.harness.processes import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
RETRYING = ("goes on elsewhere", "comes again")


def test_every_reason_is_told_with_its_status_and_what_clients_do() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    told = {reason: (status, client.startswith(RETRYING)) for reason, status, client, _ in rows}
    assert len(told) == len(rows)
    reasons = [each for each in types_pb2.ErrorReason.values() if each != types_pb2.ERROR_REASON_UNSPECIFIED]
    assert told == {reason_name(each): (CODES[each].name, each in _RETRIED) for each in reasons}


def test_every_link_within_the_page_leads_somewhere() -> None:
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(.*?)\)", PAGE)) <= anchors


def test_the_example_is_what_plan_prints() -> None:
    (command,) = re.findall(r"^outrider (plan .*)$", PAGE, re.MULTILINE)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0
    printed = "\n".join(line.rstrip() for line in result.output.splitlines())
    assert f"```\n{printed}\n```" in PAGE
