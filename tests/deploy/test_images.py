"""The Dockerfile, the probe of its health check, and the script that builds it."""

import asyncio
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from outrider import __version__
from outrider.net.probe import address
from outrider.net.server import Server
from tests.deploy.docker_files import DOCKER, dockerfile_stages, read
from tests.harness.processes import ROOT


def hadolint(path: Path) -> str:
    """What the linter has against a Dockerfile."""
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    return subprocess.run([linter, "--no-color", path], capture_output=True, text=True, check=False).stdout


def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    assert hadolint(DOCKER / "Dockerfile") == ""
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(read("Dockerfile").replace("--requirement torch.txt", "torch"))
    assert "DL3013" in hadolint(wrong)


def faults(dockerfile: str) -> list[str]:
    """Where it does not fit the project, or lets a container do more than it needs."""
    stages, found = dockerfile_stages(dockerfile), []
    service = stages["service"]
    for line in ("USER 10001:10001", "VOLUME /models", "STOPSIGNAL SIGTERM", f"ARG VERSION={__version__}"):
        if line not in service:
            found.append(f"no {line}")
    if not any(line.startswith("HEALTHCHECK") and "outrider.net.probe" in line for line in service):
        found.append("no health check")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {line.split()[1] for line in stages["code"] if line.startswith("COPY ")}
    if copied != {package.rstrip("*") for package in packages}:
        found.append(f"the code is {copied}")
    for name, module in (("orchestrator", "orchestrator"), ("target", "target_service"), ("draft", "draft_service")):
        if f'ENTRYPOINT ["python", "-m", "{module}"]' not in stages[name]:
            found.append(f"{name} runs something else")
    if any(line.startswith("COPY ") and "secret" in line for stage in stages.values() for line in stage):
        found.append("a secret is copied")
    return found


def test_the_dockerfile_fits_the_project() -> None:
    assert faults(read("Dockerfile")) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("USER 10001:10001", "USER 0", "no USER"),
        (f"VERSION={__version__}", "VERSION=0.0.1", "no ARG VERSION"),
        ("COPY draft_service draft_service\n", "", "the code is"),
        ('"-m", "draft_service"', '"-m", "target_service"', "draft runs"),
        ("outrider.net.probe", "outrider.net.prob", "no health check"),
    ],
)
def test_what_does_not_fit_is_seen(old: str, new: str, fault: str) -> None:
    text = read("Dockerfile")
    assert old in text
    assert fault in " ".join(faults(text.replace(old, new)))


def test_all_that_is_copied_passes_the_ignore_file() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    stages = dockerfile_stages(read("Dockerfile"))
    copied = [
        line.split()[1:-1] for name in ("dependencies", "code") for line in stages[name] if line.startswith("COPY ")
    ]
    assert {name for names in copied for name in names} == allowed


def test_the_script_builds_on_the_same_base() -> None:
    base = re.search(r"^ARG PYTHON_IMAGE=(.*)$", read("Dockerfile"), re.MULTILINE)
    assert base is not None
    assert f'BASE = "{base[1]}"' in read("images.py")


@pytest.mark.parametrize("script", ["try.py", "try_compose.py"])
@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--require",), 1)])
def test_the_scripts_say_why_they_do_nothing(script: str, flags: tuple[str, ...], code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DOCKER / script, *flags],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.fullmatch(r"skipped: .*(not installed|needs root)\n", done.stdout)
    assert done.returncode == code


async def test_the_probe_tells_what_health_says() -> None:
    server = Server("outrider.v1.Probed")
    port = await server.start("127.0.0.1", 0)
    asked = address({"OUTRIDER_PORT": str(port)})
    assert await probed(asked) == (1, "NOT_SERVING")
    await server.ready()
    assert await probed(asked) == (0, "SERVING")
    await server.stop(0)
    assert await probed(asked) == (1, "UNAVAILABLE")


async def probed(asked: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    port = asked.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.net.probe"),
        env=os.environ | {"OUTRIDER_PORT": port, "OUTRIDER_HEALTH_ADDRESS": ""},
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode().strip()


def test_the_probe_asks_where_health_is_served() -> None:
    assert address({"OUTRIDER_PORT": "7801"}) == "127.0.0.1:7801"
    assert address({"OUTRIDER_PORT": "7801", "OUTRIDER_HEALTH_ADDRESS": "0.0.0.0:7803"}) == "127.0.0.1:7803"
    assert address({"OUTRIDER_HEALTH_ADDRESS": "10.0.0.1:7803"}) == "10.0.0.1:7803"


def test_the_probe_does_without_the_large_libraries() -> None:
    code = "import sys, outrider.net.probe; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"
