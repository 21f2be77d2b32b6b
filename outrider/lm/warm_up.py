"""The first pass of an engine: proves that the model runs and pays for lazy initialisation before the first caller."""

import numpy as np
import torch

from outrider.lm.engine import Engine, Segment


def warm_up(engine: Engine) -> None:
    """One pass over two positions, then one over a third. Raises whatever the model raises."""
    tokens = np.zeros(2, np.int32)
    sequence = engine.open(tokens)
    try:
        engine.forward([Segment(sequence, tokens[sequence.length :], rows=1)])
        (logits,) = engine.forward([Segment(sequence, tokens[:1], rows=1)])
        if logits.device.type != "cpu":
            torch.accelerator.synchronize(logits.device)
    finally:
        sequence.free()
