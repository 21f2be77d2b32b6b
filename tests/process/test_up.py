"""The whole system as processes, as a user starts it; models without weights."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.harness.processes import ROOT, children_of, command_line, runs, until_gone

TARGET = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5"
DRAFT = f"{TARGET},noise=0.5"
READY_SECONDS = 90.0


def command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "outrider.cli.main", *arguments)


async def outrider(*arguments: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a command that ends by itself."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command(*arguments), cwd=ROOT, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), READY_SECONDS)
    return process.returncode, out.decode(), err.decode()


class Up:
    """A running `outrider up`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.addresses: dict[str, str] = {}

    async def ready(self) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(READY_SECONDS):
            while (line := (await self.process.stdout.readline()).decode()) and not line.startswith("ready"):
                name, address = line.split()[:2]
                self.addresses[name] = address
        assert line, "up ended: " + (await self.process.stderr.read()).decode()  # type: ignore[union-attr]

    async def generate(self, *arguments: str) -> tuple[int | None, str, str]:
        return await outrider("generate", *arguments, "--address", self.addresses["orchestrator"])


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[Up]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command("up", "--port", "0", *arguments), cwd=ROOT, stdout=pipe, stderr=pipe, start_new_session=True
    )
    running = Up(process)
    try:
        await running.ready()
        yield running
    finally:
        children = children_of(process.pid)
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 30)
        await until_gone(*children)


async def test_up_serves_generate_and_ends_with_a_signal() -> None:
    async with up("--target", TARGET, "--draft", DRAFT) as system:
        assert set(system.addresses) == {"orchestrator", "target", "draft", "store"}
        assert len(children_of(system.process.pid)) == 4
        texts = []
        for lookahead in ("0", "4"):
            flags = ("--temperature", "0", "--max-tokens", "30", "--lookahead", lookahead, "--stats")
            code, out, err = await system.generate("abcab", "--raw", *flags)
            assert code == 0, err
            assert "30 tokens in" in err
            texts.append(out)
        assert texts[0] == texts[1]
        assert len(texts[0]) == 31
        code, out, _ = await outrider("info", "--address", system.addresses["orchestrator"])
        assert code == 0
        assert "no:" not in out
        children = children_of(system.process.pid)
        os.killpg(system.process.pid, signal.SIGINT)  # Ctrl-C
        assert await asyncio.wait_for(system.process.wait(), 30) == 0
        await until_gone(*children)


async def test_death_of_a_service_ends_the_others_and_is_told() -> None:
    async with up("--target", TARGET, "--draft", DRAFT, "--store", "memory://") as system:
        children = children_of(system.process.pid)
        victim = next(pid for pid in children if "target_service" in command_line(pid))
        os.kill(victim, signal.SIGKILL)
        assert await asyncio.wait_for(system.process.wait(), 30) == 1
        assert system.process.stderr is not None
        last = (await system.process.stderr.read()).decode().strip().splitlines()[-1]
        assert last.startswith("error: target was killed by SIGKILL")
        assert not any(runs(pid) for pid in children)


async def test_sigkill_of_up_leaves_no_process() -> None:
    async with up("--target", TARGET, "--draft", DRAFT) as system:
        children = children_of(system.process.pid)
        assert len(children) == 4
        system.process.kill()
        await system.process.wait()
        await until_gone(*children)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target", "gguf:/no/such.gguf", "--draft", DRAFT), ["target", "/no/such.gguf", "does not exist"]),
        (("--target", TARGET, "--draft", "synthetic:vocab=3"), ["draft", "unknown setting 'vocab'"]),
        (("--target", TARGET, "--draft", DRAFT, "--store", "redis://127.0.0.1:1/0"), ["orchestrator", "127.0.0.1:1"]),
        (("--target", TARGET, "--draft", DRAFT, "--store", "mysql://x"), ["orchestrator", "store"]),
    ],
)
async def test_what_keeps_it_from_starting_is_one_line(flags: tuple[str, ...], words: list[str]) -> None:
    code, out, err = await outrider("up", "--port", "0", *flags)
    assert (code, out) == (1, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert all(word in errors[0] for word in words), errors


async def test_busy_port_is_told() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = str(server.sockets[0].getsockname()[1])
    async with server:
        code, _, err = await outrider("up", "--target", TARGET, "--draft", DRAFT, "--port", port)
    assert code == 1
    assert f"127.0.0.1:{port}" in err.splitlines()[-1]


async def test_b1_draft_with_another_vocabulary_is_not_used_and_says_why() -> None:
    async with up("--target", TARGET, "--draft", "synthetic:vocab_size=25,seed=5") as system:
        code, out, _ = await outrider("info", "--address", system.addresses["orchestrator"])
        assert code == 0
        assert "no:" in out
        code, out, err = await system.generate("abc", "--raw", "--max-tokens", "5", "--stats")
        assert code == 0
        assert "rounds without a block" in err
