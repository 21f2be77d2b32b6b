"""Runs the compose files with podman-compose and breaks what can break: `python docker/try_compose.py`.

Needs what try.py needs, and podman-compose. An image of somebody else's that can be neither pulled nor stood in for is
named, and its service left out. What is missing is printed, and the exit code is 0, or 1 with --require.
"""

import argparse
import json
import re
import shutil
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import READY_SECONDS, Engine, Failed, engine_in, run, why_not
from images import SERVICES, add_build_options, build, provide, provide_base
from project import COMPOSE, NAME, OBSERVABILITY, Project, project
from rights import check_rights

MODEL = "synthetic:vocab_size=26,seed=5,pass_ms=20"
DRAFT = "synthetic:vocab_size=26,seed=5,noise=0.5"
PROMPT = "abc"
TOKENS = 150
ADDRESS = "127.0.0.1:7800"
PROMETHEUS = "http://127.0.0.1:9090"
IMAGE = re.compile(r"^  ([\w-]+):\n(?:    .*\n)*?    image: (\S+)$", re.MULTILINE)


def say(text: str) -> None:
    """What was seen, at once."""
    print(text, flush=True)


def with_images(engine: Engine, options: argparse.Namespace, file: Path) -> list[str]:
    """The services of a file that are others' and have an image."""
    found = []
    for service, image in IMAGE.findall(file.read_text()):
        if service in SERVICES:
            continue
        what = provide(engine, options, image)
        say(f"{service}: {what or f'left out, for {image} cannot be pulled'}")
        found += [service] if what else []
    return found


def check_start(it: Project, services: Sequence[str]) -> None:
    """All of the core get healthy, and ours have no right too many."""
    began = time.monotonic()
    it.compose("up", "--detach", "--no-build", *services)
    for service in ("redis", *SERVICES):
        it.engine.until_healthy(service, it.container(service))
        say(f"{service}: healthy {time.monotonic() - began:.1f} s after the start")
    for service in SERVICES:
        check_rights(it.engine, service, it.container(service))


def check_clients(it: Project) -> str:
    """The command line in the container and a client that nobody here wrote say the same; returns what."""
    words = ("--raw", "--ignore-eos", "--seed=1", f"--max-tokens={TOKENS}", PROMPT)
    text = it.compose("exec", "-T", "orchestrator", "outrider", "generate", *words).strip()
    say(f"generated: {text[:60]}...")
    expect("another generation", it.generate(PROMPT, "first", TOKENS), text)
    if shutil.which("grpcurl") is None:
        say("grpcurl is not installed: no client from outside")
        return text
    request = {"prompt": PROMPT, "seed": 1, "stop": {"maxTokens": TOKENS, "ignoreEos": True}}
    said = run(
        *("grpcurl", "-plaintext", "-d", json.dumps(request), ADDRESS, "outrider.v1.OrchestratorService/Generate"),
        environment=it.engine.environment,
    )
    expect("grpcurl", "".join(token["text"] for message in messages(said) for token in message.get("tokens", [])), text)
    say("grpcurl from outside: the same")
    return text


def messages(said: str) -> list[dict[str, Any]]:
    """JSON objects one after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(said):
        message, at = decoder.raw_decode(said, at)
        found.append(message)
        at += len(said[at:]) - len(said[at:].lstrip())
    return found


def expect(who: str, said: str, text: str) -> None:
    """Raises Failed where a text is another one."""
    if said.strip() != text:
        raise Failed(f"{who} said something else: {said!r} instead of {text!r}")


def check_kill(it: Project, text: str, *killed: str) -> None:
    """Services are killed in a generation, which goes on; compose's restart policy brings them back."""
    session = "-".join(killed)
    with it.generating(PROMPT, session, TOKENS) as client:
        for service in killed:
            it.kill(service)
        expect(f"a generation in which {session} was killed", client.text(), text)
    for service in killed:
        seconds = it.engine.until_healthy(service, it.container(service))
        say(f"{service}: killed in a generation, which its client did not notice; healthy {seconds:.1f} s later")


def until_drafts(it: Project, count: int) -> None:
    """The orchestrator has so many drafts in use."""

    def used() -> int:
        lines = it.compose("exec", "-T", "orchestrator", "outrider", "info").splitlines()
        return sum(line.startswith("draft ") and " yes" in line for line in lines)

    until(f"drafts in use: {count}", lambda: used() == count)


def check_scale(it: Project) -> None:
    """A second draft is found by the name of the first."""
    try:
        it.compose("up", "--detach", "--no-build", "--no-recreate", "--scale=draft=2", "draft")
        until_drafts(it, 2)
        say("a second draft is in use")
    finally:
        # `down` does not know it any more.
        it.engine.succeeds("rm", "--force", "--time=1", f"{NAME}_draft_2")


