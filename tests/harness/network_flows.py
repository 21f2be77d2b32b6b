"""What NetworkPolicies let through, as the standard says: policies add up, and a pod that none selects is open."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.harness.kustomize import NAMESPACE
from tests.harness.manifests import Manifests, Object, matches


@dataclass(frozen=True)
class Place:
    """One end of a connection: a pod, or an address outside where `address` is given."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""

    @property
    def all_namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace, **self.namespace_labels}


def allowed(manifests: Manifests, source: Place, destination: Place, port: int, protocol: str = "TCP") -> bool:
    """Whether both ends allow the connection."""
    ways = (("Egress", "egress", "to", source, destination), ("Ingress", "ingress", "from", destination, source))
    for kind, rules, peers, subject, other in ways:
        policies = [
            one["spec"]
            for one in manifests.of("NetworkPolicy")
            if not subject.address
            and subject.namespace == NAMESPACE
            and kind in one["spec"]["policyTypes"]
            and matches(one["spec"]["podSelector"], subject.labels)
        ]
        open_rules = [rule for policy in policies for rule in policy.get(rules, ())]
        if policies and not any(_lets(rule, peers, other, port, protocol) for rule in open_rules):
            return False
    return True


def _lets(rule: Object, peers: str, other: Place, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports and not any(one["port"] == port and one.get("protocol", "TCP") == protocol for one in ports):
        return False
    return peers not in rule or any(_is(peer, other) for peer in rule[peers])


def _is(peer: Object, other: Place) -> bool:
    if block := peer.get("ipBlock"):
        if not other.address:
            return False
        address = ipaddress.ip_address(other.address)
        inside = [address in ipaddress.ip_network(one) for one in (block["cidr"], *block.get("except", ()))]
        return inside[0] and not any(inside[1:])
    if other.address:
        return False
    here = other.namespace == NAMESPACE
    there = matches(peer["namespaceSelector"], other.all_namespace_labels) if "namespaceSelector" in peer else here
    return there and ("podSelector" not in peer or matches(peer["podSelector"], other.labels))
