"""The end of a service process, once everything in it has ended."""

import subprocess
import sys
import time

import pytest

from tests.harness.processes import ROOT

# The resolver of a cluster that does not answer: lookups run in threads, and take what they take.
PROGRAM = """
import asyncio, socket, sys, time
from outrider.config import ConfigError
from outrider.process import announce, run_process
from target_service.config import TargetConfig

socket.getaddrinfo = lambda *_: time.sleep(600)

async def serve(config):
    lookup = asyncio.get_running_loop().run_in_executor(None, socket.getaddrinfo, "name", 1)
    announce("host", 1)
    if sys.argv[1] == "2":
        raise ConfigError("no such name")
    return int(sys.argv[1])

sys.exit(run_process(TargetConfig, serve, ["--model", "x"]))
"""


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_lookup_that_hangs_does_not_hold_up_the_end(code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(code)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening on host:1\n"
    began = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert time.monotonic() - began < 60
    *said, last = err.splitlines()
    assert last.endswith("the lookup of a name is still under way and is left behind")
    assert said == (["error: no such name"] if code == 2 else [])
