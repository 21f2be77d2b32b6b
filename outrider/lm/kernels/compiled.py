"""The kernels as torch's code calls them."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.lm.kernels import decoding
from outrider.lm.kernels.records import ATTENTION, CHUNK, LAYER, LINEAR, PASS, PRODUCT, UNIT, scratch_size
from outrider.lm.kernels.team import Team
from outrider.lm.ragged import RaggedBatch

_log = logging.getLogger(__name__)

Record = npt.NDArray[np.void]

# Rows of a unit of attention, a row for each head: its queries and scores stay in the processor's cache.
_UNIT_ROWS = 48
# A batch with fewer units a thread shares each unit's chunks among the threads.
_FEW = 4
_PASSES = {torch.bfloat16: decoding.pass_bfloat16, torch.float32: decoding.pass_float32}
_LINEARS = {torch.bfloat16: decoding.linear_bfloat16, torch.float32: decoding.linear_float32}
_ATTENTIONS = {torch.bfloat16: decoding.attention_bfloat16, torch.float32: decoding.attention_float32}


class Kernels:
    """Compiles on first use. Raises OSError or AttributeError where torch brings no GNU OpenMP."""

    def __init__(self) -> None:
        self._team = Team()
        self._addresses: dict[Any, int] = {}

    def run(self, function: Any, record: Record) -> None:
        """One of the functions of `decoding`, in all threads."""
        address = self._addresses.get(function)
        if address is None:
            address = self._addresses[function] = self._compiled(function)
        self._team.run(address, record.ctypes.data)

    def _compiled(self, function: Any) -> int:
        began = time.monotonic()
        address = decoding.compiled(function)
        _log.info("kernel %s: ready after %.1f s", function.__name__, time.monotonic() - began)
        return address

    def linear(self, layer: Record, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs], both of the weights' type."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float().contiguous()
        output = flat.new_empty(len(flat), int(layer["outputs"]))
        job = np.zeros((), PRODUCT)
        job["linear"], job["rows"] = layer, len(flat)
        job["input"], job["output"] = flat.data_ptr(), output.data_ptr()
        self.run(_LINEARS[inputs.dtype], job)
        return output.to(inputs.dtype).view(*inputs.shape[:-1], output.shape[1])

    def attend(
        self, attention: "Attention", keys: torch.Tensor, window: int | None, query: torch.Tensor
    ) -> torch.Tensor:
        """The output [n, heads, dim] for queries [n, heads, dim] over a layer of KvStorage."""
        wide = query.float().contiguous()
        output = torch.empty_like(wide)
        job = attention.record
        job["query"], job["query_stride"] = wide.data_ptr(), 4 * wide[0].numel()
        job["output"], job["keys"], job["window"] = output.data_ptr(), keys.data_ptr(), window or 0
        self.run(_ATTENTIONS[query.dtype], job)
        return output.to(query.dtype)

    def through(
        self, stack: "Stack", attention: "Attention", given: "Given", stops: Sequence[int]
    ) -> list[torch.Tensor]:
        """The hidden states [n, size] behind so many layers, for each of `stops`, which ascend.

        Rounded on their way out alone: what comes of the last does not depend on stops before it.
        """
        hidden, kind = given.hidden.to(torch.float32, copy=True).contiguous(), given.hidden.dtype
        start, states = 0, []
        for stop in stops:
            work = stack.record(attention, hidden, given, range(start, stop))
            self.run(_PASSES[kind], work.record)
            states.append(hidden.to(kind, copy=True))
            start = stop
        return states


class Attention:
    """What the attentions of one pass have in common: an ATTENTION without its tensors.

    Args:
        layer: of KvStorage; one that is shaped as the layers are.
        heads: of the queries.
        scale: of the scores.

    Attributes:
        record: to be completed.
    """

    def __init__(self, batch: RaggedBatch, layer: torch.Tensor, page_size: int, heads: int, scale: float) -> None:
        kv_heads, dim, group = layer.shape[0] // 2, layer.shape[2], heads // (layer.shape[0] // 2)
        self._pages = [np.ascontiguousarray(piece.pages) for piece in batch.pieces]
        self._units = self._cut(batch, max(1, _UNIT_ROWS // group))
        threads, most = torch.get_num_threads(), int(self._units["rows"].max()) * group
        split = len(self._units) * kv_heads < _FEW * threads
        chunks = -(-int((self._units["start"] + self._units["rows"]).max()) // CHUNK)
        held = len(self._units) * kv_heads * chunks * most * (dim + 2) if split else 0
        each = scratch_size(most, dim)
        self._scratch = torch.empty(threads * each // 4 + held)
        self.record = record = np.zeros((), ATTENTION)
        record["units"], record["unit_count"] = self._units.ctypes.data, len(self._units)
        record["kv_heads"], record["group"], record["dim"] = kv_heads, group, dim
        record["page_size"], record["slots"] = page_size, layer.shape[1]
        record["split"], record["chunks"], record["most"] = split, chunks, most
        record["scratch"], record["scratch_size"] = self._scratch.data_ptr(), each
        record["partial"] = self._scratch.data_ptr() + threads * each
        record["scale"] = scale

    def _cut(self, batch: RaggedBatch, most: int) -> Record:
        units = [
            (piece.first_row + at, min(most, piece.rows - at), piece.start + at, pages.ctypes.data)
            for piece, pages in zip(batch.pieces, self._pages, strict=True)
            for at in range(0, piece.rows, most)
        ]
        return np.array(units, UNIT)


@dataclass(frozen=True)
class Given:
    """What a pass begins with: hidden [n, size], cos and sin [n, dim], slots [n]."""

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Norms:
    """A layer's norms [size] and those over heads [dim], float32; None where there are none."""

    before_attention: torch.Tensor
    before_mlp: torch.Tensor
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None


