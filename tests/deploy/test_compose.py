"""The compose files: valid, locked down, and in agreement with the services and with each other."""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.discovery import parse_sources
from outrider import __version__
from outrider.config import ConfigError, parse_config
from tests.deploy import docker_files
from tests.deploy.docker_files import (
    COMPOSE,
    CONFIGS,
    DOCKER,
    VARIABLE,
    compose,
    dockerfile_stages,
    environments,
    read,
    scrape_targets,
    services,
    unknown,
)

OTEL = re.compile(r"OTEL_(EXPORTER_OTLP_(ENDPOINT|PROTOCOL)|TRACES_SAMPLER(_ARG)?|RESOURCE_ATTRIBUTES)")
ELSEWHERE = {"HF_TOKEN", "HF_HUB_OFFLINE"}


def schema_errors(*paths: Path) -> str:
    """What the compose specification's own schema has against files."""
    checker = Path(sysconfig.get_path("scripts")) / "check-jsonschema"
    command = [checker, "--builtin-schema", "vendor.compose-spec", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


def test_compose_files_follow_the_specification() -> None:
    assert schema_errors(*(DOCKER / name for name in COMPOSE)) == ""


def test_the_specification_has_something_against_a_misspelled_key(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(read("compose.yaml").replace("cap_drop:", "cap_drops:"))
    assert "cap_drops" in schema_errors(wrong)


@pytest.mark.parametrize("service", CONFIGS)
def test_services_read_and_accept_every_variable(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for files, variables in environments(service):
        assert unknown(variables, CONFIGS[service]) == set(), files
        others = {name for name in variables if not name.startswith("OUTRIDER_")}
        assert all(OTEL.fullmatch(name) for name in others - ELSEWHERE - image_only()), files
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            config = parse_config(CONFIGS[service], [])
        assert config.host == "0.0.0.0"
        assert config.grace < seconds(services("compose.yaml")[service]["stop_grace_period"])


def test_a_misspelled_variable_or_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, variables = next(environments("draft"))
    assert unknown(variables | {"OUTRIDER_MODELL": "x"}, CONFIGS["draft"]) == {"OUTRIDER_MODELL"}
    for name, value in (variables | {"OUTRIDER_PROPOSERS": "modell"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="modell"):
        parse_config(CONFIGS["draft"], [])


def image_only() -> set[str]:
    """Variables of the image that are Python's and its libraries' affair."""
    return {"PATH", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "HOME", "HF_HOME"}


def seconds(duration: str) -> float:
    """30s or 5m."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def port_faults(name: str = "compose.yaml") -> list[str]:
    """Where the ports of images, settings, addresses, publications and Prometheus differ."""
    stages = dockerfile_stages(read("Dockerfile"))
    ports, faults = {}, []
    for service in CONFIGS:
        _, variables = next(environments(service))
        ports[service] = int(variables["OUTRIDER_PORT"])
        metrics = int(variables["OUTRIDER_METRICS_ADDRESS"].rpartition(":")[2])
        if f"EXPOSE {ports[service]} {metrics}" not in stages[service]:
            faults.append(f"{service} exposes other ports")
        if scrape_targets().get(service) != metrics:
            faults.append(f"{service} is not scraped at {metrics}")
    _, variables = next(environments("orchestrator"))
    for service, variable in (("target", "OUTRIDER_TARGETS"), ("draft", "OUTRIDER_DRAFTS")):
        if variables[variable] != f"dns:{service}:{ports[service]}":
            faults.append(f"{variable} is {variables[variable]}")
        parse_sources(variables[variable])
    published = services(name)["orchestrator"]["ports"]
    return faults if published == [f"127.0.0.1:7800:{ports['orchestrator']}"] else [*faults, f"published: {published}"]


def test_ports_agree() -> None:
    assert port_faults() == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("compose.yaml", "dns:draft:7802", "dns:draft:7801", "OUTRIDER_DRAFTS"),
        ("compose.yaml", "0.0.0.0:9464", "0.0.0.0:9465", "exposes other ports"),
        ("Dockerfile", "EXPOSE 7801", "EXPOSE 7800", "target exposes"),
        ("compose.yaml", '}:7800"]', '}:7801"]', "published"),
    ],
)
def test_a_port_that_differs_is_seen(mutated: "Mutate", file: str, old: str, new: str, fault: str) -> None:
    mutated(file, old, new)
    assert fault in " ".join(port_faults())


def loose_ends(name: str) -> list[str]:
    """Services that are not locked down, bounded and pinned as they should be."""
    faults = []
    for service, spec in services(name).items():
        ours = service in CONFIGS
        if name == "compose.yaml" or not ours:
            hard = spec.get("read_only") and spec.get("cap_drop") == ["ALL"]
            if not hard or spec.get("security_opt") != ["no-new-privileges:true"]:
                faults.append(f"{service} has rights that it does not need")
            if not {"cpus", "memory"} <= set(spec.get("deploy", {}).get("resources", {}).get("limits", {})):
                faults.append(f"{service} has no limits")
        image, _, tag = spec.get("image", f"x:{__version__}").rpartition(":")
        pinned = tag.removesuffix("-cuda") == __version__ if ours else bool(re.match(r"v?\d+\.\d+", tag))
        if not image or not pinned:
            faults.append(f"{service} has the image {spec['image']}")
        if any(not port.startswith("127.0.0.1:") for port in spec.get("ports", [])):
            faults.append(f"{service} listens beyond this machine")
    return faults


@pytest.mark.parametrize("name", COMPOSE)
def test_services_are_locked_down_bounded_and_pinned(name: str) -> None:
    assert loose_ends(name) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("compose.yaml", "read_only: true", "read_only: false", "target has rights"),
        ("compose.observability.yaml", "prometheus:v3.5.0", "prometheus:latest", "prometheus has the image"),
        ("compose.observability.yaml", "127.0.0.1:3000", "3000", "grafana listens"),
        ("compose.yaml", 'limits: {cpus: "1", memory', 'limits: {cpus: "1", memery', "redis has no limits"),
    ],
)
def test_a_loose_end_is_seen(mutated: "Mutate", file: str, old: str, new: str, fault: str) -> None:
    mutated(file, old, new)
    assert fault in " ".join(loose_ends(file))


def undocumented() -> set[tuple[str, str]]:
    """(variable, default) of the compose files that .env.example has not, or has otherwise."""
    used = {found for name in COMPOSE for found in VARIABLE.findall(read(name))}
    shown = dict(re.findall(r"^#([A-Z_]+)=(.*)$", read(".env.example"), re.MULTILINE))
    layers = {("TARGET_MEMORY", "32g"), ("DRAFT_MEMORY", "16g")}  # compose.gpu.yaml's own
    return {(name, default) for name, default in used - layers if shown.get(name) != default}


def test_every_variable_of_the_compose_files_is_documented_with_its_default() -> None:
    assert undocumented() == set()


def test_a_default_that_differs_is_seen(mutated: "Mutate") -> None:
    mutated("compose.yaml", "TARGET_CPUS:-2", "TARGET_CPUS:-3")
    assert undocumented() == {("TARGET_CPUS", "3")}


def test_what_is_mounted_is_there() -> None:
    for name in COMPOSE:
        for service, spec in services(name).items():
            for volume in spec.get("volumes", []):
                source = volume.split(":")[0]
                known = source in compose("compose.yaml")["volumes"] or source in (compose(name).get("volumes") or {})
                assert known or (DOCKER / source).exists(), (service, volume)


def pipeline_faults(config: dict[str, Any]) -> list[str]:
    """Parts of the collector's pipelines that are not configured, and addresses that lead nowhere."""
    faults = []
    for name, pipeline in config["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            faults += [f"{name}: no {kind[:-1]} {part}" for part in pipeline[kind] if part not in config[kind]]
    layer = services("compose.observability.yaml")
    for name, exporter in config["exporters"].items():
        if exporter["endpoint"].split(":")[0] not in layer:
            faults.append(f"{name} leads to {exporter['endpoint']}")
    told = layer["target"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    heard = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    return faults if told == f"http://otel-collector:{heard}" else [*faults, f"spans go to {told}"]


def collector() -> dict[str, Any]:
    """Its configuration."""
    return dict(yaml.safe_load(read("observability/collector.yaml")))


def test_the_collector_takes_what_the_services_send_and_gives_it_to_jaeger() -> None:
    assert pipeline_faults(collector()) == []


@pytest.mark.parametrize(
    ("mutate", "fault"),
    [
        (lambda it: it["exporters"].pop("otlp/jaeger"), "no exporter otlp/jaeger"),
        (lambda it: it["exporters"]["otlp/jaeger"].update(endpoint="tempo:4317"), "leads to tempo"),
        (lambda it: it["receivers"]["otlp"]["protocols"]["grpc"].update(endpoint="0.0.0.0:4327"), "spans go to"),
    ],
)
def test_a_broken_pipeline_is_seen(mutate: Callable[[dict[str, Any]], object], fault: str) -> None:
    config = collector()
    mutate(config)
    assert fault in " ".join(pipeline_faults(config))


def promtool(path: Path) -> subprocess.CompletedProcess[str]:
    """`promtool check config`; skips where there is none."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: the Debian package prometheus has it")
    return subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True, check=False)


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    path = DOCKER / "observability" / "prometheus.yaml"
    done = promtool(path)
    assert done.returncode == 0, done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text().replace("names:", "hosts:"))
    assert promtool(wrong).returncode != 0


Mutate = Callable[[str, str, str], None]


@pytest.fixture
def mutated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Changes a file of a copy of docker/, which the functions above then read."""
    copy = tmp_path / "docker"
    shutil.copytree(DOCKER, copy)
    monkeypatch.setattr(docker_files, "DOCKER", copy)

    def change(file: str, old: str, new: str) -> None:
        text = (copy / file).read_text()
        assert old in text
        (copy / file).write_text(text.replace(old, new))

    return change
