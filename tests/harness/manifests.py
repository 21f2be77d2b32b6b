"""What was built, as Kubernetes reads it: objects by kind, pods, selectors, and the environment of a container."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from draft_service.config import DraftConfig
from orchestrator.config import OrchestratorConfig
from outrider.config import ServiceConfig
from target_service.config import TargetConfig

Object = dict[str, Any]

SERVICES: dict[str, type[ServiceConfig]] = {
    "orchestrator": OrchestratorConfig,
    "target": TargetConfig,
    "draft": DraftConfig,
}
# Made by operators; k8s/README.md says how.
OPERATOR_SECRETS = {
    "outrider-redis": {"password"},
    "outrider-keys": {"keys"},
    "outrider-huggingface": {"token"},
}
_EXPANDED = re.compile(r"\$\(([A-Za-z_]\w*)\)")


@dataclass(frozen=True)
class Pod:
    """A pod template of a Deployment or StatefulSet."""

    owner: Object

    @property
    def name(self) -> str:
        return str(self.owner["metadata"]["name"])

    @property
    def template(self) -> Object:
        return self.owner["spec"]["template"]  # type: ignore[no-any-return]

    @property
    def spec(self) -> Object:
        return self.template["spec"]  # type: ignore[no-any-return]

    @property
    def labels(self) -> dict[str, str]:
        return self.template["metadata"]["labels"]  # type: ignore[no-any-return]

    @property
    def container(self) -> Object:
        (one,) = self.spec["containers"]
        return one  # type: ignore[no-any-return]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]


class Manifests:
    """The objects of one build."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    def of(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        found = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        return found[0] if found else None

    @property
    def pods(self) -> list[Pod]:
        return [Pod(one) for one in self.of("Deployment", "StatefulSet")]

    @property
    def services(self) -> list[Pod]:
        """Pods of ours, not the store's."""
        return [pod for pod in self.pods if pod.component in SERVICES]

    def pod(self, component: str) -> Pod:
        (one,) = (pod for pod in self.pods if pod.component == component)
        return one

    def selected(self, selector: Object | None) -> list[Pod]:
        return [pod for pod in self.pods if matches(selector, pod.labels)]

    def secret_keys(self, name: str) -> set[str] | None:
        """Keys of a Secret: built, made by cert-manager, or made by the operator; None for one that there is not."""
        built = self.find("Secret", name)
        if built is not None:
            return {*built.get("data", {}), *built.get("stringData", {})}
        if any(one["spec"]["secretName"] == name for one in self.of("Certificate")):
            return {"tls.crt", "tls.key", "ca.crt"}
        return OPERATOR_SECRETS.get(name)

    def config_keys(self, name: str) -> set[str] | None:
        built = self.find("ConfigMap", name)
        return None if built is None else set(built["data"])

    def environment(self, pod: Pod) -> dict[str, str]:
        """What the container's process sees, with words in place of what only a cluster knows."""
        given: dict[str, str] = {}
        for source in pod.container.get("envFrom", ()):
            config = self.find("ConfigMap", source["configMapRef"]["name"])
            given |= config["data"] if config else {}
        for variable in pod.container.get("env", ()):
            value = variable.get("value")
            value = self._from(variable["valueFrom"], pod) if value is None else _expand(value, given)
            if value is not None:
                given[variable["name"]] = value
        return given

    def _from(self, source: Object, pod: Pod) -> str | None:
        if reference := source.get("configMapKeyRef"):
            config = self.find("ConfigMap", reference["name"])
            return None if config is None else config["data"].get(reference["key"])
        if reference := source.get("resourceFieldRef"):
            kind, _, resource = reference["resource"].partition(".")
            return str(math.ceil(_quantity(pod.container["resources"][kind][resource])))
        if reference := source.get("secretKeyRef"):
            return None if reference.get("optional") else f"secret-{reference['key']}"
        return str(source["fieldRef"]["fieldPath"])


def matches(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """A label selector; an empty one takes everything, None takes nothing."""
    if selector is None:
        return False
    plain = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in plain.items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def references(value: Any) -> Iterator[Object]:
    """Every mapping within."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from references(inner)


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }[expression["operator"]]


def _expand(value: str, given: Mapping[str, str]) -> str:
    return _EXPANDED.sub(lambda found: given.get(found[1], found[0]), value)


def expanded_names(value: str) -> set[str]:
    """The variables that $(NAME) in a value stands for."""
    return set(_EXPANDED.findall(value))


def _quantity(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
