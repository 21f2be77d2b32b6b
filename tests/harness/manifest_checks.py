"""What must hold between the objects of a build, and no schema sees. Each check yields one sentence for each fault."""

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import huggingface_hub.constants
import opentelemetry.sdk.environment_variables as otel

from orchestrator.discovery import parse_sources
from outrider import __version__
from outrider.config import ConfigError, parse_config
from outrider.net.server import LIVENESS
from outrider.observe import catalogue
from tests.harness.manifests import SERVICES, Manifests, Object, Pod, expanded_names, references

Check = Callable[[Manifests], Iterator[str]]

# docs/reliability.md, "Ending a process": beyond --grace.
ENDING_SECONDS = 16
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_SERIES = re.compile(r"\b(outrider_\w+|gen_ai_\w+)\b")


def names(built: Manifests) -> Iterator[str]:
    """Names are unique, and everything is in one namespace."""
    seen: set[tuple[str, str]] = set()
    for one in built.objects:
        key = one["kind"], one["metadata"]["name"]
        if key in seen:
            yield f"{key} is there twice"
        seen.add(key)
        namespace = one["metadata"]["name"] if one["kind"] == "Namespace" else one["metadata"].get("namespace")
        if namespace != built.of("Namespace")[0]["metadata"]["name"]:
            yield f"{key} is in the namespace {namespace}"


def selectors(built: Manifests) -> Iterator[str]:
    """Whatever selects pods selects those that it is named after, or at least one."""
    for pod in built.pods:
        if pod not in built.selected(pod.owner["spec"]["selector"]):
            yield f"{pod.name}: its selector does not select its own pods"
        for spread in pod.spec.get("topologySpreadConstraints", ()):
            if built.selected(spread["labelSelector"]) != [pod]:
                yield f"{pod.name}: a topology spread constraint is about other pods"
    for one in built.of("Service", "PodDisruptionBudget"):
        selector = one["spec"]["selector"]
        found = built.selected({"matchLabels": selector} if one["kind"] == "Service" else selector)
        if len(found) != 1 or not one["metadata"]["name"].startswith(found[0].name):
            yield f"{one['kind']} {one['metadata']['name']} selects {[pod.name for pod in found]}"
    for one in built.of("PodMonitor"):
        if built.selected(one["spec"]["selector"]) != built.services:
            yield f"PodMonitor {one['metadata']['name']} does not select the three services"
    for one in built.of("NetworkPolicy"):
        if not built.selected(one["spec"]["podSelector"]) and "redis" not in one["metadata"]["name"]:
            yield f"NetworkPolicy {one['metadata']['name']} is about no pod"


def budgets(built: Manifests) -> Iterator[str]:
    """Each service has a disruption budget that lets one pod go."""
    for pod in built.services:
        found = built.find("PodDisruptionBudget", pod.name)
        if found is None or found["spec"].get("maxUnavailable") != 1:
            yield f"{pod.name} has no disruption budget that lets one pod go at a time"


def ports(built: Manifests) -> Iterator[str]:
    """Services, monitors and probes use ports that containers have; containers have those that they listen on."""
    for one in built.of("Service"):
        for pod in built.selected({"matchLabels": one["spec"]["selector"]}):
            known = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
            for port in one["spec"]["ports"]:
                if known.get(port["targetPort"]) != port["port"]:
                    yield f"Service {one['metadata']['name']}: {port} is no port of {pod.name}, which has {known}"
    for one in built.of("PodMonitor"):
        for endpoint, pod in ((end, pod) for end in one["spec"]["podMetricsEndpoints"] for pod in built.services):
            if endpoint["port"] not in {port["name"] for port in pod.container["ports"]}:
                yield f"PodMonitor: {pod.name} has no port {endpoint['port']}"
    for pod in built.services:
        given = built.environment(pod)
        listens = {
            "grpc": given.get("OUTRIDER_PORT"),
            "health": given.get("OUTRIDER_HEALTH_ADDRESS", "").rpartition(":")[2],
            "metrics": given.get("OUTRIDER_METRICS_ADDRESS", "").rpartition(":")[2],
        }
        has = {port["name"]: str(port["containerPort"]) for port in pod.container["ports"]}
        if listens != has:
            yield f"{pod.name} listens on {listens} and has the ports {has}"
        for probe in PROBES:
            if str(pod.container.get(probe, {}).get("grpc", {}).get("port")) != listens["health"]:
                yield f"{pod.name}: its {probe} does not ask the health port"


