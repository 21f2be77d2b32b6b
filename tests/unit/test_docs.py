"""The documentation holds what the code does."""

import importlib.util

from tests.harness.processes import ROOT


def test_configuration_page_has_every_setting() -> None:
    """`make docs` writes it anew."""
    spec = importlib.util.spec_from_file_location("configuration", ROOT / "docs" / "configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text() == module.page()
