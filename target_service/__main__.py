"""`python -m target_service --model MODEL ...`: one target worker."""

import sys

from outrider.lm.load import EngineOptions, load_engine
from outrider.process import announce, run_process
from target_service.config import TargetConfig
from target_service.service import TargetService


async def serve(config: TargetConfig) -> int:
    """Runs the worker until it is told to stop; returns the exit code."""
    options = EngineOptions(
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        kv_pages=config.kv_pages,
        page_size=config.page_size,
        context_length=config.context_length,
    )
    service = TargetService(config, lambda: load_engine(config.model, options))
    return await service.host.run(lambda port: announce(config.host, port))


if __name__ == "__main__":
    sys.exit(run_process(TargetConfig, serve, sys.argv[1:]))
