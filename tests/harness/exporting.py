"""Services as processes that export metrics and write records."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.net.channel import connect
from outrider.v1.orchestrator_pb2 import GenerateRequest
from outrider.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.harness.commands import SECONDS, Running, running
from tests.harness.orchestrator import Generation
from tests.harness.scrape import Scrape, scrape

FLAGS = ("--metrics-address", "127.0.0.1:0", "--log-format", "json")


@dataclass
class Process:
    """A service that runs.

    Attributes:
        metrics: where it exports them.
        logs: its records so far.
    """

    running: Running
    address: str = ""
    metrics: str = ""
    logs: list[dict[str, str]] = field(default_factory=list)

    async def seen(self) -> Scrape:
        return await asyncio.to_thread(scrape, self.metrics)

    async def ended(self) -> None:
        """Ends it; every line that it wrote is a record."""
        self.running.process.terminate()
        code, out, err = await self.running.end()
        self.logs += map(json.loads, err.splitlines())
        assert (code, out) == (0, "")


@asynccontextmanager
async def service(*arguments: str, port: str = "0") -> AsyncIterator[Process]:
    """Runs it on this port (0 chooses one); begins once it listens."""
    async with running(*arguments, "--port", port, *FLAGS) as started:
        process = Process(started)
        async with asyncio.timeout(SECONDS):
            while not process.metrics:
                process.logs.append(json.loads(await started.err.readline()))
                message = process.logs[-1]["message"]
                if message.startswith("metrics at "):
                    process.metrics = message.removeprefix("metrics at http://").removesuffix("/metrics")
        process.address = await started.address()
        yield process


async def generate(address: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """Everything that the requests, sent at once, are answered."""
    async with connect(address) as channel:
        stub = OrchestratorServiceStub(channel)

        async def one(request: GenerateRequest) -> Generation:
            generation = Generation()
            async for response in stub.Generate(request, timeout=SECONDS, wait_for_ready=True):
                generation.add(response)
            return generation

        return await asyncio.gather(*map(one, requests))
