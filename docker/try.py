"""Builds the three images without a Docker engine, runs them and generates through them: `python docker/try.py`.

Needs root, Linux, and from the distribution buildah, podman and runc. Where the base image cannot be pulled, a tree of
debootstrap with Debian's Python stands in for it, under the same name: the Dockerfile is built unchanged. What is
missing is printed, and the exit code is 0, or 1 with --require. All that is made lies in one directory, and is removed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("target", "draft", "orchestrator")
BASE = "docker.io/library/python:3.11-slim-bookworm"
STAND_IN = ("python3", "python3-venv", "python3-pip", "ca-certificates")
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
DEBIAN = "http://deb.debian.org/debian"
MODEL = "synthetic:vocab_size=26,seed=5,pass_ms=20"
DRAFT = "synthetic:vocab_size=26,seed=5,noise=0.5"
TOKENS = 100
# podman's own are higher than what a sandbox may allow.
ULIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
READY_SECONDS = 300.0
STOP_SECONDS = 60


class Failed(Exception):
    """Something is not as it should be; the message says what."""


@dataclass(frozen=True)
class Engine:
    """buildah and podman over a storage of their own."""

    directory: Path

    def buildah(self, *words: str) -> str:
        """Runs it and returns its output; the build's goes to standard error. Raises Failed."""
        return run("buildah", *self._storage(), *words)

    def podman(self, *words: str) -> str:
        """As `buildah`."""
        return run(*self.podman_command(*words))

    def podman_command(self, *words: str) -> list[str]:
        """What `podman` runs."""
        return ["podman", *self._storage(), "--runtime=runc", "--cgroup-manager=cgroupfs", *words]

    def _storage(self) -> list[str]:
        directories = [f"--root={self.directory}/storage", f"--runroot={self.directory}/run"]
        return [*directories, "--storage-driver=overlay"]

    def remove(self) -> None:
        """Images and mounts; the directory can be deleted then."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        subprocess.run(["umount", f"{self.directory}/storage/overlay"], stderr=subprocess.DEVNULL, check=False)


def run(*command: str, seconds: float = 3_600) -> str:
    """Standard output of a command; standard error is shown as it comes. Raises Failed when it fails."""
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, env=environment, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout.strip()


def why_not() -> str:
    """Why nothing can be built here; "" where it can."""
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in ("buildah", "podman", "runc") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


def provide_base(engine: Engine) -> str:
    """The image that the Dockerfile begins with; returns what it is, for people."""
    if engine.buildah("images", "--quiet", "--filter", f"reference={BASE}"):
        return "already there"
    try:
        engine.buildah("pull", BASE)
        return "pulled"
    except Failed:
        if shutil.which("debootstrap") is None:
            raise Failed(f"{BASE} cannot be pulled, and debootstrap is not installed") from None
    tree = engine.directory / "base"
    run("debootstrap", "--variant=minbase", f"--include={','.join(STAND_IN)}", "bookworm", str(tree), DEBIAN)
    for name in ("python", "python3"):
        (tree / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
    for archive in (tree / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    shutil.rmtree(tree / "var/lib/apt/lists")
    container = engine.buildah("from", "scratch")
    engine.buildah("copy", "--quiet", container, str(tree), "/")
    engine.buildah("config", f"--env=PATH={PATH}", container)
    engine.buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(tree)
    return "a stand-in of Debian's Python, made by debootstrap"


def build(engine: Engine, options: argparse.Namespace) -> None:
    """The three images, as outrider-SERVICE:try."""
    pip_conf = engine.directory / "pip.conf"
    pip_conf.write_text("[global]\n" + ("cert = /run/secrets/ca.pem\n" if options.ca else ""))
    words = ["--pull-never", "--layers", "--format=docker", f"--file={ROOT}/docker/Dockerfile"]
    words += [f"--build-arg=TORCH_INDEX={options.torch_index}"] if options.torch_index else []
    words += [f"--build-context=wheels={options.wheels}"] if options.wheels else []
    words += [f"--secret=id=ca.pem,src={options.ca}"] if options.ca else []
    words += [f"--secret=id=pip.conf,src={pip_conf}"]
    for service in SERVICES:
        began = time.monotonic()
        engine.buildah("bud", "--quiet", *words, f"--target={service}", f"--tag={image(service)}", str(ROOT))
        size = json.loads(engine.podman("image", "inspect", image(service)))[0]["Size"]
        print(f"{service}: {size / 1e6:.0f} MB, built in {time.monotonic() - began:.0f} s", flush=True)


def image(service: str) -> str:
    """Its name."""
    return f"localhost/outrider-{service}:try"


def start(engine: Engine, service: str, network: str, variables: dict[str, str], models: Path) -> str:
    """A container as compose.yaml runs it: read-only, without capabilities. Returns its id."""
    settings = [f"--env={name}={value}" for name, value in variables.items()]
    # Without systemd there is no timer that runs the health check: until_healthy does.
    limits = [*ULIMITS, "--pids-limit=0", "--health-interval=disable"]
    rights = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    places = ["--tmpfs=/tmp:size=256m", f"--volume={models}:/models"]
    return engine.podman(
        "run", "--detach", f"--network={network}", *limits, *rights, *places, *settings, image(service)
    )


def until_healthy(engine: Engine, service: str, container: str) -> None:
    """Asks the image's own HEALTHCHECK."""
    ends = time.monotonic() + READY_SECONDS
    while subprocess.run(engine.podman_command("healthcheck", "run", container), stdout=subprocess.DEVNULL).returncode:
        if engine.podman("inspect", "--format={{.State.Running}}", container) != "true" or time.monotonic() > ends:
            raise Failed(f"{service} did not become healthy:\n{engine.podman('logs', container)}")
        time.sleep(0.5)


