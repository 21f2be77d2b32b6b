"""A compose project as podman-compose runs it, and clients beside it."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine import READY_SECONDS, Engine, Failed, run
from images import ROOT, SERVICES, image

NAME = "outrider"
COMPOSE = ROOT / "docker" / "compose.yaml"
OBSERVABILITY = ROOT / "docker" / "compose.observability.yaml"
# Podman before 4.4 does not know the option that podman-compose makes of it.
OLDER_PODMAN = "services:\n" + "".join(
    f"  {service}: {{healthcheck: {{start_interval: !reset null}}}}\n" for service in ("redis", *SERVICES)
)
# Runs in a container; the client resumes by itself.
_GENERATE = """
import sys
from outrider.client import Client
prompt, session, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Client("orchestrator:7800") as client:
    for token in client.generate(prompt, session_id=session, max_tokens=tokens, seed=1, ignore_eos=True):
        print(token.text, end="", flush=True)
"""
_REPLAY = """
import sys, grpc
from outrider.v1.orchestrator_pb2 import ResumeRequest
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
with grpc.insecure_channel("orchestrator:7800") as channel:
    for answer in OrchestratorServiceStub(channel).Resume(ResumeRequest(session_id=sys.argv[1]), timeout=60):
        print(*(token.text for token in answer.tokens), sep="", end="")
"""


@dataclass(frozen=True)
class Project:
    """The services of some compose files.

    Attributes:
        files: the compose files, each over those before it.
        variables: file with the variables of the compose files.
    """

    engine: Engine
    files: tuple[Path, ...]
    variables: Path

    def compose(self, *words: str) -> str:
        """Runs podman-compose and returns its output. Raises Failed."""
        files = [f"--file={path}" for path in self.files]
        command = ("podman-compose", f"--env-file={self.variables}", *files, *words)
        return run(*command, environment=self.engine.environment)

    def container(self, service: str) -> str:
        """The container of a service that runs once. Raises Failed."""
        containers = self.containers(service)
        if len(containers) != 1:
            raise Failed(f"{service} has the containers {containers}")
        return containers[0]

    def containers(self, service: str) -> list[str]:
        """Names of a service's containers, running or not."""
        labels = [f"--filter=label=com.docker.compose.service={service}"]
        return self.engine.podman("ps", "--all", "--format={{.Names}}", *labels).split()

    def kill(self, service: str) -> None:
        """SIGKILL from outside, as by the kernel: podman does not know that it was meant."""
        container = self.container(service)
        state = json.loads(self.engine.podman("inspect", container))[0]["State"]
        run("kill", "-KILL", str(state["Pid"]), environment=self.engine.environment)

    def generate(self, prompt: str, session: str, tokens: int) -> str:
        """The text of one generation, from a client in a container of its own. Raises Failed."""
        return self.engine.podman(*self._client(_GENERATE, prompt, session, str(tokens)))

    def replay(self, session: str) -> str:
        """What the store has of a session that has ended."""
        return self.engine.podman(*self._client(_REPLAY, session))

    @contextmanager
    def generating(self, prompt: str, session: str, tokens: int) -> "Iterator[Generating]":
        """As `generate`, under way: its first characters are there."""
        name = f"{NAME}_client_{session}"
        command = ["podman", *self._client(_GENERATE, prompt, session, str(tokens), name=name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.engine.environment) as process:
            try:
                assert process.stdout is not None
                yield Generating(process, process.stdout.read(1))
            finally:
                self.engine.succeeds("rm", "--force", "--time=1", name)
                process.kill()

    def _client(self, script: str, *arguments: str, name: str = "") -> list[str]:
        words = ["run", "--rm", "--read-only", "--no-healthcheck", f"--network={NAME}_workers", "--entrypoint=python"]
        words += [f"--name={name}"] if name else []
        return [*words, image("orchestrator"), "-c", script, *arguments]


@dataclass(frozen=True)
class Generating:
    """A generation under way.

    Attributes:
        process: the client.
        begun: what it has said so far.
    """

    process: subprocess.Popen[str]
    begun: str

    def text(self) -> str:
        """All of it, when it has ended. Raises Failed when the client does."""
        rest, _ = self.process.communicate(timeout=READY_SECONDS)
        if self.process.returncode != 0:
            raise Failed(f"the client ended with {self.process.returncode}")
        return (self.begun + rest).strip()


@contextmanager
def project(engine: Engine, variables: Mapping[str, str], *, observed: bool) -> Iterator[Project]:
    """The project with variables of its own and passwords; nothing of it is left afterwards but images."""
    directory = engine.directory / "project"
    directory.mkdir(exist_ok=True)
    for name in ("redis-password", "grafana-password"):
        (directory / name).write_text("a0b1c2d3")
    passwords = {"REDIS_PASSWORD_FILE": "redis-password", "GRAFANA_PASSWORD_FILE": "grafana-password"}
    told = dict(variables) | {name: str(directory / file) for name, file in passwords.items()}
    path = directory / "env"
    path.write_text("".join(f"{name}={value}\n" for name, value in told.items()))
    files = [COMPOSE, OBSERVABILITY] if observed else [COMPOSE]
    if "--health-startup-interval" not in engine.podman("create", "--help"):
        files.append(directory / "older-podman.yaml")
        files[-1].write_text(OLDER_PODMAN)
    made = Project(engine, tuple(files), path)
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout=1")
        shutil.rmtree(directory)
