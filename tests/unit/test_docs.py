"""The documentation holds what the code does."""

import importlib.util
from types import ModuleType

from outrider.observe.catalogue import series
from tests.harness.processes import ROOT


def script(name: str) -> ModuleType:
    """A script of docs/, which `make docs` runs."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_has_every_setting() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == script("configuration").page()


def test_metrics_page_has_every_instrument_and_queries_that_exist() -> None:
    metrics = script("metrics")
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics.page()
    assert {name for _, *names in metrics.RECIPES for name in names} <= series()


def test_schema_of_the_benchmark_report_is_that_of_its_classes() -> None:
    assert (ROOT / "docs" / "benchmark.schema.json").read_text() == script("schema").page()
