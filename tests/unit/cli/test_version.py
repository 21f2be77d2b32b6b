"""`outrider --version`: what docs/operations.md (Upgrade) asks for before a new release is put beside an old one."""

from typer.testing import CliRunner

from orchestrator.store import scripts
from outrider import __version__
from outrider.cli.main import app
from outrider.law.params import LAW_VERSION
from outrider.v1 import orchestrator_pb2
from tests.harness.processes import ROOT


def test_it_tells_all_that_an_upgrade_may_change() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    release, law, protocol, records = done.output.strip().split(", ")
    assert release == f"outrider {__version__}"
    assert law == f"law {LAW_VERSION}"
    assert protocol == f"protocol {orchestrator_pb2.DESCRIPTOR.package}"
    assert f"'version', '{records.removeprefix('session records ')}'" in scripts.CREATE.text


def test_the_page_says_where_to_read_it() -> None:
    assert "outrider --version" in (ROOT / "docs" / "operations.md").read_text()
