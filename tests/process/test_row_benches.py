"""The benches that need no model run, and say by their exit code when a limit is missed."""

import asyncio
import sys

import pytest

from outrider.cli.tether import tethered
from tests.harness.processes import ROOT

# The machine may do a lot beside them: a script starts several services.
DEADLINE = 500.0
pytestmark = pytest.mark.timeout(600)


async def bench(name: str, *flags: str) -> tuple[int, str]:
    """(exit code, stdout)."""
    command = tethered((sys.executable, "-m", f"bench.{name}", "--smoke", *flags))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--limit", "0"), 1)])
async def test_row_cost(flags: tuple[str, ...], code: int) -> None:
    # A hundred milliseconds of pass against a vocabulary of 3000: far below any limit on any machine.
    ended, output = await bench("row_cost", *flags)
    assert ended == code, output
    assert ("MISSED" in output) == bool(code)
    assert all(rule in output for rule in ("greedy", "coupled", "ratio, block"))


# How many sessions share a message is the machine's affair, and with it the bytes of a round: no real limit here.
@pytest.mark.parametrize(("flags", "code"), [(("--sample-limit", "4000"), 0), (("--sample-limit", "10"), 1)])
async def test_wire_bytes(flags: tuple[str, ...], code: int) -> None:
    ended, output = await bench("wire_bytes", "--sessions", "2", *flags)
    assert ended == code, output
    assert ("MISSED: SAMPLE" in output) == bool(code)
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| 300")]
    dense, support, sample = (float(row[5].replace(",", "")) for row in rows)
    assert dense > 6 * 300 * 4
    assert sample < support


# What a round costs is the machine's affair: limits that every machine keeps, and one that none does.
@pytest.mark.parametrize(("rounds", "code"), [("1", 0), ("1e9", 1)])
async def test_orchestrator_scale(rounds: str, code: int) -> None:
    limits = ("--rounds-limit", rounds, "--added-limit", "1e5", "--memory-limit", "1e6")
    ended, output = await bench("orchestrator_scale", *limits)
    assert ended == code, output
    figures = output.splitlines()[-3:]
    assert [line.endswith("MISSED") for line in figures] == [bool(code), False, False]


# How long a round takes is the machine's affair: goals that every machine reaches, and none.
@pytest.mark.parametrize(("goal", "code"), [("0", 0), ("100", 1)])
async def test_drafting_ahead(goal: str, code: int) -> None:
    ended, output = await bench("drafting_ahead", "--goal", goal)
    assert ended == code, output
    assert ("MISSED" in output) == bool(code)
    rows = [line.split(" | ") for line in output.splitlines() if line.startswith("| 5 ms")]
    assert [row[1] for row in rows] == ["ratio", "coupled"]
    assert any(row[5] != "0%" for row in rows), "nothing that was drafted ahead was of use"


# How fast a cell is is the machine's affair: no real limit here.
@pytest.mark.parametrize(("flags", "code"), [(("--limit", "0"), 0), (("--limit", "1000"), 1)])
async def test_lookahead_cells(flags: tuple[str, ...], code: int) -> None:
    ended, output = await bench("lookahead_cells", *flags)
    assert ended == code, output
    assert ("MISSED: 2 clients, acceptance 0.9" in output) == bool(code)
    assert output.splitlines()[-1].startswith("least ratio to the best fixed lookahead: ")


# How much is served and how soon is the machine's affair: limits that every machine keeps.
async def test_overload() -> None:
    limits = ("--share-limit", "0", "--refusal-limit", "1e5", "--recovery-limit", "100", "--memory-limit", "1e4")
    ended, output = await bench("overload", "--goodput-limit", "0", *limits)
    assert ended == 0, output
    figures = output.splitlines()[-7:]
    assert "MISSED" not in output
    assert figures[-1] == "other ends of requests: 0.00 (limit 0)"


@pytest.mark.parametrize(("limit", "code"), [("0", 0), ("9", 1)])
async def test_unlike_texts(limit: str, code: int) -> None:
    ended, output = await bench("unlike_texts", "--limit", limit)
    assert ended == code, output
    assert ("MISSED" in output) == bool(code)
    assert output.count("acceptance") == 8
