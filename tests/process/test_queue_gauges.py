"""J9: at three times what a pool can do, the gauge that its autoscaler follows passes its target, and comes back."""

import asyncio
import signal
import time
import urllib.error
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import yaml

from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2 import FINISH_REASON_LENGTH
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.exporting import service
from tests.harness.orchestrator import Generation, ask
from tests.harness.processes import ROOT
from tests.harness.scrape import until

LAW = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5"
# Passes sleep for so long for each session in them, and take no CPU: what a pool can do is known.
SLOW = f"{LAW},pass_ms=2,item_us=6000"
RISE_SECONDS = 30.0
CLIENTS = 8

pytestmark = pytest.mark.timeout(600)


def autoscalers() -> Iterator[tuple[str, str, float]]:
    """(file, metric, target) of what scales the workers."""
    for name, gauge in (("hpa", "hpa.yaml"), ("keda", "scaledobjects.yaml")):
        file = ROOT / "k8s" / "components" / f"autoscaling-{name}" / gauge
        for document in yaml.safe_load_all(file.read_text()):
            yield from ((file.name, *each) for each in _targets(document["spec"]))


def _targets(spec: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for metric in spec.get("metrics", []):
        if metric["type"] == "Pods":
            yield metric["pods"]["metric"]["name"], float(metric["pods"]["target"]["averageValue"])
    for trigger in spec.get("triggers", []):
        if "query" in trigger["metadata"]:
            yield (
                trigger["metadata"]["query"].partition("{")[0].rpartition("(")[2],
                float(trigger["metadata"]["threshold"]),
            )


def target_of(metric: str) -> float:
    """What both autoscalers hold it to."""
    (value,) = {target for _, name, target in autoscalers() if name == metric}
    assert sum(name == metric for _, name, _ in autoscalers()) == 2
    return value


async def generated(stub: OrchestratorServiceStub, number: int) -> Generation:
    generation = Generation()
    async for response in stub.Generate(ask([number % 26, 2], max_tokens=16, seed=number)):
        generation.add(response)
    return generation


async def capacity(stub: OrchestratorServiceStub) -> float:
    """Requests a second of as many clients as keep the pool busy."""

    async def client(number: int) -> None:
        for turn in range(3):
            await generated(stub, CLIENTS * turn + number)

    began = time.monotonic()
    await asyncio.gather(*map(client, range(CLIENTS)))
    return 3 * CLIENTS / (time.monotonic() - began)


async def offered(stub: OrchestratorServiceStub, rate: float) -> list[Generation]:
    """Requests that come at their times until it is cancelled; then what all of them were answered."""
    running: list[asyncio.Task[Generation]] = []
    try:
        while True:
            running.append(asyncio.create_task(generated(stub, len(running))))
            await asyncio.sleep(1 / rate)
    except asyncio.CancelledError:
        return await asyncio.gather(*running)


@pytest.mark.parametrize("pool", ["target", "draft"])
async def test_j9_three_times_the_load_lifts_the_queue_over_the_autoscalers_target(pool: str) -> None:
    models, queue = {"draft": f"{LAW},agree=0.7", "target": LAW, pool: SLOW}, f"outrider_{pool}_queue"
    goal = target_of(queue)
    async with AsyncExitStack() as stack:
        draft, target = await asyncio.gather(
            stack.enter_async_context(service("draft_service", "--model", models["draft"])),
            stack.enter_async_context(service("target_service", "--model", models["target"])),
        )
        flags = ("--targets", target.address, "--drafts", draft.address, "--lookahead", "3", "--draft-timeout", "60")
        orchestrator = await stack.enter_async_context(service("orchestrator", "--tokenizer", LAW, *flags))
        await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", state="ready") == 2)
        short = {"draft": draft, "target": target}[pool]
        stub = OrchestratorServiceStub(await stack.enter_async_context(connect(orchestrator.address)))
        rate = await capacity(stub)
        assert (await short.seen()).sum(queue) < goal / 2
        load = asyncio.create_task(offered(stub, 3 * rate))
        began = time.monotonic()
        await until(short.metrics, lambda seen: seen.sum(queue) > goal)
        rose = time.monotonic() - began
        print(f"{pool}: {rate:.1f} requests a second, over {goal:g} items after {rose:.1f} s")
        assert rose < RISE_SECONDS
        load.cancel()
        generations = await load
        assert all(one.finish.reason == FINISH_REASON_LENGTH for one in generations)
        await until(short.metrics, lambda seen: seen.sum(queue) == 0)

        short.running.process.send_signal(signal.SIGKILL)
        await short.running.process.wait()
        gone = {"pool": pool, "state": "unavailable"}
        seen = await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", **gone) == 1)
        # A worker's series are its own: they end with it, and nobody else's name it.
        with pytest.raises(urllib.error.URLError):
            await short.seen()
        assert short.address not in seen.text
        assert seen.sum("outrider_workers", pool=pool) == 1
        for name in ("outrider_awaited_blocks", "outrider_verify_queue", "outrider_verify_in_flight"):
            assert seen.sum(name) == 0
