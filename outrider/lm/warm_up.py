"""The first pass of an engine: proves that the model runs and pays for lazy initialisation before the first caller."""

import numpy as np
import torch

from outrider.lm.engine import Engine, Segment
from outrider.lm.features import FeatureWindow


def warm_up(engine: Engine) -> None:
    """One pass over two positions, then one over a third. Raises whatever the model raises."""
    tokens = np.zeros(2, np.int32)
    sequence = engine.open(tokens)
    try:
        engine.forward([Segment(sequence, tokens[sequence.length :], rows=1, fed=_fed(engine, 1))])
        (logits,) = engine.forward([Segment(sequence, tokens[:1], rows=1, fed=_fed(engine, 2))])
        if logits.device.type != "cpu":
            torch.accelerator.synchronize(logits.device)
    finally:
        sequence.free()


def _fed(engine: Engine, end: int) -> FeatureWindow | None:
    """The features of the token before position `end`, where the engine wants some."""
    feeding = engine.info.feeding
    if feeding is None:
        return None
    window = FeatureWindow(feeding.window)
    window.take(end - 1, torch.zeros(1, feeding.width, dtype=torch.bfloat16))
    return window
