"""`outrider demo` as a user runs it, with the weights that a user gets; and Ctrl-C in each of its phases."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.harness.commands import SECONDS, Running, outrider, running
from tests.harness.processes import children_of, until_gone

# A real model, on a machine that may do a lot beside it.
pytestmark = pytest.mark.timeout(600)

KINDS = ("chat", "writing", "code", "quoting")


async def test_demo_streams_four_kinds_both_ways_and_compares_them() -> None:
    # In float32: its second and third token are nearly tied, by 0.01, and bfloat16 rounds to either.
    code, out, err = await outrider("demo", "--tokens", "12", "--runs", "1", "--dtype", "float32")
    assert code == 0, err
    assert "\x1b" not in out  # a pipe is no terminal
    assert "target: ready" in err
    text, table = out.split("Speculative beside plain decoding")
    sections = text.split("\n── ")[1:]
    assert [section.split(",")[0] for section in sections] == [kind for kind in KINDS for _ in "sp"]
    chat_speculative, chat_plain = (section.splitlines()[1] for section in sections[:2])
    assert chat_speculative == chat_plain == "The sky blue is a result of the Earth's atmosphere scattering"
    for section in sections:
        assert "tokens/s" in section.rstrip().splitlines()[-1]
    rows = {line[:15].strip(): line[15:].split() for line in table.splitlines()}
    assert rows["tokens"] == ["12"] * 8
    assert float(rows["tokens/pass"][6]) > 1.5  # quoting, from the prompt
    assert [float(rows["tokens/pass"][index]) for index in (1, 3, 5, 7)] == [1.0] * 4
    assert all(cell.endswith("×") for cell in rows["speed-up"])
    assert all(f"{kind} identical" in " ".join(table.split()) for kind in KINDS)


@pytest.mark.parametrize("phase", ["loading", "generating"])
async def test_ctrl_c_leaves_no_process_and_says_one_line(phase: str) -> None:
    async with running("outrider.cli.main", "demo", "--tokens", "64", "--runs", "9") as demo:
        await (demo.line(demo.err, "target: loading") if phase == "loading" else demo.line(demo.out, "── chat"))
        await _interrupted(demo, least_children=3)


async def test_ctrl_c_while_downloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    index = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/simple"
    environment = {"OUTRIDER_CACHE": str(tmp_path), "PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull}
    async with server, running("outrider.cli.main", "demo", environment=environment) as demo:
        await asyncio.wait_for(asked.wait(), SECONDS)
        await _interrupted(demo, least_children=1)
    assert os.listdir(tmp_path) == [".lock"]


async def _interrupted(demo: Running, *, least_children: int) -> None:
    children = children_of(demo.process.pid)
    assert len(children) >= least_children
    demo.interrupt()
    code, _, err = await demo.end()
    assert code == 130, err
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    await until_gone(*children)
