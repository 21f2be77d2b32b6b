"""`python -m draft_service --model MODEL ...`: one draft worker."""

import sys

from draft_service.config import DraftConfig
from draft_service.loading import load_engines
from draft_service.service import DraftService
from outrider.observe.export import exported
from outrider.observe.metrics import DraftMetrics
from outrider.observe.otlp import traces
from outrider.process import announce, run_process


async def serve(config: DraftConfig) -> int:
    """Runs the worker until it is told to stop; returns the exit code."""
    async with (
        exported("outrider-draft", config.metrics_address, DraftMetrics) as metrics,
        traces("outrider-draft") as spans,
    ):
        service = DraftService(config, lambda: load_engines(config), metrics, spans)
        return await service.host.run(lambda port: announce(config.host, port))


if __name__ == "__main__":
    sys.exit(run_process(DraftConfig, serve, sys.argv[1:]))
