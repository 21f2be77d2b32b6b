"""Passes recorded as CUDA graphs: one launch in place of a model's hundreds."""

from collections.abc import Sequence
from typing import Any

import torch

from outrider.lm.fixed_passes import Play
from outrider.lm.flex.fixed import FixedPass
from outrider.lm.quiet import Progress

# Passes before a recording: kernels are compiled and libraries set up in them.
_WARM_UPS = 2


class Graph:
    """What a pass launches. Its logits lie in one place, which the next replay overwrites.

    Args:
        pool: memory that graphs share, as only one of them runs at a time.
    """

    def __init__(self, fixed: FixedPass, pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                fixed.compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = fixed.compute()

    def __call__(self) -> torch.Tensor:
        """Computes what lies in the pass's buffers."""
        self._graph.replay()
        return self._logits


@torch.inference_mode()
def record(passes: Sequence[FixedPass], progress: Progress) -> list[tuple[FixedPass, Play]]:
    """Records passes, given by rising number of rows: the largest first, whose memory does for all others.

    Raises whatever torch raises where a pass cannot be recorded.
    """
    recorded: list[tuple[FixedPass, Play]] = []
    pool = torch.cuda.graph_pool_handle()
    for index, fixed in enumerate(reversed(passes)):
        progress(index / len(passes), f"recording graphs ({index} of {len(passes)})")
        recorded.append((fixed, Graph(fixed, pool)))
    return recorded[::-1]
