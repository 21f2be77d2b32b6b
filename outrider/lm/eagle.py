"""EAGLE: a drafter of one layer, fed by the target's states over a window of tokens and by its own outputs after that.

Li et al. 2024 to 2025, "EAGLE", "EAGLE-2" and "EAGLE-3". The entry of the token at position p is made of it and of the
state at p - 1 (eagle_head.py); its output says the token at p + 1, and stands for the state at p where the target's is
not known. So what was drafted must be computed again once it is committed: whoever feeds the engine truncates.

Places of entries count from the first one of a text: rotary embeddings know distances alone, and in a text that fits
into the window these are the positions of the original, which gives the first entry, of the second token, position 0.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider.law.sparse import Int32Array
from outrider.lm.attention import PagedPass
from outrider.lm.eagle_head import EagleHead
from outrider.lm.eagle_sequence import EagleSequence
from outrider.lm.eagle_work import Part, Work
from outrider.lm.engine import EngineInfo, Segment
from outrider.lm.features import Feeding
from outrider.lm.kv import PagedSequence, PagePool
from outrider.lm.kv_room import make_room
from outrider.lm.kv_storage import KvStorage
from outrider.lm.ragged import Piece, RaggedBatch

# Tokens of a text whose features it is fed with, and the bytes that these may take (docs/decisions.md).
_WINDOW, _WINDOW_BYTES = 32, 2 << 20


def window_of(width: int) -> int:
    """Tokens to be fed with, of `width` elements each."""
    return max(1, min(_WINDOW, _WINDOW_BYTES // (2 * width)))


class EagleEngine:
    """An Engine. Not thread-safe: one thread owns it.

    Args:
        info: of the target's vocabulary.
        layers: of the target, that feed it.
        hidden_size: of one of these.
        pages, page_size: of the KV cache.
    """

    def __init__(
        self, head: EagleHead, info: EngineInfo, layers: Sequence[int], hidden_size: int, *, pages: int, page_size: int
    ) -> None:
        feeding = Feeding(tuple(layers), hidden_size, window_of(len(layers) * hidden_size))
        self._head, self._info = head, replace(info, feeding=feeding, hidden_size=0, layers=0)
        self._pool = PagePool(pages, page_size)
        self._storage = KvStorage([head.shape], pages, page_size, head.device)

    @property
    def info(self) -> EngineInfo:
        """What is served."""
        return self._info

    def open(self, tokens: Int32Array) -> EagleSequence:
        """An empty sequence. Entries depend on where the features of their session begin: no other has the same."""
        return EagleSequence(PagedSequence(self._pool, shared=False))

    def pages(self) -> tuple[int, int]:
        """(used, total) pages."""
        return self._pool.used, self._pool.total

    def shared_pages(self) -> int:
        """0: nothing is shared."""
        return self._pool.shared_count

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """As in Engine.forward: one pass, and one more for every entry that is made of the output of one before it in
        the same segment.

        Raises OutOfPages, and ValueError (a row without features; features that begin after what is cached; a token
        outside the vocabulary; a sequence twice), before anything changed.
        """
        work = [Work.of(segment, self._info) for segment in segments]
        if len({id(it.sequence) for it in work}) < len(work):
            raise ValueError("a sequence is in the pass twice")
        make_room(self._pool, self._storage, [(it.sequence.entries, len(it.tokens)) for it in work])
        lengths = [it.sequence.length for it in work]
        try:
            for it in work:
                it.sequence.skip(it.skipped)
            outputs = self._outputs(work)
        except BaseException:
            for it, length in zip(work, lengths, strict=True):
                it.sequence.truncate(length)
                it.sequence.entries.cancel()
            raise
        wanted = [outputs[index][-it.rows :] for index, it in enumerate(work) if it.rows]
        if not wanted:
            return [self._storage.layers[0].new_empty(0, self._info.vocab_size) for _ in work]
        logits = self._head.logits(torch.cat(wanted))[:, : self._info.vocab_size]
        return list(torch.split(logits, [it.rows for it in work]))

    def _outputs(self, work: Sequence[Work]) -> list[torch.Tensor]:
        """Appends everything; of each work the outputs of its entries, [n, hidden size]."""
        made: list[list[torch.Tensor]] = [[] for _ in work]
        for turn in range(max((len(it.parts) for it in work), default=0)):
            parts = {index: it.parts[turn] for index, it in enumerate(work) if turn < len(it.parts)}
            outputs = self._pass(list(parts.values()))
            for (index, part), rows in zip(parts.items(), outputs, strict=True):
                work[index].sequence.append(part.tokens, part.branches, rows, work[index].followed)
                made[index].append(rows)
        return [torch.cat(rows) if rows else torch.empty(0) for rows in made]

    def _pass(self, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
        pieces, row = [], 0
        for part in parts:
            pieces.append(Piece(row, len(part.tokens), part.start, part.pages(self._pool.page_size), part.branches))
            row += len(part.tokens)
        batch = RaggedBatch(pieces, self._storage.null_page, self._pool.page_size, self._head.device)
        tokens = torch.from_numpy(np.concatenate([part.tokens for part in parts]).astype(np.int64))
        outputs = self._head.outputs(
            tokens.to(self._head.device), self._states(parts), batch.positions, PagedPass(self._storage, batch)
        )
        return torch.split(outputs, [len(part.tokens) for part in parts])

    def _states(self, parts: Sequence[Part]) -> torch.Tensor:
        """[n, hidden size]: what each entry is made of beside its token."""
        given = [part.features for part in parts if len(part.features)]
        of_target = iter(_split(self._head.taken(torch.cat(given).to(self._head.device)), given) if given else ())
        rows: list[torch.Tensor] = []
        for part in parts:
            if len(part.features):
                rows.append(next(of_target))
            rows += [part.sequence.output(place)[None] for place in part.follow]
        return torch.cat(rows)


def _split(states: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    parts: Sequence[torch.Tensor] = torch.split(states, [len(it) for it in like])
    return parts
