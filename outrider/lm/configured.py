"""The engine that a worker's settings ask for."""

import logging

from outrider.config import WorkerConfig
from outrider.lm.engine import Engine
from outrider.lm.load import EngineOptions, load_engine

log = logging.getLogger(__name__)


def configured_engine(config: WorkerConfig, *, layers: int = 0) -> Engine:
    """Loads the model, logging how far it is. `layers`: early exit after the first so many. Raises ModelRefused."""
    options = EngineOptions(
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        kv_pages=config.kv_pages,
        page_size=config.page_size,
        context_length=config.context_length,
        layers=layers,
    )
    return load_engine(config.model, options, _log_progress)


def _log_progress(fraction: float, what: str) -> None:
    log.info("loading %3.0f %% %s", 100 * fraction, what)
