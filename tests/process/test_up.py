"""The whole system as processes, as a user starts it; models without weights."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from outrider.net.channel import connect
from outrider.net.errors import from_rpc_error
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.commands import SECONDS, Running, outrider, running
from tests.harness.orchestrator import ask
from tests.harness.processes import children_of, command_line, until_gone

TARGET = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5"
DRAFT = f"{TARGET},noise=0.5"


class Up(Running):
    """A running `outrider up`, with the addresses that it printed."""

    def __init__(self, command: Running) -> None:
        super().__init__(command.process)
        self.addresses: dict[str, str] = {}

    async def ready(self) -> None:
        async with asyncio.timeout(SECONDS):
            while not (line := (await self.out.readline()).decode()).startswith("ready"):
                assert line, "up ended: " + (await self.err.read()).decode()
                name, address = line.split()[:2]
                self.addresses[name] = address

    async def generate(self, *arguments: str) -> tuple[int | None, str, str]:
        return await outrider("generate", *arguments, "--address", self.addresses["orchestrator"])

    async def info(self) -> str:
        code, out, err = await outrider("info", "--address", self.addresses["orchestrator"])
        assert code == 0, err
        return out


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[Up]:
    async with running("outrider.cli.main", "up", "--port", "0", *arguments) as command:
        system = Up(command)
        await system.ready()
        yield system


async def test_up_serves_generate_and_ends_with_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PORT", "1")  # meant for the orchestrator, if for anyone: no worker may take it
    async with up("--target", TARGET, "--draft", DRAFT, "--lookahead", "20") as system:
        assert set(system.addresses) == {"orchestrator", "target", "draft", "store"}
        assert len(children_of(system.process.pid)) == 4
        texts = []
        for lookahead in ("0", "20"):
            flags = ("--temperature", "0", "--max-tokens", "30", "--lookahead", lookahead, "--stats")
            code, out, err = await system.generate("abcab", "--raw", *flags)
            assert code == 0, err
            assert "30 tokens in" in err
            texts.append(out)
        assert texts[0] == texts[1]
        assert len(texts[0]) == 31
        info = await system.info()
        assert "no:" not in info
        assert "20, at most 20" in info
        children = children_of(system.process.pid)
        system.interrupt()
        code, _, err = await system.end()
        assert (code, err.splitlines()[-1]) == (0, "stopped")
        await until_gone(*children)


async def rest_of(call: "grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]") -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_j7_ctrl_c_lets_a_generation_end_with_its_reason() -> None:
    slow = f"{TARGET},pass_ms=50"
    async with up("--target", slow, "--draft", DRAFT, "--store", "memory://", "--lookahead", "0") as system:
        async with connect(system.addresses["orchestrator"]) as channel:
            call = OrchestratorServiceStub(channel).Generate(ask((0, 1, 2), max_tokens=2000), timeout=SECONDS)
            for _ in range(3):
                await call.read()
            system.interrupt()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await rest_of(call)
        error = from_rpc_error(ended.value)
        assert error is not None, ended.value
        assert error.reason == types_pb2.ERROR_REASON_DRAINING
        code, _, err = await system.end()
        assert code == 0, err


async def test_death_of_a_service_ends_the_others_and_is_told() -> None:
    async with up("--target", TARGET, "--draft", DRAFT, "--store", "memory://") as system:
        children = children_of(system.process.pid)
        victim = next(pid for pid in children if "target_service" in command_line(pid))
        os.kill(victim, signal.SIGKILL)
        code, _, err = await system.end()
        assert (code, err.splitlines()[-1]) == (1, "error: target was killed by SIGKILL")
        await until_gone(*children)


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


async def test_b1_draft_with_another_vocabulary_translates_and_says_so() -> None:
    async with up("--target", TARGET, "--draft", "synthetic:vocab_size=25,seed=5,order=2") as system:
        # `up` waits for the pair for a while, not for ever.
        async with asyncio.timeout(SECONDS):
            while "draft" not in (info := await system.info()) or "no:" in info:
                pass
        line = next(line for line in info.splitlines() if line.startswith("draft"))
        assert "yes; vocabulary translated (intersection or string), 25 of its 25 tokens shared" in line
        texts = []
        for lookahead in ("0", "4"):
            flags = ("--temperature", "0", "--max-tokens", "30", "--lookahead", lookahead)
            code, out, err = await system.generate("abcab", "--raw", *flags)
            assert code == 0, err
            texts.append(out)
        assert texts[0] == texts[1]
        code, out, err = await system.generate("abc", "--raw", "--max-tokens", "5", "--stats")
        assert (code, len(out)) == (0, 6)
        assert "rounds without a block" in err