def check_stop(it: Project, text: str) -> None:
    """SIGTERM to all in a generation: it is finished, and every exit code is 0. The next start has the sessions."""
    with it.generating(PROMPT, "stopped", TOKENS) as client:
        began = time.monotonic()
        # As `docker compose stop` does it: nothing before what depends on it. podman-compose stops all at once.
        for services in (["orchestrator"], ["draft", "target"], ["redis"]):
            it.compose("stop", *services)
        say(f"stopped in a generation, {time.monotonic() - began:.1f} s")
        expect("a generation that a stop fell into", client.text(), text)
    codes = {service: it.engine.exit_code(it.container(service)) for service in ("redis", *SERVICES)}
    if any(codes.values()):
        raise Failed(f"exit codes after SIGTERM: {codes}")
    it.compose("start", "redis", *SERVICES)
    for service in ("redis", *SERVICES):
        it.engine.until_healthy(service, it.container(service))
    for session in ("first", "stopped"):
        expect(f"the session {session} after a restart", it.replay(session), text)
    say("started again: the sessions are there")


def until(what: str, holds: Callable[[], bool]) -> None:
    """Raises Failed when something does not come to hold."""
    ends = time.monotonic() + READY_SECONDS
    while not holds():
        if time.monotonic() > ends:
            raise Failed(f"not so after {READY_SECONDS:.0f} s: {what}")
        time.sleep(1)


def prometheus(path: str, **parameters: str) -> Any:
    """The data of one of its answers."""
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as it:
        return json.load(it)["data"]


def check_prometheus() -> None:
    """It finds the three services by their names, and evaluates its rules over what they say."""
    jobs = {f"outrider-{service}" for service in SERVICES}

    def up() -> set[str]:
        return {each["metric"]["job"] for each in prometheus("query", query="up == 1")["result"]}

    until(f"Prometheus answers at {PROMETHEUS}", ready)
    until("Prometheus scrapes the three services", lambda: up() == jobs)
    groups = prometheus("rules")["groups"]
    until("every rule was evaluated", lambda: {rule["health"] for rule in rules()} == {"ok"})
    say(f"Prometheus scrapes {', '.join(sorted(jobs))}; {len(rules())} rules in {len(groups)} groups are evaluated")


def ready() -> bool:
    """Whether Prometheus answers."""
    try:
        return bool(prometheus("status/buildinfo"))
    except OSError:
        return False


def rules() -> list[dict[str, Any]]:
    """All of Prometheus's rules."""
    return [rule for group in prometheus("rules")["groups"] for rule in group["rules"]]


def check_traces(it: Project) -> None:
    """Spans of the three services reach what stands behind the collector."""
    wanted = {f"outrider-{service}" for service in SERVICES}
    until(
        "spans of all services arrive", lambda: all(name in it.engine.logs(it.container("jaeger")) for name in wanted)
    )
    say("spans of all three services went through the collector")


def check_core(engine: Engine, options: argparse.Namespace, services: Sequence[str]) -> None:
    """compose.yaml alone."""
    with project(engine, variables(options), observed=False) as it:
        check_start(it, (*services, *SERVICES))
        text = check_clients(it)
        check_kill(it, text, "draft")
        until_drafts(it, 1)
        check_kill(it, text, "target")
        check_kill(it, text, "redis", "orchestrator")
        check_stop(it, text)


def check_observed(engine: Engine, options: argparse.Namespace, services: Sequence[str]) -> None:
    """With compose.observability.yaml over it, as far as there are images."""
    with project(engine, variables(options), observed=True) as it:
        check_start(it, (*services, *SERVICES))
        it.generate(PROMPT, "observed", TOKENS)
        if "prometheus" in services:
            check_prometheus()
        if {"otel-collector", "jaeger"} <= set(services):
            check_traces(it)
        check_scale(it)


def variables(options: argparse.Namespace) -> dict[str, str]:
    """What stands in docker/.env otherwise."""
    return {"OUTRIDER_VERSION": "try", "TARGET_MODEL": options.target, "DRAFT_MODEL": options.draft}


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_build_options(parser)
    parser.add_argument("--target", default=MODEL, help="MODEL of the target, as the container sees it")
    parser.add_argument("--draft", default=DRAFT, help="MODEL of the draft")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """Returns the exit code."""
    options = arguments(given)
    if reason := why_not("podman-compose"):
        say(f"skipped: {reason}")
        return int(options.require)
    try:
        with engine_in(options.keep) as engine:
            say(f"base: {provide_base(engine)}")
            build(engine, options)
            core = with_images(engine, options, COMPOSE)
            check_core(engine, options, core)
            check_observed(engine, options, [*core, *with_images(engine, options, OBSERVABILITY)])
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