def probes(built: Manifests) -> Iterator[str]:
    """A load is waited for, a hang is not, and readiness decides about traffic."""
    for pod in built.services:
        asked = {probe: pod.container[probe]["grpc"].get("service", "") for probe in PROBES}
        startup = LIVENESS if pod.component == "orchestrator" else ""
        if asked != {"startupProbe": startup, "readinessProbe": "", "livenessProbe": LIVENESS}:
            yield f"{pod.name}: probes ask for {asked}"
        start = pod.container["startupProbe"]
        budget = start["periodSeconds"] * start["failureThreshold"]
        if budget < (300 if pod.component == "orchestrator" else 1800):
            yield f"{pod.name}: {budget} s are little for a load"
        if pod.owner["spec"]["progressDeadlineSeconds"] <= budget:
            yield f"{pod.name}: a rollout is given up before its pods have started"


def endings(built: Manifests) -> Iterator[str]:
    """Kubernetes waits longer than a drain takes; the endpoints of what clients call go first."""
    for pod in built.services:
        before = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        takes = before + float(built.environment(pod).get("OUTRIDER_GRACE", 10)) + ENDING_SECONDS
        if pod.spec["terminationGracePeriodSeconds"] < takes:
            yield f"{pod.name} is killed after {pod.spec['terminationGracePeriodSeconds']} s; ending may take {takes} s"
        if pod.spec.get("shareProcessNamespace") is not True:
            yield f"{pod.name} is deaf to SIGTERM while it starts"
        if pod.component == "orchestrator" and before < 5:
            yield f"{pod.name} ends before proxies have forgotten it"
    for scaler in built.of("HorizontalPodAutoscaler", "ScaledObject"):
        spec = scaler["spec"]
        behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        pod = next((pod for pod in built.services if pod.name == spec["scaleTargetRef"]["name"]), None)
        (policy,) = behavior["scaleDown"]["policies"]
        if pod and policy["periodSeconds"] < pod.spec["terminationGracePeriodSeconds"]:
            yield f"{scaler['metadata']['name']} shrinks faster than its pods drain"


def referred(built: Manifests) -> Iterator[str]:
    """Every ConfigMap, Secret, claim, key and volume that is named exists, and every ConfigMap is used: by a pod, or
    by Grafana's sidecar, which goes by a label."""
    used: set[str] = set()
    for pod in built.pods:
        for name, keys, known, optional in _named(built, pod):
            used.add(name)
            if known is None and not optional:
                yield f"{pod.name} names {name}, which nobody makes"
            elif known is not None and not keys <= known:
                yield f"{pod.name} names {sorted(keys - known)} of {name}, which has {sorted(known)}"
        volumes = {one["name"] for one in pod.spec.get("volumes", ())}
        volumes |= {one["metadata"]["name"] for one in pod.owner["spec"].get("volumeClaimTemplates", ())}
        mounted = {one["name"] for one in pod.container.get("volumeMounts", ())}
        if volumes != mounted:
            yield f"{pod.name} has the volumes {sorted(volumes)} and mounts {sorted(mounted)}"
        for volume in pod.spec.get("volumes", ()):
            claim = volume.get("persistentVolumeClaim")
            if claim and built.find("PersistentVolumeClaim", claim["claimName"]) is None:
                yield f"{pod.name}: there is no claim {claim['claimName']}"
    for one in built.of("ConfigMap", "Secret"):
        if one["metadata"]["name"] not in used and "grafana_dashboard" not in one["metadata"].get("labels", {}):
            yield f"{one['kind']} {one['metadata']['name']} is used by nobody"
    for one in built.of("Certificate", "Issuer"):
        issuer = one["spec"].get("issuerRef", {}).get("name")
        if issuer and built.find("Issuer", issuer) is None:
            yield f"Certificate {one['metadata']['name']}: there is no issuer {issuer}"
        authority = one["spec"].get("ca", {}).get("secretName")
        if authority and built.secret_keys(authority) is None:
            yield f"Issuer {one['metadata']['name']}: there is no Secret {authority}"


