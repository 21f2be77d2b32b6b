"""Whether passes of few rows are recorded when a model is loaded, and what that costs."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from outrider.lm.attention import PagedPass
from outrider.lm.attention_choice import first_line
from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import ModelRefused
from outrider.lm.fixed_passes import FixedPasses, Play
from outrider.lm.quiet import Progress

if TYPE_CHECKING:
    from outrider.lm.flex.fixed import FixedPass

_log = logging.getLogger(__name__)

# auto: on where attention is flex on CUDA.
GraphsName = Literal["auto", "on", "off"]
# Rows of the recorded passes; larger ones have enough work for the processor not to be waited for.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def wants_scratch(asked: GraphsName, device: torch.device) -> bool:
    """Whether the storage needs a page for padding."""
    return asked == "on" or (asked == "auto" and device.type == "cuda")


def choose_graphs(engine: CausalLm, asked: GraphsName, check: Callable[[], None], progress: Progress) -> None:
    """Records passes of few rows as asked, proved by `check`, which raises where the engine computes something else.

    Where nobody asked for graphs and they fail, passes are launched kernel by kernel. Raises ModelRefused.
    """
    if not wants_scratch(asked, engine.device):
        return
    reason = _recording_fails(engine, check, progress)
    if reason is None:
        return
    if asked == "on":
        raise ModelRefused(f"graphs were asked for, and {reason}")
    _log.warning("no graphs, every kernel is launched by itself, because %s", reason)
    engine.play_from(None)


def _recording_fails(engine: CausalLm, check: Callable[[], None], progress: Progress) -> str | None:
    """Lets the engine play recorded passes; why that fails."""
    flex = engine.paged
    if flex is PagedPass:
        return "they need attention flex"
    from outrider.lm.flex.fixed import FixedPass
    from outrider.lm.flex.paged import Flex

    assert isinstance(flex, Flex)
    _log.info("recording passes of up to %d positions (--graphs off does without)", SIZES[-1])
    began, before = time.monotonic(), _reserved(engine.device)
    most_pages = -(-engine.info.context_length // engine.storage.page_size)
    try:
        passes = [FixedPass(rows, engine.run, engine.storage, flex, most_pages) for rows in SIZES]
        engine.play_from(FixedPasses(_played(passes, engine.device, progress)))
        check()
    except Exception as error:  # a model that waits for the device in its pass, memory that does not suffice
        return first_line(error)
    taken, what = (_reserved(engine.device) - before) / 1e6, "graphs" if engine.device.type == "cuda" else "passes"
    _log.info("recorded %d %s in %.1f s, %.0f MB", len(SIZES), what, time.monotonic() - began, taken)
    return None


def _played(
    passes: Sequence["FixedPass"], device: torch.device, progress: Progress
) -> Sequence[tuple["FixedPass", Play]]:
    if device.type != "cuda":  # shows that the buffers are right
        return [(fixed, fixed.compute) for fixed in passes]
    from outrider.lm.flex.graphs import record

    return record(passes, progress)


def _reserved(device: torch.device) -> int:
    """Bytes of the device that torch holds."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
