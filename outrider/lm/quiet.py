"""transformers' bars and advice, kept off stderr while a model loads."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

# Called with a fraction in [0, 1] and what is being done.
Progress = Callable[[float, str], None]


@contextmanager
def quiet(progress: Progress) -> Iterator[None]:
    """Gives the progress of loading weights to `progress`; shows neither bars nor warnings."""

    def track(_factory: object, args: tuple[Any, ...], options: dict[str, Any]) -> "_Tracked":
        return _Tracked(args[0] if args else options.get("iterable", ()), progress)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    previous = transformers_logging.set_tqdm_hook(track)
    # The GGUF reader makes its bar without asking the hook.
    gguf_reader: Any = modeling_gguf_pytorch_utils
    gguf_bar = gguf_reader.tqdm
    gguf_reader.tqdm = lambda items, **_: _Tracked(items, progress)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_reader.tqdm = gguf_bar
        transformers_logging.set_tqdm_hook(previous)
        transformers_logging.set_verbosity(verbosity)


class _Tracked:
    """Stands for a tqdm bar over an iterable."""

    def __init__(self, items: Iterable[Any], progress: Progress) -> None:
        self._items, self._progress = items, progress

    def __iter__(self) -> Iterator[Any]:
        items = list(self._items)
        for index, item in enumerate(items):
            yield item
            self._progress((index + 1) / len(items), "loading weights")

    def __enter__(self) -> "_Tracked":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_options: None
