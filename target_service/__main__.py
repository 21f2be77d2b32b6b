"""`python -m target_service --model MODEL ...`: one target worker."""

import sys
from functools import partial

from outrider.lm.configured import configured_engine
from outrider.observe.export import exported
from outrider.observe.metrics import WorkerMetrics
from outrider.observe.otlp import traces
from outrider.process import announce, run_process
from target_service.config import TargetConfig
from target_service.service import TargetService


async def serve(config: TargetConfig) -> int:
    """Runs the worker until it is told to stop; returns the exit code."""
    async with (
        exported("outrider-target", config.metrics_address, partial(WorkerMetrics, "target")) as metrics,
        traces("outrider-target") as spans,
    ):
        service = TargetService(config, lambda: configured_engine(config), metrics, spans)
        return await service.host.run(lambda port: announce(config.host, port))


if __name__ == "__main__":
    sys.exit(run_process(TargetConfig, serve, sys.argv[1:]))