class Stack:
    """The layers of a model.

    Args:
        linears: of each layer: query, key and value; output; gate and up; down.
        norms: of each layer.
        storage: of each layer, as KvStorage.layers.
        windows: of each layer.
        epsilon: of the norms.
    """

    def __init__(
        self,
        linears: Sequence[Sequence[Record]],
        norms: Sequence[Norms],
        windows: Sequence[int | None],
        epsilon: float,
    ) -> None:
        self._norms, self._epsilon = norms, epsilon
        self._layers = np.zeros(len(norms), LAYER)
        for layer, four, its, window in zip(self._layers, linears, norms, windows, strict=True):
            layer["query_key_value"], layer["output"], layer["gate_up"], layer["down"] = four
            layer["before_attention"], layer["before_mlp"] = its.before_attention.data_ptr(), its.before_mlp.data_ptr()
            layer["query_norm"], layer["key_norm"] = (0 if it is None else it.data_ptr() for it in (its.query, its.key))
            layer["window"] = window or 0

    def bind(self, storage: Sequence[torch.Tensor]) -> None:
        """Where each layer keeps its keys and values, as KvStorage.layers."""
        self._layers["keys"] = [it.data_ptr() for it in storage]

    def record(self, attention: Attention, hidden: torch.Tensor, given: Given, layers: range) -> "Work":
        """A PASS over hidden [n, size] float32, contiguous, through some of the layers, and what it points to."""
        rows, size = hidden.shape
        mixed, output, gate_up = (
            int(self._layers[0][it]["outputs"]) for it in ("query_key_value", "output", "gate_up")
        )
        wide = int(self._layers[0]["output"]["inputs"])
        scratch = torch.empty(rows * (output + mixed + gate_up + wide))
        turns = [it.float().contiguous() for it in (given.cos, given.sin)]
        record = np.zeros((), PASS)
        at = scratch.data_ptr()
        for name, width in (("normed", size), ("mixed", mixed), ("gate_up", gate_up)):
            record[name] = at
            at += 4 * rows * width
        record["layers"], record["layer_count"] = self._layers[layers.start :].ctypes.data, len(layers)
        record["rows"], record["size"], record["epsilon"] = rows, size, self._epsilon
        record["hidden"], record["slots"] = hidden.data_ptr(), given.slots.data_ptr()
        record["cos"], record["sin"] = (it.data_ptr() for it in turns)
        record["attention"] = attention.record
        inner = record["attention"]
        inner["query"], inner["query_stride"], inner["output"] = record["mixed"], 4 * mixed, at
        return Work(record, [scratch, *turns, given.slots, attention])


@dataclass(frozen=True)
class Work:
    """A record, and what must live as long as it does."""

    record: Record
    held: list[object]


def linear_record(panels: torch.Tensor, shape: tuple[int, int], bias: torch.Tensor | None) -> Record:
    """LINEAR of weights in panels, [outputs, inputs] their shape, and a bias [outputs] in float32; both outlive it."""
    record = np.zeros((), LINEAR)
    record["weights"], record["bias"] = panels.data_ptr(), 0 if bias is None else bias.data_ptr()
    record["outputs"], record["inputs"] = shape
    return record