def variables(built: Manifests) -> Iterator[str]:
    """Every variable that is set is one that the service reads, and all of them together are good settings."""
    for pod in built.services:
        given = built.environment(pod)
        entries = pod.container.get("env", ())
        inner = set().union(*(expanded_names(one.get("value", "")) for one in entries))
        for name in sorted(inner - given.keys()):
            yield f"{pod.name}: $({name}) stands for nothing"
        for name in given:
            if name not in inner and not _reads(pod, name):
                yield f"{pod.name} is given {name}, which it does not read"
        doubled = [one["name"] for one in entries]
        doubled += [key for source in pod.container.get("envFrom", ()) for key in _content(built, source)]
        if len(set(doubled)) < len(doubled):
            yield f"{pod.name}: a variable is set twice: {sorted(doubled)}"
        try:
            with patch.dict(os.environ, given, clear=True):
                parse_config(SERVICES[pod.component], [])
        except ConfigError as error:
            yield f"{pod.name}: {error}"


def addresses(built: Manifests) -> Iterator[str]:
    """Names in settings are those of Services that lead to the right pods on the right port."""
    pod = built.pod("orchestrator")
    given = built.environment(pod)
    for setting, component in (("OUTRIDER_TARGETS", "target"), ("OUTRIDER_DRAFTS", "draft")):
        sources = parse_sources(given.get(setting, ""))
        for name, port in sources.names or [("", 0)]:
            yield from _leads(built, setting, name, port, component, headless=True)
    store = urlsplit(given.get("OUTRIDER_STORE", ""))
    if any(one.component == "redis" for one in built.pods):
        yield from _leads(built, "OUTRIDER_STORE", store.hostname or "", store.port or 0, "redis", headless=False)
    elif built.find("Service", store.hostname or "") or "." not in (store.hostname or ""):
        yield f"OUTRIDER_STORE names {store.hostname}, and there is no such store here"
    for setting, component in (("OUTRIDER_TARGET_TLS_NAME", "target"), ("OUTRIDER_DRAFT_TLS_NAME", "draft")):
        if name := given.get(setting):
            secret = {one["secret"]["secretName"] for one in built.pod(component).spec["volumes"] if "secret" in one}
            if not any(name in one["spec"]["dnsNames"] for one in _certificates(built, secret)):
                yield f"{setting} is {name}, which stands in no certificate of the {component}s"
    if tls := given.get("OUTRIDER_TLS_CERT"):
        secret = {_volume_of(pod, tls)["secret"]["secretName"]}
        served = {name for one in _certificates(built, secret) for name in one["spec"]["dnsNames"]}
        space = built.of("Namespace")[0]["metadata"]["name"]
        for service in (one["metadata"]["name"] for one in built.of("Service") if pod in _behind(built, one)):
            if missing := {service, f"{service}.{space}", f"{service}.{space}.svc"} - served:
                yield f"the edge's certificate lacks {sorted(missing)}"


def models(built: Manifests) -> Iterator[str]:
    """Orchestrators use the tokenizer of the targets' model, and targets of that model alone."""
    served = built.environment(built.pod("target")).get("OUTRIDER_MODEL")
    given = built.environment(built.pod("orchestrator"))
    for name in ("OUTRIDER_TOKENIZER", "OUTRIDER_TARGET_MODEL"):
        if given.get(name) != served:
            yield f"{name} is {given.get(name)}, and targets serve {served}"


def store(built: Manifests) -> Iterator[str]:
    """Orchestrators speak TLS to the bundled store where it does, and can check its certificate."""
    pod = built.pod("orchestrator")
    url = urlsplit(built.environment(pod).get("OUTRIDER_STORE", ""))
    server = next((one for one in built.pods if one.component == "redis"), None)
    if server is None:
        return
    config = _volume_of(server, "/etc/redis/redis.conf")
    held = built.find("ConfigMap", config["configMap"]["name"]) if config else None
    speaks = held is not None and "tls-port" in held["data"].get("tls.conf", "")
    if speaks != (url.scheme == "rediss"):
        yield f"OUTRIDER_STORE is {url.scheme}://, and the store {'speaks' if speaks else 'has no'} TLS"
    if not speaks:
        return
    (shown,) = _certificates(built, {one["secret"]["secretName"] for one in server.spec["volumes"] if "secret" in one})
    if url.hostname not in shown["spec"]["dnsNames"]:
        yield f"OUTRIDER_STORE names {url.hostname}, which stands in no certificate of the store"
    authority = "".join(parse_qs(url.query).get("ssl_ca_certs", []))
    volume = _volume_of(pod, authority)
    known = _certificates(built, {volume["secret"]["secretName"]}) if volume and "secret" in volume else []
    if [one["spec"]["issuerRef"] for one in known] != [shown["spec"]["issuerRef"]]:
        yield f"OUTRIDER_STORE: {authority} is not from who signs the store's certificate"


