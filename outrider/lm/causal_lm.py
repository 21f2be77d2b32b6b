"""The engine: a transformers causal language model over paged KV, one ragged forward for many sequences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.law.sparse import Int32Array
from outrider.lm.attention import Paged, PagedPass, serving
from outrider.lm.branches import Branches, grown
from outrider.lm.engine import EngineInfo, Segment
from outrider.lm.features import Hidden, Tap
from outrider.lm.fixed_passes import FixedPasses
from outrider.lm.kv import PagedSequence, PagePool
from outrider.lm.kv_room import make_room
from outrider.lm.kv_storage import KvStorage
from outrider.lm.ragged import Piece, RaggedBatch


class Run(Protocol):
    """A model's pass."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        paged: Paged,
        hidden: Hidden | None = None,
        /,
    ) -> torch.Tensor:
        """tokens [n], positions [n], wanted rows [m], all int64, to logits [m, head rows]; `hidden` sees the states."""


# The view that layers have of a pass over a batch.
PagedOf = Callable[[KvStorage, RaggedBatch], Paged]


@dataclass(frozen=True)
class _Work:
    """A checked segment."""

    sequence: PagedSequence
    tokens: Int32Array
    rows: int
    branches: Branches | None
    tap: Tap | None


class CausalLm:
    """An Engine. Not thread-safe: one thread owns it.

    Args:
        run: the model's pass.
    """

    def __init__(self, run: Run, device: torch.device, info: EngineInfo, pool: PagePool, storage: KvStorage) -> None:
        self._run, self._device = run, device
        self._info, self._pool, self._storage = info, pool, storage
        self._paged: PagedOf = PagedPass
        self._fixed: FixedPasses | None = None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def run(self) -> Run:
        """The model's pass."""
        return self._run

    @property
    def storage(self) -> KvStorage:
        """Where keys and values lie."""
        return self._storage

    @property
    def paged(self) -> PagedOf:
        """How layers attend."""
        return self._paged

    def attend_by(self, paged: PagedOf) -> None:
        """How layers attend from now on."""
        self._paged = paged

    def play_from(self, fixed: FixedPasses | None) -> None:
        """Where passes of few rows come from, from now on; None computes each anew."""
        self._fixed = fixed

    @property
    def info(self) -> EngineInfo:
        """What is served."""
        return self._info

    def open(self, tokens: Int32Array) -> PagedSequence:
        """A new sequence that holds the longest cached prefix of `tokens`: whole pages, never all of the tokens."""
        return PagedSequence.with_prefix(self._pool, tokens, self._storage.move)

    def pages(self) -> tuple[int, int]:
        """(used, total) pages; a page that is cached but held by no sequence counts as unused."""
        return self._pool.used, self._pool.total

    def shared_pages(self) -> int:
        """Pages that more than one sequence holds."""
        return self._pool.shared_count

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """Appends every segment's tokens to its sequence in one pass.

        Returns one [rows, vocab_size] tensor per segment, in the model's dtype, on the model's device.
        Raises OutOfPages and ValueError (a token outside the vocabulary, a sequence twice or freed, past the context
        length) before anything changed. A pass that fails leaves every sequence as it was.
        """
        work = [self._check(segment) for segment in segments]
        if not work:
            return []
        if len({id(it.sequence) for it in work}) < len(work):
            raise ValueError("a sequence is in the pass twice")
        make_room(self._pool, self._storage, [(it.sequence, len(it.tokens)) for it in work])
        try:
            logits = self._pass(work)
        except BaseException:
            for it in work:
                it.sequence.cancel()
            raise
        for it in work:
            it.sequence.append(it.tokens, it.branches)
        self._withdraw_broken(work, logits)
        return list(torch.split(logits, [it.rows for it in work]))

    def _check(self, segment: Segment) -> _Work:
        sequence, tokens = segment.sequence, segment.tokens
        if not isinstance(sequence, PagedSequence) or sequence.freed:
            raise ValueError("the sequence was freed or belongs to another engine")
        if not 0 <= segment.rows <= len(tokens) or not len(tokens):
            raise ValueError(f"{segment.rows} rows wanted of {len(tokens)} tokens")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._info.vocab_size:
            raise ValueError(f"a token is outside the vocabulary of {self._info.vocab_size}")
        branches = _branches(sequence, segment)
        end = sequence.length + len(tokens) if branches is None else 1 + int(branches.positions.max())
        if end > self._info.context_length:
            raise ValueError(f"{end} tokens exceed the context of {self._info.context_length}")
        tap = segment.tap
        if tap is not None and not all(0 <= layer <= self._info.layers for layer in tap.layers):
            raise ValueError(f"features of {tap.layers} wanted, there are 0 to {self._info.layers}")
        return _Work(sequence, tokens, segment.rows, branches, tap)

    @torch.inference_mode()
    def _pass(self, work: list[_Work]) -> torch.Tensor:
        """[sum of rows, vocab_size]"""
        counts = np.array([len(it.tokens) for it in work])
        wanted = np.concatenate(
            [np.arange(end - it.rows, end) for it, end in zip(work, counts.cumsum().tolist(), strict=True)]
        )
        pieces, tokens = self._pieces(work), np.concatenate([it.tokens for it in work])
        layers = {layer for it in work if it.tap is not None for layer in it.tap.layers}
        if self._fixed is not None and not layers:
            played = self._fixed.logits(pieces, tokens, wanted)
            if played is not None:
                return played[:, : self._info.vocab_size]
        batch = RaggedBatch(pieces, self._storage.null_page, self._pool.page_size, self._device)
        hidden = Hidden(layers, self._info.layers) if layers else None
        logits = self._run(
            torch.from_numpy(tokens.astype(np.int64)).to(self._device),
            batch.positions,
            torch.from_numpy(wanted).to(self._device),
            self._paged(self._storage, batch),
            hidden,
        )
        if hidden is not None:
            _tap(work, hidden)
        return logits[:, : self._info.vocab_size]

    def _pieces(self, work: list[_Work]) -> list[Piece]:
        pieces, first_row = [], 0
        for it in work:
            rows = len(it.tokens)
            pages = np.array(it.sequence.pages, dtype=np.int64)
            pieces.append(Piece(first_row, rows, it.sequence.length, pages, it.branches))
            first_row += rows
        return pieces

    def _withdraw_broken(self, work: list[_Work], logits: torch.Tensor) -> None:
        """Keeps the pages behind NaN or infinite logits from being shared: a fault must not outlive its session."""
        finite, start = _finite(logits), 0
        for it in work:
            start, first = start + it.rows, start
            if not all(finite[first:start]):
                it.sequence.withdraw()


