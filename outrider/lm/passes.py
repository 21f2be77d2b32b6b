"""Forward passes over the work of many sessions: decode before prefill, prompts in chunks, a budget of positions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from opentelemetry.trace import SpanContext

from outrider.lm.engine import Engine, OutOfPages, Segment
from outrider.lm.features import Tap
from outrider.lm.session_cache import Session, SessionCache

# The part of the budget kept for prompts while decoding alone would fill it: one in this many positions.
_PREFILL_SHARE = 4


@dataclass(eq=False)
class Pass:
    """A forward pass with work in it that is traced.

    Attributes:
        began: monotonic seconds.
        micros: what it took.
        items, positions: what it held.
        traceparents: of the work in it that is traced.
        span: of the pass, once it has one; of nobody's concern here.
    """

    began: float
    micros: int
    items: int
    positions: int
    traceparents: list[str]
    span: SpanContext | None = None


@dataclass(eq=False)
class Work:
    """Positions of one session to compute.

    Attributes:
        session: whose tokens; its `cached` says how far the work is.
        goal: number of leading tokens whose state is wanted, at most session.length.
        first_row: positions from here on need logits; `goal` when none do.
        number: order of arrival; lower goes first.
        rows: logits so far, [rows, vocab_size] each, in order of position.
        first_pass_at: monotonic seconds, None before the first pass.
        forward_micros: sum of the passes that held the work.
        passes: how many these were.
        computed: positions computed for it.
        batch_items: pieces of work in the last of these passes.
        batch_positions: positions in the last of these passes.
        traceparent: of the round; empty where it is not traced.
        traced: the passes, where it is.
        tap: gets the features that are wanted beside the rows; None where none are.
    """

    session: "Session[Any]"
    goal: int
    first_row: int
    number: int
    rows: list[torch.Tensor] = field(default_factory=list, repr=False)
    first_pass_at: float | None = None
    forward_micros: int = 0
    passes: int = 0
    computed: int = 0
    batch_items: int = 0
    batch_positions: int = 0
    traceparent: str = ""
    traced: list[Pass] = field(default_factory=list, repr=False)
    tap: Tap | None = None

    @property
    def remaining(self) -> int:
        """Positions still to compute."""
        return self.goal - self.session.cached

    def preempt(self) -> None:
        """Gives the state back; the work begins anew."""
        self.session.free_state()
        self.rows.clear()
        if self.tap is not None:
            self.tap.clear()

    @property
    def first_needed(self) -> int:
        """Position of the first token that has to be computed for it, whatever state there is."""
        first = min(self.first_row, self.goal - 1)
        return first if self.tap is None else min(first, self.tap.first)


@dataclass
class Piece:
    """The part of a work that goes into one pass: its next `positions` positions."""

    work: Work
    positions: int


def plan(works: Sequence[Work], budget: int, short: int) -> list[Piece]:
    """Chooses the pieces of one pass of at most `budget` positions, in order of arrival within each class.

    Works of at most `short` remaining positions are decode and go first; a quarter of the budget is kept for prompts
    when there are any. The oldest work of each class is always chosen.
    """
    ordered = sorted(works, key=lambda work: work.number)
    decodes = [work for work in ordered if work.remaining <= short]
    prefills = [work for work in ordered if work.remaining > short]
    reserved = max(1, budget // _PREFILL_SHARE) if prefills and budget > 1 else 0
    pieces = _fill(decodes, budget - reserved, split=False)
    return pieces + _fill(prefills, budget - sum(piece.positions for piece in pieces), split=True)


def _fill(works: list[Work], room: int, *, split: bool) -> list[Piece]:
    """Takes works while there is room; a work that does not fit is cut, without `split` only when it is the first."""
    pieces: list[Piece] = []
    for work in works:
        if room == 0 or (work.remaining > room and pieces and not split):
            break
        positions = min(work.remaining, room)
        pieces.append(Piece(work, positions))
        room -= positions
    return pieces


class PassCounts(Protocol):
    """What is told of passes."""

    def passed(self, items: int, positions: int, seconds: float, budget: int) -> None:
        """One pass, of at most `budget` positions."""

    def opened(self, tokens: int, held: int) -> None:
        """A sequence was opened for so many tokens, the state of so many of which the engine had."""


class PassRunner:
    """Runs passes on one engine, making room in its KV cache where needed.

    Args:
        engine: the model.
        cache: the engine's sessions.
        budget: positions of one pass.
        short: works of at most this many remaining positions are decode.
        spare: frees what nobody waits for, before anything else is; False when there is nothing.
        counts: told of every pass.
    """

    def __init__(
        self,
        engine: Engine,
        cache: "SessionCache[Any]",
        *,
        budget: int,
        short: int,
        spare: Callable[[], bool] = lambda: False,
        counts: PassCounts | None = None,
    ) -> None:
        self._engine, self._cache, self._budget, self._short, self._spare = engine, cache, budget, short, spare
        self._counts = counts

    def run(self, works: Sequence[Work], *, displace: bool = True) -> Work | None:
        """One pass over some of the works, which must all have remaining positions.

        Returns the work that cannot be done at all because the KV cache is too small for it alone, or None; without
        `displace` also the first one when it does not fit beside what others hold.
        """
        pieces = plan(works, self._budget, self._short)
        while True:
            try:
                self._forward(pieces)
                return None
            except OutOfPages:
                if not displace or not self._make_room(pieces, works):
                    return pieces[0].work

    def _make_room(self, pieces: list[Piece], works: Sequence[Work]) -> bool:
        """Frees something, the least loss first. The oldest work can displace all others: there is always progress."""
        if self._spare() or self._cache.evict_idle():
            return True
        if len(pieces) > 1:
            pieces.remove(max(pieces, key=lambda piece: piece.work.number))
            return True
        others = [work for work in works if work is not pieces[0].work and work.session.cached > 0]
        if not others:
            return False
        max(others, key=lambda work: work.number).preempt()
        return True

    def _forward(self, pieces: list[Piece]) -> None:
        segments = [self._segment(piece) for piece in pieces]
        began = time.monotonic()
        outputs = self._engine.forward(segments)
        if outputs[0].device.type != "cpu":
            # The values are needed next anyway; without this the pass would seem to take no time.
            torch.accelerator.synchronize(outputs[0].device)
        seconds = time.monotonic() - began
        micros = int(seconds * 1e6)
        positions = sum(len(segment.tokens) for segment in segments)
        if self._counts is not None:
            self._counts.passed(len(segments), positions, seconds, self._budget)
        for piece, segment, rows in zip(pieces, segments, outputs, strict=True):
            work = piece.work
            if segment.rows:
                work.rows.append(rows)
            work.first_pass_at = work.first_pass_at if work.first_pass_at is not None else began
            work.forward_micros += micros
            work.passes += 1
            work.computed += len(segment.tokens)
            work.batch_items, work.batch_positions = len(segments), positions
        traced = [piece.work for piece in pieces if piece.work.traceparent]
        if traced:
            this = Pass(began, micros, len(segments), positions, [work.traceparent for work in traced])
            for work in traced:
                work.traced.append(this)

    def _segment(self, piece: Piece) -> Segment:
        work, session = piece.work, piece.work.session
        if session.sequence is None:
            # Up to the first row that is wanted: the engine may know everything before it from other sessions.
            tokens = session.tokens[: min(work.first_needed + 1, session.straight)].copy()
            session.sequence = self._engine.open(tokens)
            if self._counts is not None:
                self._counts.opened(len(tokens), session.sequence.length)
        start = session.cached
        stop = min(start + piece.positions, work.goal)
        rows = stop - max(start, min(work.first_row, stop))
        new, parents = session.tokens[start:stop].copy(), session.parents(start, stop)
        return Segment(session.sequence, new, rows, parents, work.tap, session.features)
