"""The scripts around `outrider bench` run, and say by their exit code when a goal is missed."""

import asyncio
import json
import re
from pathlib import Path

import psutil
import pytest

from bench import proposers
from tests.harness.openai_server import echo_server
from tests.process.test_row_benches import bench

pytestmark = pytest.mark.timeout(600)


async def test_loop_overhead() -> None:
    # No real goal here: what the services cost on a busy machine is the machine's affair.
    ended, output = await bench("loop_overhead", "--sessions", "4", "--loop-goal", "0", "--many-goal", "0")
    assert ended == 0, output
    first, second = output.splitlines()[-2:]
    assert first.startswith("services / bare loop: ")
    assert second.startswith("4 sessions / 1 session: ")


async def test_peers() -> None:
    with echo_server() as server:
        ended, output = await bench("peers", "--prompts", "quoting", "--openai", server.url)
    assert ended == 0, output
    for way in ("speculative", "plain", "transformers assisted", "transformers plain"):
        assert re.search(rf"^quoting +1 {way} .* 100%$", output, re.MULTILINE), output
    assert re.search(rf"^quoting +1 openai {re.escape(server.url)} ", output, re.MULTILINE), output


# What a peer reaches is the machine's affair: a goal that is always reached, and one that never is.
@pytest.mark.parametrize(("goal", "code"), [("0", 0), ("1e9", 1)])
async def test_plain_peer(goal: str, code: int) -> None:
    # The server runs in this process; another one is stopped in its place.
    stopped = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        with echo_server() as server:
            flags = ("--prompts", "quoting", "--openai", server.url, "--openai-pid", str(stopped.pid), "--goal", goal)
            ended, output = await bench("plain_peer", *flags)
        assert psutil.Process(stopped.pid).status() == psutil.STATUS_SLEEPING
    finally:
        stopped.kill()
        await stopped.wait()
    assert ended == code, output
    one, many = output.splitlines()[-2:]
    assert one.startswith(" 1 sessions: ours ")
    assert many.startswith("16 sessions: ours ")
    assert ("MISSED" in output) == bool(code)


# So is what a pass takes: limits that hold on every machine, and one that holds on none.
@pytest.mark.parametrize(("limit", "code"), [("1e6", 0), ("0", 1)])
async def test_engine_forward(limit: str, code: int) -> None:
    ended, output = await bench("engine_forward", "--limit", limit, "--single-limit", "1e6")
    assert ended == code, output
    assert output.count("MISSED: batch 2") == 3 * code
    assert [line.split()[:2] for line in output.splitlines()[3:9]] == [[b, n] for b in "12" for n in "159"]


# So is what a tiny random model says, and how fast on a busy machine.
@pytest.mark.parametrize(("goal", "code"), [("0", 0), ("99", 1)])
async def test_proposers(goal: str, code: int, tmp_path: Path) -> None:
    ended, output = await bench("proposers", "--suffix-goal", goal, "--auto-limit", "0", "--output", str(tmp_path))
    assert ended == code, output
    assert ("MISSED: suffix, quoting" in output) == bool(code)
    assert output.count("auto, ") == 3
    report = json.loads((tmp_path / "proposers.json").read_text())
    assert {row["proposer"] for row in report["rows"]} == {"plain", *proposers.PROPOSERS}
    assert all(row["same_tokens"] == 1.0 for row in report["rows"])
    assert (tmp_path / "proposers.svg").read_text().count("</svg>") == 1


async def test_copied() -> None:
    ended, output = await bench("copied", "--temperatures", "0", "1")
    assert ended == 0, output
    assert "point mass" in output
    assert len([line for line in output.splitlines() if line.split()[1:2] == ["quoting"]]) == 4


@pytest.mark.parametrize(("goal", "code"), [("1", 0), ("9", 1)])
async def test_draft_worth(goal: str, code: int) -> None:
    ended, output = await bench("draft_worth", "--tokens-goal", goal, "--step-goal", "1e6")
    assert ended == code, output
    tokens, step = output.splitlines()[-2:]
    assert tokens.startswith("tokens per pass: ")
    assert tokens.endswith("MISSED") == bool(code)
    assert step.startswith("draft step / target pass: ")
