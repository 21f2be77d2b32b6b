"""How long sequences may get, and how many KV pages there are."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from outrider.lm.engine import ModelRefused
from outrider.lm.kv_storage import LayerShape
from outrider.lm.refuse import stable_context

_log = logging.getLogger(__name__)

# Parts of the free memory that KV pages may take when their number is not given.
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.8
# Sequences of full length that the pages hold at most when their number is not given.
_MOST_SEQUENCES = 64
_DEFAULT_CONTEXT = 4096
# The self-check runs two sequences.
LEAST_PAGES = 3


def context_length(config: PreTrainedConfig, wanted: int) -> int:
    """The longest sequence, in tokens: what is wanted, or the model's own when that is 0.

    Raises ModelRefused when more is wanted than the model has.
    """
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or _DEFAULT_CONTEXT
    stable = stable_context(config)
    if stable is not None and stable < own:
        _log.warning("beyond %d tokens the position encoding depends on the length: the context ends there", stable)
        own = stable
    if wanted > own:
        raise ModelRefused(f"a context length of {wanted} was asked for, the model has {own}")
    return wanted or own


def choose_pages(layers: Sequence[LayerShape], context: int, page_size: int, device: torch.device) -> int:
    """Pages for many sequences of full length, as far as a part of the free memory goes."""
    page_bytes = page_size * sum(layer.token_bytes for layer in layers)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
    wanted = _MOST_SEQUENCES * -(-context // page_size)
    return max(LEAST_PAGES, min(wanted, int(share * free / page_bytes)))


def available_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be had without swapping: the machine's, or what is left of the container's limit (cgroup v2)."""
    machine = _machine_bytes(meminfo)
    limit, current = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return machine if limit is None or current is None else min(machine, max(0, limit - current))


def _machine_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kilobytes["MemAvailable"] * 1024


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such limit here
        return None
    return int(text) if text.isdigit() else None