def check_rights(engine: Engine, service: str, container: str) -> None:
    """Who it is, what it may write, and that no compiler is there."""
    script = (
        "id -u; id -g; touch /opt/app/x 2>/dev/null && echo writable; command -v cc gcc clang; touch /models/x /tmp/x"
    )
    said = engine.podman("exec", container, "sh", "-c", script).split()
    if said != ["10001", "10001"]:
        raise Failed(f"{service} is not as locked down as it should be: {said}")


@contextmanager
def generation(engine: Engine, network: str) -> Iterator[subprocess.Popen[str]]:
    """A client in a container of its own; lasts some seconds."""
    words = ["run", "--rm", f"--network={network}", "--read-only", "--entrypoint=outrider", "--no-healthcheck"]
    prompt = ["generate", "--raw", "--ignore-eos", "--seed=1", f"--max-tokens={TOKENS}", "abc"]
    command = engine.podman_command(*words, *ULIMITS, image("orchestrator"), *prompt)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            yield client
        finally:
            client.kill()


def text_of(client: subprocess.Popen[str], begun: str = "") -> str:
    """All that a client prints. Raises Failed when it fails."""
    rest, _ = client.communicate(timeout=READY_SECONDS)
    if client.returncode != 0:
        raise Failed(f"the client ended with {client.returncode}")
    return (begun + rest).strip()


def stop(engine: Engine, service: str, container: str) -> None:
    """SIGTERM to process 1, and its exit code."""
    began = time.monotonic()
    engine.podman("stop", f"--time={STOP_SECONDS + 10}", container)
    code = engine.podman("inspect", "--format={{.State.ExitCode}}", container)
    if code != "0":
        raise Failed(f"{service} ended with {code} after SIGTERM:\n{engine.podman('logs', container)}")
    print(f"{service}: exit code 0, {time.monotonic() - began:.1f} s after SIGTERM", flush=True)


def check_running(engine: Engine, options: argparse.Namespace) -> None:
    """Three containers in a network namespace without a way out; two generations, one of which SIGTERM falls into."""
    models = engine.directory / "models"
    models.mkdir(exist_ok=True)
    os.chown(models, 10001, 10001)
    both = {"OUTRIDER_THREADS": "1"}
    variables = {
        "target": both | {"OUTRIDER_MODEL": options.target},
        "draft": both | {"OUTRIDER_MODEL": options.draft},
        "orchestrator": {"OUTRIDER_TARGETS": "127.0.0.1:7801", "OUTRIDER_DRAFTS": "127.0.0.1:7802"}
        | {"OUTRIDER_TOKENIZER": options.target, "OUTRIDER_GRACE": str(STOP_SECONDS)},
    }
    containers: dict[str, str] = {}
    try:
        network = "none"
        for service in SERVICES:
            containers[service] = start(engine, service, network, variables[service], models)
            network = f"container:{containers['target']}"
        for service, container in containers.items():
            until_healthy(engine, service, container)
            check_rights(engine, service, container)
        check_generations(engine, network, containers)
    finally:
        for container in reversed(containers.values()):
            engine.podman("rm", "--force", container)


def check_generations(engine: Engine, network: str, containers: dict[str, str]) -> None:
    """What SIGTERM falls into says the same as what is left alone."""
    with generation(engine, network) as client:
        whole = text_of(client)
    print(f"generated: {whole[:60]}...", flush=True)
    with generation(engine, network) as client:
        assert client.stdout is not None
        begun = client.stdout.read(1)
        stop(engine, "orchestrator", containers["orchestrator"])
        if text_of(client, begun) != whole:
            raise Failed("a generation that SIGTERM fell into was not finished as it should be")
    for service in ("draft", "target"):
        stop(engine, service, containers[service])


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", action="store_true", help="fail where nothing can be built")
    parser.add_argument("--build-only", action="store_true", help="do not run the images")
    parser.add_argument("--keep", type=Path, help="directory for what is built, which stays: the next build is quick")
    parser.add_argument("--torch-index", default="", help="index that has torch; PyTorch's for CPUs without it")
    parser.add_argument("--wheels", default=_if_exists("PIP_FIND_LINKS"), help="directory with wheels that are at hand")
    parser.add_argument("--ca", default=_if_exists("PIP_CERT"), help="PEM file with the CAs that pip should trust")
    parser.add_argument("--target", default=MODEL, help="MODEL of the target; /models is the volume")
    parser.add_argument("--draft", default=DRAFT, help="MODEL of the draft")
    return parser.parse_args(given)


def _if_exists(variable: str) -> str:
    path = os.environ.get(variable, "")
    return path if path and Path(path).exists() else ""


def main(given: Sequence[str]) -> int:
    """Returns the exit code."""
    options = arguments(given)
    if reason := why_not():
        print(f"skipped: {reason}")
        return int(options.require)
    directory = options.keep or Path(tempfile.mkdtemp(prefix="outrider-images-"))
    directory.mkdir(exist_ok=True, parents=True)
    engine = Engine(directory)
    try:
        print(f"base: {provide_base(engine)}", flush=True)
        build(engine, options)
        if not options.build_only:
            check_running(engine, options)
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    finally:
        if options.keep is None:
            engine.remove()
            shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
