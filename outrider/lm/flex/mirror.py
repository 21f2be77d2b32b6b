"""Arrays that are made on the host and wanted on the device at addresses that never change."""

import math
from collections.abc import Mapping

import numpy as np
import torch

# Elements that an array's place is a multiple of: kernels read whole vectors.
_ALIGNMENT = 64


class Mirror:
    """Several arrays of one type in one piece of memory on either side, sent with one copy.

    Attributes:
        host: by name, to be written between `wait` and `send`.
        device: the same on the device.

    Args:
        shapes: of the arrays, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [math.prod(shape) for shape in shapes.values()]
        places = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        pinned = device.type == "cuda"
        self._host = torch.zeros(places[-1], dtype=dtype, pin_memory=pinned)
        self._device = torch.zeros(places[-1], dtype=dtype, device=device)
        self._sent = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        parts = list(zip(shapes.items(), places, sizes, strict=False))
        self.host: dict[str, np.ndarray] = {
            name: self._host[at : at + size].view(shape).numpy() for (name, shape), at, size in parts
        }
        self.device = {name: self._device[at : at + size].view(shape) for (name, shape), at, size in parts}

    def wait(self) -> None:
        """Returns when what was sent last has left the host."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copies all of it, without waiting."""
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
