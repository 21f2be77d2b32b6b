import os
import subprocess
import sys

import pytest

from outrider.cli.tether import AVAILABLE, tethered

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no parent-death signal")


def test_becomes_the_command_under_the_same_process_id() -> None:
    script = "import os, sys; print(os.getpid(), sys.argv[1:])"
    process = subprocess.Popen(tethered((sys.executable, "-c", script, "a b", "--")), stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=20)
    assert out == f"{process.pid} ['a b', '--']\n"


def test_exit_code_is_the_commands() -> None:
    assert (
        subprocess.run(tethered((sys.executable, "-c", "raise SystemExit(7)")), check=False, timeout=20).returncode == 7
    )


def test_parent_that_is_gone_already_starts_nothing() -> None:
    command = [word if word != str(os.getpid()) else "1" for word in tethered(("echo", "started"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the parent died before its child was tied to it\n"
