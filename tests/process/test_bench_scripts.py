"""The scripts around `outrider bench` run, and say by their exit code when a goal is missed."""

import re

from tests.harness.openai_server import echo_server
from tests.process.test_row_benches import bench


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
