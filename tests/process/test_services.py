"""The README's commands as they stand there: one service at a time, and calls from a foreign gRPC client."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.harness.commands import SECONDS, outrider, running
from tests.harness.processes import ROOT, free_ports
from tests.harness.valkey import valkey_server

README = (ROOT / "README.md").read_text()
MODEL = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5"
GRPCURL = Path(sys.executable).with_name("grpcurl")
# Names of services, and addresses in the README.
PORTS = {"target_service": "7801", "draft_service": "7802", "orchestrator": "7800"}


def readme_commands(start: str) -> list[list[str]]:
    """The commands in the README that begin so, as words; a quotation may run over lines."""
    lines = iter("".join(re.findall(r"```\n(.*?)```", README, re.DOTALL)).splitlines())
    commands = []
    for line in lines:
        if line.startswith(start):
            while line.endswith("\\") or line.count("'") % 2:
                line = f"{line.removesuffix(chr(92))}\n{next(lines)}"
            commands.append(shlex.split(line))
    return commands


@asynccontextmanager
async def services(store: str) -> AsyncIterator[str]:
    """Starts what the README starts one at a time, with a model without weights; the orchestrator's address."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    here = {f"127.0.0.1:{PORTS[name]}": f"127.0.0.1:{port}" for name, port in ports.items()}
    here |= {PORTS[name]: port for name, port in ports.items()}
    here |= {"MODEL": MODEL, "redis://127.0.0.1:6379/0": store}
    async with AsyncExitStack() as stack:
        for command in readme_commands("python -m"):
            started = await stack.enter_async_context(running(*(here.get(word, word) for word in command[2:])))
            address = await started.address()
        yield address


async def grpcurl(*arguments: str) -> str:
    """What it printed; fails the test when it failed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(str(GRPCURL), *arguments, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.skipif(not GRPCURL.exists(), reason="grpcurl has no package for this platform")
async def test_the_readme_works_from_one_service_at_a_time_to_grpcurl(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as valkey:
        async with services(valkey.url) as address:
            code, text, err = await outrider("generate", "abcab", "--raw", "--max-tokens", "20", "--address", address)
            assert (code, len(text)) == (0, 21), err
            answers = []
            for command in readme_commands("grpcurl"):
                answers.append(await grpcurl(*(word.replace("127.0.0.1:7800", address) for word in command[1:])))
            listed, chat, raw, session = answers
            assert "outrider.v1.OrchestratorService" in listed.split()
            assert "grpc.health.v1.Health" in listed.split()
            assert '"finish"' in chat
            assert '"FINISH_REASON_LENGTH"' in raw
            assert json.loads(session)["state"] == "SESSION_STATE_FINISHED"


async def test_settings_come_from_the_environment() -> None:
    (port,) = free_ports(1)
    environment = {"OUTRIDER_MODEL": MODEL, "OUTRIDER_PORT": port}
    async with running("target_service", environment=environment) as target:
        assert await target.address() == f"127.0.0.1:{port}"
        environment = {"OUTRIDER_TARGETS": f"127.0.0.1:{port}", "OUTRIDER_TOKENIZER": MODEL, "OUTRIDER_LOOKAHEAD": "3"}
        async with running("orchestrator", "--port", "0", environment=environment) as orchestrator:
            address = await orchestrator.address()
            code, out, err = await outrider("generate", "abc", "--raw", "--max-tokens", "5", "--address", address)
            assert (code, len(out)) == (0, 6), err
            code, out, _ = await outrider("info", "--address", address)
            assert "lookahead          3, at most 16" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokenizer gguf:/no/such.gguf", "model file /no/such.gguf does not exist"),
        (f"--tokenizer {MODEL} --store redis://127.0.0.1:1", "session store redis://127.0.0.1:1"),
    ],
)
async def test_what_keeps_the_orchestrator_from_starting_is_one_line(flags: str, message: str) -> None:
    async with running("orchestrator", "--targets", "h:1", *flags.split()) as orchestrator:
        code, out, err = await orchestrator.end()
    (line,) = err.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith(f"error: {message}")


async def test_the_orchestrator_names_a_busy_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        flags = ("--targets", "h:1", "--tokenizer", MODEL, "--port", str(port))
        async with running("orchestrator", *flags) as orchestrator:
            code, _, err = await orchestrator.end()
    assert (code, err) == (2, f"error: cannot listen on 127.0.0.1:{port}: the port is in use or not ours to bind\n")


def full_pipe() -> tuple[int, int]:
    """A pipe that takes nothing more until it is read: its ends, to read from and to write to."""
    out, into = os.pipe()
    os.set_blocking(into, False)
    while True:
        try:
            os.write(into, bytes(4096))
        except BlockingIOError:
            os.set_blocking(into, True)
            return out, into


async def until_bound(port: str) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", int(port))
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return


@pytest.mark.parametrize(
    "flags",
    [
        ("target_service", "--model", MODEL),
        ("draft_service", "--model", MODEL),
        ("orchestrator", "--targets", "127.0.0.1:1", "--tokenizer", MODEL),
    ],
    ids=lambda flags: flags[0],
)
async def test_a_service_hears_sigterm_before_it_says_where_it_listens(flags: tuple[str, ...]) -> None:
    """Nobody reads its line yet, so it stands in the middle of saying it."""
    (port,) = free_ports(1)
    out, into = full_pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *flags, "--port", port, cwd=ROOT, stdout=into, stderr=asyncio.subprocess.PIPE
        )
        await until_bound(port)
        process.send_signal(signal.SIGTERM)
        os.close(into)
        said = await asyncio.to_thread(os.read, out, 1 << 20)
        while part := await asyncio.to_thread(os.read, out, 1 << 20):
            said += part
        _, err = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        os.close(out)
    assert process.returncode == 0, err.decode()
    assert said.strip(bytes(1)) == f"listening on 127.0.0.1:{port}\n".encode()