def files(built: Manifests) -> Iterator[str]:
    """Files in settings lie in volumes that have them; directories that are written to are writable."""
    for pod in built.services:
        given = built.environment(pod)
        for name, value in given.items():
            if not value.startswith("/"):
                continue
            volume = _volume_of(pod, value)
            if volume is None:
                yield f"{pod.name}: {name}={value} lies in no volume"
            elif "secret" in volume and PurePosixPath(value).name not in _files(built, volume):
                yield f"{pod.name}: {name}={value}, but the volume has {sorted(_files(built, volume))}"
        if (home := _volume_of(pod, given.get("HF_HOME", ""))) is None or "secret" in home:
            yield f"{pod.name} cannot write to HF_HOME"
        if (scratch := _volume_of(pod, "/tmp/x")) is None or "emptyDir" not in scratch:
            yield f"{pod.name} has no /tmp to write to"


def security(built: Manifests) -> Iterator[str]:
    """What the Pod Security Standard "restricted" asks for, and more."""
    for pod in built.pods:
        spec, own = pod.spec, pod.container.get("securityContext", {})
        context = spec.get("securityContext", {})
        wanted = {
            "runs as root": context.get("runAsNonRoot") is True and context.get("runAsUser") == 10_001,
            "has groups of its own": context.get("fsGroup") == 10_001 and context.get("runAsGroup") == 10_001,
            "has no seccomp profile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
            "may gain privileges": own.get("allowPrivilegeEscalation") is False,
            "can write to its image": own.get("readOnlyRootFilesystem") is True,
            "has capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "has a token for the API server": spec.get("automountServiceAccountToken") is False,
            "is given variables of Services": spec.get("enableServiceLinks") is False,
            "has no memory limit": "memory" in pod.container["resources"].get("limits", {}),
            "requests nothing": {"cpu", "memory"} <= pod.container["resources"].get("requests", {}).keys(),
            "mounts by subPath": not any("subPath" in one for one in pod.container.get("volumeMounts", ())),
        }
        yield from (f"{pod.name} {fault}" for fault, well in wanted.items() if not well)
    levels = built.of("Namespace")[0]["metadata"]["labels"]
    if levels.get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "the namespace does not enforce the restricted standard"


def pools(built: Manifests) -> Iterator[str]:
    """Images have versions; GPUs go with the images, the device and the nodes that they need, apart for each pool."""
    for pod in built.pods:
        _, colon, tag = pod.container["image"].rpartition(":")
        gpu = "nvidia.com/gpu" in pod.container["resources"]["limits"]
        if pod.component in SERVICES and tag != __version__ + ("-cuda" if gpu else ""):
            yield f"{pod.name} runs {pod.container['image']}"
        if not colon or "/" in tag or tag in ("", "latest"):
            yield f"{pod.name}: its image has no version"
        device = built.environment(pod).get("OUTRIDER_DEVICE") if pod.component in SERVICES else None
        if gpu != (device == "cuda") or gpu != bool(pod.spec.get("nodeSelector")):
            yield f"{pod.name}: GPU, device and nodes do not go together"
        for key, value in pod.spec.get("nodeSelector", {}).items():
            if not any(one["key"] == key and one.get("value") == value for one in pod.spec.get("tolerations", ())):
                yield f"{pod.name} does not tolerate the taint {key}={value}"
    places = [str(pod.spec.get("nodeSelector")) for pod in built.services if pod.component != "orchestrator"]
    if "None" not in places and len(set(places)) < len(places):
        yield "both pools want the same nodes"


def scaling(built: Manifests) -> Iterator[str]:
    """A scaler has a Deployment of its own, whose number nobody else says."""
    seen: set[str] = set()
    for one in built.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = one["spec"]["scaleTargetRef"]
        found = built.find(target["kind"], target["name"])
        if found is None:
            yield f"{one['metadata']['name']} scales {target['name']}, which there is not"
        elif "replicas" in found["spec"]:
            yield f"{target['name']} is scaled, and has replicas as well"
        if target["name"] in seen:
            yield f"{target['name']} is scaled twice"
        seen.add(target["name"])


