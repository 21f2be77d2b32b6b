"""docker/ as data: what the Dockerfile sets, and the compose files with their defaults filled in."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from draft_service.config import DraftConfig
from orchestrator.config import OrchestratorConfig
from outrider.config import ServiceConfig
from target_service.config import TargetConfig
from tests.harness.processes import ROOT

DOCKER = ROOT / "docker"
COMPOSE = ("compose.yaml", "compose.gpu.yaml", "compose.observability.yaml")
CONFIGS: Mapping[str, type[ServiceConfig]] = {
    "orchestrator": OrchestratorConfig,
    "target": TargetConfig,
    "draft": DraftConfig,
}
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
# Read by the command line and by libraries; the rest of OUTRIDER_* are settings.
NO_SETTINGS = ("OUTRIDER_CACHE",)


def read(name: str) -> str:
    """A file of docker/."""
    return (DOCKER / name).read_text()


def with_defaults(text: str) -> str:
    """A file's text, with the defaults of its variables."""
    return VARIABLE.sub(lambda found: found[2] or "", text)


def compose(name: str) -> dict[str, Any]:
    """One file, with the defaults of its variables."""
    loaded = yaml.safe_load(with_defaults(read(name)))
    assert isinstance(loaded, dict)
    return loaded


def services(name: str) -> dict[str, dict[str, Any]]:
    """The services of one file."""
    return dict(compose(name)["services"])


def dockerfile_stages(text: str) -> dict[str, list[str]]:
    """Instructions of each named stage, continuation lines joined, without comments."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    stages: dict[str, list[str]] = {}
    for line in filter(None, joined.splitlines()):
        if line.startswith("FROM "):
            stages[line.split(" AS ")[1]] = current = []
        elif stages:
            current.append(line)
    return stages


def image_environment(service: str) -> dict[str, str]:
    """What the image of a service sets."""
    stages = dockerfile_stages(read("Dockerfile"))
    lines = [line for stage in ("service", service) for line in stages[stage] if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in lines for pair in line.removeprefix("ENV ").split())


def environments(service: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(files, variables of the container): compose.yaml alone, and with each layer."""
    base = image_environment(service) | _own("compose.yaml", service)
    yield "compose.yaml", base
    for layer in COMPOSE[1:]:
        yield layer, base | _own(layer, service)


def _own(name: str, service: str) -> dict[str, str]:
    variables = services(name).get(service, {}).get("environment", {})
    return {key: str(value) for key, value in variables.items()}


def unknown(variables: Mapping[str, str], config: type[ServiceConfig]) -> set[str]:
    """OUTRIDER_ variables that no setting reads."""
    known = {f"OUTRIDER_{name.upper()}" for name in config.model_fields} | set(NO_SETTINGS)
    return {name for name in variables if name.startswith("OUTRIDER_") and name not in known}


def scrape_targets() -> dict[str, int]:
    """Names that Prometheus looks up, with their ports."""
    jobs = yaml.safe_load(read("observability/prometheus.yaml"))["scrape_configs"]
    return {name: found["port"] for job in jobs for found in job["dns_sd_configs"] for name in found["names"]}
