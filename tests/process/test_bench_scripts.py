"""The scripts around `outrider bench` run, and say by their exit code when a goal is missed."""

import pytest

from tests.harness.openai_server import echo_server
from tests.process.test_row_benches import bench


@pytest.mark.parametrize(("flags", "code"), [(("--loop-goal", "0", "--many-goal", "1"), 0), (("--loop-goal", "99"), 1)])
async def test_loop_overhead(flags: tuple[str, ...], code: int) -> None:
    ended, output = await bench("loop_overhead", "--sessions", "4", *flags)
    assert ended == code, output
    first, second = output.splitlines()[-2:]
    assert "services / bare loop: " in first
    assert "4 sessions / 1 session: " in second
    assert ("MISSED: services / bare loop" in first) == bool(code)


async def test_peers() -> None:
    with echo_server() as server:
        ended, output = await bench("peers", "--prompts", "quoting", "--openai", server.url)
    assert ended == 0, output
    rows = {line.split("  ")[0].strip(): line for line in output.replace("quoting         1   ", "").splitlines()}
    for way in ("speculative", "plain", "transformers assisted", "transformers plain"):
        assert "100%" in rows[way]
    assert any(name.startswith(f"openai {server.url}") for name in rows)
