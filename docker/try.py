"""Builds the three images without a Docker engine, runs them and generates through them: `python docker/try.py`.

Needs root, Linux, and from the distribution buildah, podman and runc. What is missing is printed, and the exit code is
0, or 1 with --require. All that is made lies in one directory, and is removed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine import READY_SECONDS, Engine, Failed, engine_in, why_not
from images import add_build_options, build, image, provide_base
from rights import check_rights

MODEL = "synthetic:vocab_size=26,seed=5,pass_ms=20"
DRAFT = "synthetic:vocab_size=26,seed=5,noise=0.5"
TOKENS = 100
STOP_SECONDS = 60


def start(engine: Engine, service: str, network: str, variables: dict[str, str], models: Path) -> str:
    """A container as compose.yaml runs it: read-only, without capabilities. Returns its id."""
    settings = [f"--env={name}={value}" for name, value in variables.items()]
    rights = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    places = ["--tmpfs=/tmp:size=256m", f"--volume={models}:/models"]
    words = ["--detach", "--pids-limit=0", f"--network={network}", *rights, *places, *settings]
    return engine.podman("run", *words, image(service))


@contextmanager
def generation(engine: Engine, network: str) -> Iterator[subprocess.Popen[str]]:
    """A client in a container of its own; lasts some seconds."""
    words = ["run", "--rm", f"--network={network}", "--read-only", "--entrypoint=outrider", "--no-healthcheck"]
    prompt = ["generate", "--raw", "--ignore-eos", "--seed=1", f"--max-tokens={TOKENS}", "abc"]
    command = ["podman", *words, image("orchestrator"), *prompt]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=engine.environment) as client:
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
    if code := engine.exit_code(container):
        raise Failed(f"{service} ended with {code} after SIGTERM:\n{engine.logs(container)}")
    print(f"{service}: exit code 0, {time.monotonic() - began:.1f} s after SIGTERM", flush=True)


def check_running(engine: Engine, options: argparse.Namespace) -> None:
    """Three containers in a network namespace without a way out; two generations, one of which SIGTERM falls into."""
    containers: dict[str, str] = {}
    try:
        network = "none"
        for service, variables in settings(options).items():
            containers[service] = start(engine, service, network, variables, volume(engine, options.models))
            network = f"container:{containers['target']}"
        for service, container in containers.items():
            print(f"{service}: healthy after {engine.until_healthy(service, container):.1f} s more", flush=True)
            check_rights(engine, service, container)
        check_generations(engine, network, containers)
    finally:
        for container in reversed(containers.values()):
            engine.podman("rm", "--force", container)


def settings(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Environment of each service, in the order of their start."""
    both = {"OUTRIDER_THREADS": "1"}
    return {
        "target": both | {"OUTRIDER_MODEL": options.target},
        "draft": both | {"OUTRIDER_MODEL": options.draft, "OUTRIDER_TARGET_MODEL": options.target},
        "orchestrator": {"OUTRIDER_TARGETS": "127.0.0.1:7801", "OUTRIDER_DRAFTS": "127.0.0.1:7802"}
        | {"OUTRIDER_TOKENIZER": options.target, "OUTRIDER_GRACE": str(STOP_SECONDS)},
    }


def volume(engine: Engine, models: Path | None) -> Path:
    """What is mounted at /models, with the files of `models` in it."""
    directory = engine.directory / "models"
    if models is not None:
        shutil.copytree(models, directory, dirs_exist_ok=True)
    directory.mkdir(exist_ok=True)
    os.chown(directory, 10001, 10001)
    return directory


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
    add_build_options(parser)
    parser.add_argument("--build-only", action="store_true", help="do not run the images")
    parser.add_argument("--models", type=Path, help="directory whose files are copied into the volume /models")
    parser.add_argument("--target", default=MODEL, help="MODEL of the target, as the container sees it")
    parser.add_argument("--draft", default=DRAFT, help="MODEL of the draft")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """Returns the exit code."""
    options = arguments(given)
    if reason := why_not():
        print(f"skipped: {reason}")
        return int(options.require)
    try:
        with engine_in(options.keep) as engine:
            print(f"base: {provide_base(engine)}", flush=True)
            build(engine, options)
            if not options.build_only:
                check_running(engine, options)
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
