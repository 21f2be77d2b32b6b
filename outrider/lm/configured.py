"""The engine that a worker's settings ask for."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.config import WorkerConfig
from outrider.lm.engine import Engine
from outrider.lm.source import parse_source
from outrider.lm.synthetic import SyntheticEngine

# What loads models is imported when one is wanted: transformers' model code takes half of a worker's start.
if TYPE_CHECKING:
    from outrider.lm.load import EngineOptions
    from outrider.lm.quiet import Progress

log = logging.getLogger(__name__)


def configured_engine(config: WorkerConfig, *, layers: int = 0, target: str = "") -> Engine:
    """Loads the model, logging how far it is.

    `layers`: early exit after the first so many. `target`: MODEL whose embeddings a distilled draft takes.
    Raises ModelRefused.
    """
    synthetic = SyntheticEngine.of(parse_source(config.model))
    if synthetic is not None:
        return synthetic
    from outrider.lm.load import load_engine

    options = replace(engine_options(config), layers=layers, target=target)
    return load_engine(config.model, options, log_progress())


def engine_options(config: WorkerConfig) -> "EngineOptions":
    """How a worker serves its model."""
    from outrider.lm.load import EngineOptions

    return EngineOptions(
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        kv_pages=config.kv_pages,
        page_size=config.page_size,
        context_length=config.context_length,
        attention=config.attention,
        graphs=config.graphs,
    )


def log_progress() -> "Progress":
    """Logs every tenth of the way once: `loading 40 % (loading weights)`."""
    last = -1

    def report(fraction: float, what: str) -> None:
        nonlocal last
        if (tenth := int(10 * fraction)) > last:
            last = tenth
            log.info("loading %d %% (%s)", 10 * tenth, what)

    return report