def metrics(built: Manifests) -> Iterator[str]:
    """Every metric that is named exists, and the pool that it scales has it."""
    for one in built.of("HorizontalPodAutoscaler"):
        for metric in one["spec"]["metrics"]:
            if metric["type"] == "Pods":
                yield from _had_by(metric["pods"]["metric"]["name"], one["spec"]["scaleTargetRef"]["name"])
    for one in built.of("ScaledObject"):
        for query in (trigger["metadata"].get("query", "") for trigger in one["spec"]["triggers"]):
            for series in _SERIES.findall(query):
                yield from _had_by(series, one["spec"]["scaleTargetRef"]["name"])
                space = built.of("Namespace")[0]["metadata"]["name"]
                component = one["metadata"]["labels"]["app.kubernetes.io/component"]
                if f'namespace="{space}",app_kubernetes_io_component="{component}"' not in query:
                    yield f"ScaledObject {one['metadata']['name']} asks for others' series: {query}"
    for one in built.of("PrometheusRule"):
        rules = [rule for group in one["spec"]["groups"] for rule in group["rules"]]
        recorded = {rule["record"] for rule in rules if "record" in rule}
        for rule in rules:
            for series in set(_SERIES.findall(rule["expr"])) - recorded - catalogue.series():
                yield f"PrometheusRule: {series} is no metric"


CHECKS: dict[str, Check] = {
    one.__name__: one
    for one in (
        *(names, selectors, budgets, ports, probes, endings, referred, variables),
        *(addresses, models, store, files, security, pools, scaling, metrics),
    )
}


def problems(built: Manifests) -> list[str]:
    """What all the checks find."""
    return [f"{name}: {fault}" for name, check in CHECKS.items() for fault in check(built)]


def _had_by(series: str, deployment: str) -> Iterator[str]:
    if series not in catalogue.series(deployment.removeprefix("outrider-")):
        yield f"{deployment} is scaled by {series}, which it does not have"


def _reads(pod: Pod, name: str) -> bool:
    if name.startswith("OUTRIDER_"):
        return name.removeprefix("OUTRIDER_").lower() in SERVICES[pod.component].model_fields
    if name.startswith("OTEL_"):
        return name in vars(otel)
    return name.startswith("HF_") and f'"{name}"' in _source(huggingface_hub.constants.__file__)


@functools.cache
def _source(path: str) -> str:
    with open(path) as file:
        return file.read()


def _content(built: Manifests, source: Object) -> set[str]:
    return built.config_keys(source["configMapRef"]["name"]) or set()


def _named(built: Manifests, pod: Pod) -> Iterator[tuple[str, set[str], set[str] | None, bool]]:
    """(name, keys, keys that there are, whether it may be missing) of what a pod names."""
    for one in references(pod.spec):
        for kind, known in (("configMap", built.config_keys), ("secret", built.secret_keys)):
            for field in (f"{kind}KeyRef", f"{kind}Ref"):
                if reference := one.get(field):
                    keys = {reference["key"]} if "key" in reference else set()
                    yield reference["name"], keys, known(reference["name"]), bool(reference.get("optional"))
            if volume := one.get(kind):
                name = volume["secretName"] if kind == "secret" else volume["name"]
                yield name, {item["key"] for item in volume.get("items", ())}, known(name), False


def _leads(built: Manifests, setting: str, name: str, port: int, component: str, *, headless: bool) -> Iterator[str]:
    service = built.find("Service", name)
    if service is None:
        yield f"{setting} names {name!r}, which is no Service"
        return
    if [pod.component for pod in _behind(built, service)] != [component]:
        yield f"{setting}: {name} does not lead to {component}"
    if port not in {one["port"] for one in service["spec"]["ports"]}:
        yield f"{setting}: {name} has no port {port}"
    if headless != (service["spec"].get("clusterIP") == "None"):
        yield f"{setting}: {name} is {'not ' if headless else ''}headless"
    if headless and not service["spec"].get("publishNotReadyAddresses"):
        yield f"{setting}: {name} hides workers from orchestrators that watch their health themselves"


def _behind(built: Manifests, service: Object) -> list[Pod]:
    return built.selected({"matchLabels": service["spec"]["selector"]})


def _certificates(built: Manifests, secrets: set[str]) -> list[Object]:
    return [one for one in built.of("Certificate") if one["spec"]["secretName"] in secrets]


def _volume_of(pod: Pod, path: str) -> Object | None:
    """The volume that a path lies in."""
    for mount in pod.container.get("volumeMounts", ()):
        if PurePosixPath(path).is_relative_to(mount["mountPath"]):
            return next((one for one in pod.spec["volumes"] if one["name"] == mount["name"]), None)
    return None


def _files(built: Manifests, volume: Object) -> set[str]:
    secret = volume["secret"]
    if "items" in secret:
        return {item["path"] for item in secret["items"]}
    return built.secret_keys(secret["secretName"]) or set()
