"""buildah, podman and podman-compose over a storage of their own, for try.py and try_compose.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_SECONDS = 900.0
# podman's own limits are higher than what a sandbox may allow. Networks are kept with the rest.
_CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{directory}/run/libpod"
[network]
network_backend = "netavark"
network_config_dir = "{directory}/networks"
"""
_STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{directory}/storage"
runroot = "{directory}/run"
"""


class Failed(Exception):
    """Something is not as it should be; the message says what."""


@dataclass(frozen=True)
class Engine:
    """The tools, and what `directory` holds of theirs: settings, images, volumes, networks."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """What the tools are run with."""
        ours = {
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_CONF": str(self.directory / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.directory / "storage.conf"),
            # Without systemd there is no timer that runs health checks: until_healthy does.
            "DISABLE_HC_SYSTEMD": "true",
        }
        return os.environ | ours

    def buildah(self, *words: str) -> str:
        """Runs it and returns its output; the build's goes to standard error. Raises Failed."""
        return run("buildah", *words, environment=self.environment)

    def podman(self, *words: str, said_too: bool = False) -> str:
        """As `buildah`; with `said_too`, standard error is returned as well."""
        return run("podman", *words, environment=self.environment, said_too=said_too)

    def succeeds(self, *words: str) -> bool:
        """Whether a command of podman does, in silence."""
        done = subprocess.run(["podman", *words], env=self.environment, capture_output=True, check=False)
        return done.returncode == 0

    def until_healthy(self, service: str, container: str) -> float:
        """Asks the container's own health check until it passes; returns for how many seconds. Raises Failed."""
        began = time.monotonic()
        while not self.succeeds("healthcheck", "run", container):
            running = self.podman("inspect", "--format={{.State.Running}}", container) == "true"
            if not running or time.monotonic() > began + READY_SECONDS:
                raise Failed(f"{service} did not become healthy:\n{self.logs(container)}")
            time.sleep(0.5)
        return time.monotonic() - began

    def logs(self, container: str) -> str:
        """All that a container wrote."""
        return self.podman("logs", container, said_too=True)

    def exit_code(self, container: str) -> int:
        """Of a container that ended."""
        return int(self.podman("inspect", "--format={{.State.ExitCode}}", container))

    def image_bytes(self, name: str) -> int:
        """Size of an image, unpacked."""
        return int(json.loads(self.podman("image", "inspect", name))[0]["Size"])

    def remove(self) -> None:
        """Images and mounts; the directory can be deleted then."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        subprocess.run(["umount", f"{self.directory}/storage/overlay"], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def engine_in(keep: Path | None) -> Iterator[Engine]:
    """An engine in `keep`, which stays, or in a directory that is removed at the end, after SIGTERM too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    directory = (keep or Path(tempfile.mkdtemp(prefix="outrider-images-"))).resolve()
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "containers.conf").write_text(_CONTAINERS_CONF.format(directory=directory))
    (directory / "storage.conf").write_text(_STORAGE_CONF.format(directory=directory))
    engine = Engine(directory)
    try:
        yield engine
    finally:
        if keep is None:
            engine.remove()
            shutil.rmtree(directory)


def run(*command: str, environment: Mapping[str, str], said_too: bool = False, seconds: float = 3_600) -> str:
    """Standard output of a command; standard error is shown as it comes, or returned too. Raises Failed."""
    errors = subprocess.STDOUT if said_too else None
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=seconds, env=environment, check=False
    )
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)[:300]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout.strip()


def why_not(*tools: str) -> str:
    """Why nothing can be built here; "" where it can."""
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in ("buildah", "podman", "runc", *tools) if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else ""
