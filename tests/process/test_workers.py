"""The workers as processes: what they print, how they end."""

import asyncio
import hashlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from outrider.net.channel import connect
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tests.harness.commands import SECONDS as READY_SECONDS
from tests.harness.models import VOCAB, save_tiny
from tests.harness.processes import ROOT
from tests.harness.workers import health_of, verify_item

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def worker(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, stdout=pipe, stderr=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def address_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), READY_SECONDS)).decode()
    assert line.startswith("listening on "), line
    return line.removeprefix("listening on ").strip()


async def end_of(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), READY_SECONDS)
    return process.returncode, out.decode(), err.decode()


async def until_serving(address: str) -> None:
    async with connect(address) as channel, asyncio.timeout(READY_SECONDS):
        while await health_of(channel) != SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("module", ["target_service", "draft_service"])
async def test_a_worker_announces_itself_serves_and_ends_with_0(module: str) -> None:
    async with worker(module, "--model", "synthetic:vocab_size=26", "--grace", "1") as process:
        address = await address_of(process)
        await until_serving(address)
        process.send_signal(signal.SIGTERM)
        code, out, err = await end_of(process)
        assert (code, out) == (0, "")
        assert all("INFO" in line for line in err.splitlines()), err


async def test_j5_j6_a_worker_that_loads_is_alive_not_ready_and_can_be_stopped() -> None:
    async with worker("target_service", "--model", "synthetic:load_ms=600000", "--grace", "0.2") as process:
        address = await address_of(process)
        async with connect(address) as channel:
            assert await health_of(channel) == NOT_SERVING
        process.send_signal(signal.SIGINT)
        code, _, err = await end_of(process)
        assert code == 0, err


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("target_service", ["--model", "synthetic:colour=red"], "error: synthetic model: unknown setting 'colour'"),
        ("target_service", [], "error: --model: field required"),
        ("draft_service", ["--model", "./no/such/model"], "error: model directory './no/such/model' does not exist"),
        ("target_service", ["--model", "m", "--tls-cert", "c"], "error: --tls-key is required for --tls-cert"),
        ("draft_service", ["--model", "m", "--proposers", "x"], "error: --proposers: 'x' is no proposer"),
    ],
)
async def test_what_an_operator_can_put_right_is_one_line(module: str, arguments: list[str], message: str) -> None:
    async with worker(module, *arguments) as process:
        code, _, err = await end_of(process)
        (line,) = err.splitlines()
        assert line.startswith(message)
        assert code == 2


async def test_a_busy_port_is_one_line() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        async with worker("target_service", "--model", "synthetic:", "--port", str(port)) as process:
            code, out, err = await end_of(process)
            assert (code, out) == (2, "")
            assert err.splitlines() == [
                f"error: cannot listen on 127.0.0.1:{port}: the port is in use or not ours to bind"
            ]


async def test_j7_sigterm_lets_running_work_finish_and_refuses_new_work() -> None:
    async with worker("target_service", "--model", "synthetic:pass_ms=5000", "--grace", "60") as process:
        address = await address_of(process)
        await until_serving(address)
        async with connect(address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            running = asyncio.ensure_future(
                stub.Verify(target_pb2.VerifyRequest(items=[verify_item("s", [1])]), timeout=READY_SECONDS)
            )
            info = target_pb2.TargetServiceGetInfoRequest()
            while not (await stub.GetInfo(info, timeout=READY_SECONDS)).load.queued_items:
                assert not running.done()
            process.send_signal(signal.SIGTERM)
            assert (await running).results[0].status.code == 0
        code, _, err = await end_of(process)
        assert code == 0, err


async def test_prompt_lookup_alone_loads_no_model() -> None:
    flags = ("--model", "synthetic:load_ms=600000", "--proposers", "prompt_lookup")
    async with worker("draft_service", *flags) as process:
        address = await address_of(process)
        await until_serving(address)
        async with connect(address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            info = await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest(), timeout=READY_SECONDS)
            assert (info.model.vocab_size, list(info.proposers)) == (16, [draft_pb2.PROPOSER_PROMPT_LOOKUP])


async def test_k4_a_target_says_the_same_to_the_last_bit_after_a_restart(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama")
    rng = np.random.default_rng(0)
    items = [
        verify_item(f"s{number}", rng.integers(3, VOCAB, 9 + number).tolist(), rng.integers(3, VOCAB, 3).tolist())
        for number in range(8)
    ]
    said = []
    for _ in range(2):
        async with worker("target_service", "--model", model, "--dtype", "float32", "--threads", "1") as process:
            address = await address_of(process)
            await until_serving(address)
            async with connect(address) as channel:
                verify = target_pb2_grpc.TargetServiceStub(channel).Verify
                answers = [
                    await verify(target_pb2.VerifyRequest(items=[item]), timeout=READY_SECONDS) for item in items
                ]
        assert all(len(answer.results[0].logits.data) == 4 * 4 * VOCAB for answer in answers)
        said.append([hashlib.sha256(answer.results[0].logits.data).hexdigest() for answer in answers])
    assert said[0] == said[1]
    assert len(set(said[0])) == 8
