"""Room for what a pass adds to its sequences: all of it or none."""

from collections.abc import Sequence

from outrider.lm.engine import OutOfPages
from outrider.lm.kv import PagedSequence, PagePool
from outrider.lm.kv_storage import KvStorage


def make_room(pool: PagePool, storage: KvStorage, wanted: Sequence[tuple[PagedSequence, int]]) -> None:
    """Reserves room for so many more tokens in each sequence, in pages of its own that are clean.

    Raises OutOfPages before anything changed.
    """
    missing = sum(sequence.missing(count) for sequence, count in wanted)
    if missing > pool.available:
        raise OutOfPages(f"{missing} KV pages wanted, {pool.available} of {pool.total} available")
    fresh: list[int] = []
    for sequence, count in wanted:
        held = len(sequence.pages)
        copy = sequence.reserve(count)
        if copy is not None:
            storage.copy_page(*copy)
        fresh += sequence.pages[held:]
    if fresh:
        storage.clear(fresh)
