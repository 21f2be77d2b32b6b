"""What docker/try.py and docker/try_compose.py go by, against the files that they try."""

import importlib
import json
from types import ModuleType, SimpleNamespace

import pytest

from tests.deploy.docker_files import COMPOSE, CONFIGS, DOCKER, read, services, with_defaults


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts' modules."""
    monkeypatch.syspath_prepend(str(DOCKER))
    names = ("engine", "images", "rights", "project", "try_compose")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_every_service_of_the_compose_files_is_seen_with_its_image(docker: SimpleNamespace) -> None:
    for name in COMPOSE:
        seen = dict(docker.try_compose.IMAGE.findall(with_defaults(read(name))))
        assert seen == {service: spec["image"] for service, spec in services(name).items() if "image" in spec}


def test_others_images_are_stood_in_for_but_those_that_the_readme_names(docker: SimpleNamespace) -> None:
    others = {
        spec["image"].rpartition(":")[0]
        for name in COMPOSE
        for service, spec in services(name).items()
        if service not in CONFIGS
    } - {""}
    assert others - set(docker.images.STAND_INS) == {"docker.io/grafana/grafana"}
    assert set(docker.images.STAND_INS) <= others


def test_an_older_podman_is_spared_what_it_does_not_know(docker: SimpleNamespace) -> None:
    healthy = {
        name for name, spec in services("compose.yaml").items() if "start_interval" in spec.get("healthcheck", {})
    }
    assert {line.split(":")[0].strip() for line in docker.project.OLDER_PODMAN.splitlines()[1:]} == healthy


def said_by(module: ModuleType, **changed: object) -> str:
    """What a container says of itself."""
    return json.dumps(module.AS_IT_SHOULD_BE | changed)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"user": [0, 0]}, "user"),
        ({"capabilities": 0x400}, "capabilities"),
        ({"no new privileges": False}, "no new privileges"),
        ({"read-only root": False}, "read-only root"),
        ({"not writable": ["/models"]}, "/models"),
        ({"compilers": ["gcc"]}, "gcc"),
    ],
)
def test_a_container_with_rights_is_refused(docker: SimpleNamespace, changed: dict[str, object], fault: str) -> None:
    said = {"now": said_by(docker.rights)}
    engine = SimpleNamespace(podman=lambda *words: said["now"])
    docker.rights.check_rights(engine, "target", "container")
    said["now"] = said_by(docker.rights, **changed)
    with pytest.raises(docker.engine.Failed, match=fault):
        docker.rights.check_rights(engine, "target", "container")


def test_messages_of_grpcurl_are_taken_apart(docker: SimpleNamespace) -> None:
    assert docker.try_compose.messages('{"a": 1}\n{\n  "b": {"c": 2}\n}') == [{"a": 1}, {"b": {"c": 2}}]