def _finite(logits: torch.Tensor) -> list[bool]:
    """Of every row [vocab_size], whether its largest logit is a number. Waits for the device once."""
    if logits.device.type != "cpu":
        finite: list[bool] = logits.amax(-1).isfinite().tolist()
        return finite
    # Row by row: a CPU takes five times as long for the largest along a dimension.
    return [math.isfinite(row.max().item()) for row in logits]


def _tap(work: list[_Work], hidden: Hidden) -> None:
    """Gives each of the work its features, before its sequence grows."""
    end = 0
    for it in work:
        start, end = end, end + len(it.tokens)
        if it.tap is not None:
            it.tap.take(it.sequence.length, hidden.of(it.tap.layers)[start:end])


def _branches(sequence: PagedSequence, segment: Segment) -> Branches | None:
    """The tree that the sequence holds with the segment; None for a chain."""
    length, count, parents = sequence.length, len(segment.tokens), segment.parents
    if parents is None and sequence.branches is None:
        return None
    if parents is None:
        parents = np.arange(length - 1, length + count - 1)
    if len(parents) != count:
        raise ValueError(f"{count} tokens with {len(parents)} parents")
    return grown(sequence.branches, length, parents)


def run_model(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    wanted: torch.Tensor,
    paged: Paged,
    hidden: Hidden | None = None,
) -> torch.Tensor:
    """One pass over tokens [n] at positions [n], both int64: the logits [m, head rows] of the rows `wanted` [m]."""
    with serving(paged):
        output = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            output_hidden_states=hidden is not None,
        )
    if hidden is not None:
        for layer, states in enumerate(output.hidden_states):
            hidden.see(layer, states[0])
    logits: torch.Tensor = output.logits[0]
    return logits
