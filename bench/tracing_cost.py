"""What tracing costs a stream: off, on with a collector, and on with one that is dead, side by side.

    python -m bench.tracing_cost

Three systems run at the same time, and streams go to them in turn, to and fro, so that what else the machine does meets
all three. The models are synthetic ones whose passes take a fixed time; every request is traced (a sampler makes it
less). The collector is rotel, which throws away what it gets; the dead one is an address where nobody listens.

Figures: time from message to message as the clients see it, median and 99th percentile, and their ratio to "off".
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.wire_bytes import service, until_linked
from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2 import GenerateRequest, Speculation, StopConditions, TokenIds
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from outrider.v1.types_pb2 import SamplingParams

TARGET, DRAFT = "synthetic:vocab_size=64,seed=5,pass_ms={},", "synthetic:vocab_size=64,seed=5,noise=0.5"
DEAD = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """What processes that are started meanwhile find in theirs."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def collector() -> Iterator[dict[str, str]]:
    """The settings that send spans to a collector."""
    import rotel

    from tests.harness.processes import free_ports

    grpc, http = free_ports(2)
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            (
                *(Path(rotel.__file__).with_name("rotel-agent"), "start", "--exporter", "blackhole"),
                *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"),
                *("--pid-file", f"{directory}/pid", "--log-file", f"{directory}/log"),
            ),
            stdout=subprocess.DEVNULL,
        )
        try:
            yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{grpc}"}
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def system(settings: Mapping[str, str], pass_ms: float) -> AsyncIterator[OrchestratorServiceStub]:
    """Three services."""
    model = TARGET.format(pass_ms).rstrip(",")
    async with AsyncExitStack() as stack:
        with environment(settings):
            target = await stack.enter_async_context(service("target_service", "--model", model))
            draft = await stack.enter_async_context(service("draft_service", "--model", DRAFT))
            flags = ("--targets", target, "--drafts", draft, "--tokenizer", model, "--draft-timeout", "30")
            address = await stack.enter_async_context(service("orchestrator", *flags))
        stub = OrchestratorServiceStub(await stack.enter_async_context(connect(address)))
        await until_linked(stub)
        yield stub


async def gaps(stub: OrchestratorServiceStub, options: argparse.Namespace) -> list[float]:
    """Seconds from message to message, of all streams."""
    request = GenerateRequest(
        token_ids=TokenIds(ids=range(16)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopConditions(max_tokens=options.tokens, ignore_eos=True),
        speculation=Speculation(lookahead=4),
    )

    async def one() -> list[float]:
        moments = [time.perf_counter() async for _ in stub.Generate(request)]
        return [later - earlier for earlier, later in pairwise(moments[1:])]

    return [gap for each in await asyncio.gather(*(one() for _ in range(options.streams))) for gap in each]


async def measure(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        settings = {"off": {}, "on": stack.enter_context(collector()), "dead collector": DEAD, "off again": {}}
        stubs = {
            name: await stack.enter_async_context(system(settings[name], options.pass_ms))
            for name in options.systems.split(",")
        }
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")
        seen: dict[str, list[float]] = {name: [] for name in stubs}
        for turn in range(options.turns + 1):
            for name in list(stubs)[:: -1 if turn % 2 else 1]:
                found = await gaps(stubs[name], options)
                seen[name] += found if turn else []
    off = np.percentile(seen["off"], [50, 99])
    print("| tracing | rounds | median, ms | ratio | p99, ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, found in seen.items():
        p50, p99 = np.percentile(found, [50, 99])
        ratios = p50 / off[0], p99 / off[1]
        print(f"| {name} | {len(found)} | {1e3 * p50:.2f} | {ratios[0]:.3f} | {1e3 * p99:.2f} | {ratios[1]:.3f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4, help="at the same time")
    parser.add_argument("--tokens", type=int, default=100, help="of each")
    parser.add_argument("--turns", type=int, default=10, help="of each system; one more is not counted")
    parser.add_argument(
        "--systems",
        default="off,on,dead collector",
        help='those to compare; "off again" is a second "off", to see how far chance alone goes',
    )
    parser.add_argument("--pass-ms", type=float, default=20.0, help="what a pass of the target takes at least")
    asyncio.run(measure(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
