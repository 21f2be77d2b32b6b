"""GGUF files are read once while a model loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import gguf


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Keeps the open reader and the map of tensor names between the steps of loading.

    transformers reads the header entry by entry, the whole vocabulary with it, for the configuration, for the tokenizer
    and for the weights, and makes the map of names once a tensor. That is most of the time that a small model takes to
    load. It asks the gguf module at each use, so that what is kept can be handed out there.
    """
    module: Any = gguf
    reader, name_map = module.GGUFReader, module.get_tensor_name_map
    module.GGUFReader, module.get_tensor_name_map = lru_cache(maxsize=1)(reader), cache(name_map)
    try:
        yield
    finally:
        module.GGUFReader, module.get_tensor_name_map = reader, name_map
