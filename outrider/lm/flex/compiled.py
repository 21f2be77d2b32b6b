"""The kernels that torch makes of FlexAttention for these tables.

Block indices of a mask name pages of the storage, so that a kernel goes from page to page of a sequence; the mask's
function turns a slot into a place and asks what the row sees. Blocks that are seen whole are not listed apart: the
kernel for few rows would no longer share a sequence's pages out over the processors (torch/_inductor/kernel/flex).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from outrider.lm.flex.tables import Scoring, Tables

# A block of the mask holds all rows of an entry, and whatever the kernels make of them with the heads of a group.
_ROW_BLOCK = 128
# Most rows with their heads, and widest key, for the kernel that shares pages out.
_SHARED_ROWS, _SHARED_WIDTH = 64, 256

# Sizes and heights for which one way of scoring is compiled, at most.
_MOST_SHAPES = 64

_Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class CompiledKernel:
    """A Kernel. One compilation for each way of scoring and each height of entries; where calls have fixed shapes, one
    for each of those."""

    def __init__(self) -> None:
        _choose_cache()
        self._made: dict[Scoring, _Function] = {}

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables, scoring: Scoring, /
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Kernel."""
        pages = tables.pages
        if query.device.type == "cpu":  # that kernel wants a list as long as the storage
            pages = torch.nn.functional.pad(pages, (0, len(tables.places) - pages.shape[1]))
        if not scoring.fixed:
            for tensor in (query, tables.counts, pages, tables.first, tables.last):
                torch._dynamo.mark_dynamic(tensor, 0)
            if query.device.type != "cpu":
                torch._dynamo.mark_dynamic(pages, 1)
        if scoring not in self._made:
            self._made[scoring] = torch.compile(  # type: ignore[call-overload]
                _function(scoring), fullgraph=True, dynamic=False, isolate_recompiles=True, recompile_limit=_MOST_SHAPES
            )
        made = self._made[scoring]
        return made(query, keys, values, tables.counts, pages, tables.first, tables.last, tables.places)


def _choose_cache() -> None:
    """What is compiled lies with our other caches, unless somebody said where: a second start finds it there."""
    root = Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider").expanduser()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(root / "triton"))


def _function(scoring: Scoring) -> _Function:
    """What is compiled: everything that is no argument is a constant of the kernel."""
    scale, softcap, summed, fixed = scoring.scale, scoring.softcap, scoring.summed, scoring.fixed

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        counts: torch.Tensor,
        pages: torch.Tensor,
        first: torch.Tensor,
        last: torch.Tensor,
        places: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        size = keys.shape[2] // places.shape[0]

        def seen(entry: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            place = places[slot // size] * size + slot % size
            return (place >= first[entry, row]) & (place <= last[entry, row])

        def capped(score: torch.Tensor, *_at: torch.Tensor) -> torch.Tensor:
            return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

        mask = BlockMask.from_kv_blocks(
            counts[:, None, None],
            pages[:, None, None],
            BLOCK_SIZE=(_ROW_BLOCK, size),
            mask_mod=seen,
            seq_lengths=(query.shape[2], keys.shape[2]),
            compute_q_blocks=False,
        )
        output: Any = flex_attention(
            query,
            keys,
            values,
            score_mod=None if softcap is None else capped,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
            kernel_options=_options(query, keys, size, fixed),
            return_aux=AuxRequest(lse=True) if summed else None,
        )
        return (output[0], output[1].lse) if summed else (output, None)

    return attend


def _options(query: torch.Tensor, keys: torch.Tensor, page_size: int, fixed: bool) -> Any:
    """Which of torch's kernels, and its tiles: those that it would choose do not fit into pages."""
    height, width, group = query.shape[2], query.shape[3], query.shape[1] // keys.shape[1]
    shares_out = fixed and group & (group - 1) == 0 and height * group <= _SHARED_ROWS and width <= _SHARED_WIDTH
    if shares_out:
        return {"BACKEND": "TRITON_DECODE"}
    wide = width > _SHARED_WIDTH
    columns = (16 if query.dtype == torch.float32 else 32) if wide else 64
    return {
        "BACKEND": "TRITON",
        "BLOCK_M": 16 if height <= 16 else 32 if wide else 64,
        "BLOCK_N": min(page_size, columns),
    }
