"""docs/operations.md: a section for every alert, and no metric that there is not."""

import re
from pathlib import Path

from outrider.observe import catalogue
from tests.harness.processes import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
RULES = ROOT / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"


def alerts(rules: Path) -> list[str]:
    """Without a parser of YAML: an alert's name is all of its line."""
    return re.findall(r"^\s*(?:- )?alert: *[\"']?(\w+)", rules.read_text(), re.MULTILINE)


def test_every_alert_has_a_section() -> None:
    found = alerts(RULES)
    assert found
    sections = set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE))
    assert set(found) - sections == set()


def test_every_metric_of_the_page_is_one_of_ours() -> None:
    told = set(re.findall(r"`((?:outrider|gen_ai|process)_\w+)(?:\{.*?\})?`", PAGE))
    families = {each.prometheus_name for service in catalogue.EVERY for each in catalogue.of(service).values()}
    assert len(told) > 20
    assert told <= families | catalogue.series() | set(catalogue.PROCESS_METRICS)


def test_every_label_of_the_page_has_such_a_value() -> None:
    ours = {each.prometheus_name: each for service in catalogue.EVERY for each in catalogue.of(service).values()}
    for name, labels in re.findall(r"`(\w+)\{(.*?)\}`", PAGE):
        known = {label.prometheus_name: label.values for label in ours[name].labels}
        for key, value in re.findall(r"(\w+)=\"(.*?)\"", labels):
            assert value in known[key], f"{name} {key}={value}"
