import subprocess
import sys
from pathlib import Path

from tests.harness.processes import ROOT


def test_committed_stubs_are_what_the_protos_give(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "protos" / "generate.py", "--out", tmp_path], check=True, timeout=60)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    stubs = (ROOT / "outrider" / "v1").glob("*_pb2*.py*")
    committed = {path.relative_to(ROOT): path.read_text() for path in stubs}
    assert sorted(fresh) == sorted(committed), "run `make protos`"
    assert [str(name) for name in fresh if fresh[name] != committed[name]] == [], "run `make protos`"


def test_protos_pass_buf_lint() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "protos" / "generate.py", "--lint"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
