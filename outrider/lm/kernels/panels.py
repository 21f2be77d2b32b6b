"""Weights as the kernels read them: in panels of eight outputs, one after the other, on huge pages where there are any.

A product goes through all weights once, and a processor reads memory fastest from one end to the other, with few
pages to look up. A panel has eight weights of each of its outputs, then the next eight of each.
"""

import mmap
from contextlib import suppress
from threading import Lock

import numpy as np
import torch
from torch import nn

from outrider.lm.kernels.records import PANEL

# What is taken from the system at once. Nothing of it is memory before it is written to.
_CHUNK = 1 << 28
_ALIGNED = 64


def panelled(weight: torch.Tensor) -> torch.Tensor:
    """A copy of [outputs, inputs], bfloat16 or float32, in panels, flat. What fills up the last one is 0.

    `inputs` is a multiple of 8.
    """
    outputs, inputs = weight.shape
    missing = -outputs % PANEL
    filled = nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    parts = filled.reshape(-1, PANEL, inputs // 8, 8).transpose(1, 2)
    room = _rooms.take(filled.nbytes).view(weight.dtype)
    room.view(parts.shape).copy_(parts)
    return room


class _Rooms:
    """Memory that is given away piece by piece, and goes back when all pieces of a chunk have."""

    def __init__(self) -> None:
        self._lock = Lock()  # two models may be loaded at once
        self._chunk, self._used = np.empty(0, np.uint8), 0

    def take(self, size: int) -> torch.Tensor:
        """[size] bytes."""
        with self._lock:
            return self._taken(size)

    def _taken(self, size: int) -> torch.Tensor:
        if self._used + size > len(self._chunk):
            chunk = mmap.mmap(-1, max(size, _CHUNK), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # the kernel has no huge pages to give
                chunk.madvise(mmap.MADV_HUGEPAGE)
            self._chunk, self._used = np.frombuffer(chunk, np.uint8), 0
        begin = self._used
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return torch.from_numpy(self._chunk[begin : begin + size])


_rooms = _Rooms()
