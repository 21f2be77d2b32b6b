"""Which attention serves a model: one that reads pages where they lie, or one that gathers them first."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from outrider.lm.attention import PagedPass
from outrider.lm.causal_lm import CausalLm, PagedOf
from outrider.lm.engine import ModelRefused, Segment
from outrider.lm.kv_storage import LayerShape
from outrider.lm.probe import compare, probe_tokens

_log = logging.getLogger(__name__)

# auto: flex on CUDA, gather elsewhere.
AttentionName = Literal["auto", "gather", "flex"]
# Smallest page and narrowest key or value that the kernels of CUDA multiply.
_LEAST_PAGE, _LEAST_WIDTH = 16, 16
# Tokens of a prompt that both kinds of attention compute: two entries of many rows.
_PROMPT = 160
# Tokens of a page unless said: a kernel reads one at a time, and CUDA's want more to do.
_PAGE, _CUDA_PAGE = 16, 64


def page_size_for(asked: int, device: torch.device) -> int:
    """Tokens of a KV page; 0 chooses."""
    return asked or (_CUDA_PAGE if device.type == "cuda" else _PAGE)


def choose_attention(
    engine: CausalLm, shapes: Sequence[LayerShape], asked: AttentionName, page_size: int, check: Callable[[], None]
) -> None:
    """Lets the engine attend as asked, proved by `check`, which raises where the engine computes something else.

    Where nobody asked for flex and it fails, pages are gathered. Raises ModelRefused.
    """
    device = engine.device
    if asked == "gather" or (asked == "auto" and device.type != "cuda"):
        check()
        return
    began, reason = time.monotonic(), _unsuited(shapes, page_size, device)
    if reason is None:
        reason = _flex_fails(engine, shapes, check)
    if reason is None:
        _log.info(
            "attention: flex, pages are read where they lie (compiled and proved in %.1f s)", time.monotonic() - began
        )
        return
    if asked == "flex":
        raise ModelRefused(f"attention flex was asked for, and {reason}")
    _log.warning("attention: gather, every layer copies the pages that it reads, because %s", reason)
    engine.attend_by(PagedPass)
    check()


def _unsuited(shapes: Sequence[LayerShape], page_size: int, device: torch.device) -> str | None:
    """Why kernels do not take such layers and pages."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"there are no kernels for {device.type}"
    if page_size < _LEAST_PAGE or page_size & (page_size - 1):
        return f"its kernels want pages of a power of two from {_LEAST_PAGE} on, not of {page_size} tokens"
    narrowest = min(min(it.key_dim, it.value_dim) for it in shapes)
    return f"its kernels want heads of {_LEAST_WIDTH} or wider, not {narrowest}" if narrowest < _LEAST_WIDTH else None


def _flex_fails(engine: CausalLm, shapes: Sequence[LayerShape], check: Callable[[], None]) -> str | None:
    """Lets the engine read pages where they lie; why that fails."""
    try:
        from outrider.lm.flex.paged import Flex

        if engine.device.type == "cpu":
            from outrider.lm.flex.walked import walk as kernel
        else:
            from outrider.lm.flex.compiled import CompiledKernel

            kernel = CompiledKernel()
        flex = Flex(kernel, shapes)
        engine.attend_by(flex)
        check()
        _agree_on_a_prompt(engine, flex)
    except Exception as error:  # a compiler that is missing, a kernel that does not fit the device
        return first_line(error)
    return None


def _agree_on_a_prompt(engine: CausalLm, flex: PagedOf) -> None:
    """Holds both kinds of attention against each other on more rows than the self-check has. What prompts need is
    compiled in it, before the first caller waits.

    Raises ModelRefused when they differ.
    """
    tokens, logits = probe_tokens(engine.info.vocab_size, engine.info.context_length, _PROMPT), []
    for paged in (PagedPass, flex):
        engine.attend_by(paged)
        sequence = engine.open(tokens[:1])
        try:
            logits += engine.forward([Segment(sequence, tokens, len(tokens))])
        finally:
            sequence.free()
    compare("prompt by flex", logits[1], logits[0])


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
