"""Paged KV bookkeeping: which page holds which tokens, who shares it, what may be evicted. No tensors here.

Pages are shared by the chained hash of the tokens up to their end, so equal prefixes meet wherever they came from
(vLLM, "automatic prefix caching"). A page that nobody holds stays findable until its place is needed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from outrider.law.sparse import Int32Array
from outrider.lm.branches import Branches
from outrider.lm.engine import OutOfPages

_DIGEST_BYTES = 16

# Copies the contents of slots (the first) into others.
Move = Callable[[Sequence[int], Sequence[int]], None]


class PagePool:
    """Reference-counted pages, numbered from 0.

    A page is free, held (one or more holders), or cached (no holder, but found by its digest). Cached pages are
    evicted least recently released first.

    Attributes:
        shared_count: pages with more than one holder.
    """

    def __init__(self, total: int, page_size: int) -> None:
        self.total = total
        self.page_size = page_size
        self.shared_count = 0
        self._holders = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def used(self) -> int:
        """Pages with at least one holder."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """`count` pages, each with one holder. Raises OutOfPages before anything changed."""
        if count > self.available:
            raise OutOfPages(f"{count} KV pages wanted, {self.available} of {self.total} available")
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """Adds a holder to a held or cached page."""
        self._cached.pop(page, None)
        self._holders[page] += 1
        self.shared_count += self._holders[page] == 2

    def release(self, pages: Iterable[int]) -> None:
        """Removes one holder from each page; give the last page of a sequence first, so that it is evicted first."""
        for page in pages:
            self._holders[page] -= 1
            self.shared_count -= self._holders[page] == 1
            if self._holders[page] == 0:
                if page in self._digest_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def shared(self, page: int) -> bool:
        """Whether the page has more than one holder."""
        return self._holders[page] > 1

    def publish(self, page: int, digest: bytes) -> None:
        """Makes a full page findable, unless another page with the same tokens already is."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def withdraw(self, page: int) -> None:
        """Makes a held page unfindable: its contents are about to change, or cannot be trusted."""
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def find(self, digest: bytes) -> int | None:
        """The page published under the digest."""
        return self._page_of.get(digest)

    def _evict(self) -> None:
        page, _ = self._cached.popitem(last=False)
        self.withdraw(page)
        self._free.append(page)


class PagedSequence:
    """One session's pages. The life of an append: `reserve`, the forward pass writes the slots, `append`.

    A SequenceState. Pages are written only while one sequence holds them: a shared tail page, left by `truncate` or
    `fork`, is replaced by a copy when the next tokens are reserved.

    Attributes:
        pages: the pages, in order; the last may be partly filled.
        branches: the tree that it holds; None in a chain.
        freed: whether `free` was called.

    Args:
        move: copies the contents of slots into others; needed where trees are kept.
        shared: whether others may find its pages by their tokens.
    """

    def __init__(self, pool: PagePool, move: Move | None = None, *, shared: bool = True) -> None:
        self.pages: list[int] = []
        self._pool, self._move, self._shared = pool, move, shared
        self._tokens = array("i")
        self._digests: list[bytes] = []  # of the full pages
        self.branches: Branches | None = None
        self.freed = False

    @staticmethod
    def with_prefix(pool: PagePool, tokens: Int32Array, move: Move | None = None) -> "PagedSequence":
        """A sequence that holds the longest published prefix of `tokens`, in whole pages, never all of them."""
        sequence = PagedSequence(pool, move)
        size = pool.page_size
        for start in range(0, len(tokens) - size, size):
            digest = _digest(sequence._digests, tokens[start : start + size].astype("i", copy=False).tobytes())
            page = pool.find(digest)
            if page is None:
                break
            pool.hold(page)
            sequence.pages.append(page)
            sequence._digests.append(digest)
        sequence._tokens.frombytes(tokens[: len(sequence.pages) * size].astype("i", copy=False).tobytes())
        return sequence

    @property
    def length(self) -> int:
        """Number of leading tokens whose state is cached."""
        return len(self._tokens)

    def missing(self, count: int) -> int:
        """How many pages `reserve(count)` will take."""
        return self._pages_for(self.length + count) - len(self.pages) + self._tail_is_shared()

    def reserve(self, count: int) -> tuple[int, int] | None:
        """Makes room for `count` more tokens in pages of its own.

        Returns (from, to) when the contents of one page must be copied before writing.
        Raises OutOfPages before anything changed, ValueError on a freed sequence.
        """
        if self.freed:
            raise ValueError("the sequence was freed")
        fresh = self._pool.take(self.missing(count))
        copy = self._own_tail(fresh)
        self.pages.extend(fresh)
        return copy

    def append(self, tokens: Int32Array, branches: Branches | None = None) -> None:
        """Counts `tokens`, whose state was written into the reserved slots, and publishes the pages they filled.

        `branches`: the tree that the sequence holds with them.
        """
        self._tokens.frombytes(tokens.astype("i", copy=False).tobytes())
        self.branches = branches
        self._publish()

    def _publish(self) -> None:
        """Makes full pages of the chain findable; what a page of a tree holds is no prefix of a text."""
        if not self._shared:
            return
        size, chain = self._pool.page_size, self.branches.trunk if self.branches is not None else self.length
        for index in range(len(self._digests), chain // size):
            page_tokens = self._tokens[index * size : (index + 1) * size]
            self._digests.append(_digest(self._digests, page_tokens.tobytes()))
            self._pool.publish(self.pages[index], self._digests[index])

    def cancel(self) -> None:
        """Gives back what `reserve` took and `append` did not use."""
        self._cut_pages(self.length)

    def truncate(self, length: int) -> None:
        """Forgets everything after the first `length` tokens; copies nothing.

        Raises ValueError when length is negative or greater than self.length.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a sequence of {self.length} tokens to {length}")
        del self._tokens[length:]
        del self._digests[length // self._pool.page_size :]
        self._cut_pages(length)
        self.branches = self.branches.cut(length) if self.branches is not None else None
        self._publish()

    def keep(self, path: Sequence[int]) -> None:
        """Leaves one path of the tree, see SequenceState; moves only what does not lie where it belongs."""
        if self.branches is None:
            raise ValueError("the sequence holds no tree")
        self.branches.require_path(path)
        trunk = self.branches.trunk
        moves = [(place, trunk + index) for index, place in enumerate(path) if place != trunk + index]
        if any(self._pool.shared(self.pages[target // self._pool.page_size]) for _, target in moves):
            # A twin needs what lies there: what would have to move is computed again.
            path, moves = path[: moves[0][1] - trunk], []
        if moves:
            if self._move is None:
                raise ValueError("nothing moves the sequence's entries")
            self._move(*([self._slot(place) for place in places] for places in zip(*moves, strict=True)))
        self._tokens[trunk:] = array("i", [self._tokens[place] for place in path])
        self.branches = None
        self._cut_pages(self.length)
        self._publish()

    def _slot(self, place: int) -> int:
        page, offset = divmod(place, self._pool.page_size)
        return self.pages[page] * self._pool.page_size + offset

    def fork(self) -> "PagedSequence":
        """A second sequence with the same tokens, on the same pages."""
        twin = PagedSequence(self._pool, self._move, shared=self._shared)
        twin.pages, twin._tokens, twin._digests = self.pages[:], self._tokens[:], self._digests[:]
        twin.branches, twin.freed = self.branches, self.freed
        for page in twin.pages:
            self._pool.hold(page)
        return twin

    def withdraw(self) -> None:
        """Keeps every page of this sequence from being found by sequences opened later."""
        for page in self.pages:
            self._pool.withdraw(page)

    def free(self) -> None:
        """Gives every page back. Idempotent."""
        self.truncate(0)
        self.freed = True

    def _pages_for(self, length: int) -> int:
        return -(-length // self._pool.page_size)

    def _tail_is_shared(self) -> bool:
        return self.length % self._pool.page_size != 0 and self._pool.shared(self.pages[-1])

    def _own_tail(self, fresh: list[int]) -> tuple[int, int] | None:
        if self.length % self._pool.page_size == 0:
            return None
        tail = self.pages[-1]
        if not self._pool.shared(tail):
            self._pool.withdraw(tail)
            return None
        self.pages[-1] = fresh.pop()
        self._pool.release([tail])
        return tail, self.pages[-1]

    def _cut_pages(self, length: int) -> None:
        keep = self._pages_for(length)
        self._pool.release(reversed(self.pages[keep:]))
        del self.pages[keep:]


def _digest(before: list[bytes], page_tokens: bytes) -> bytes:
    """Digest of a page's tokens and, through the digest of the page before, of everything up to its end."""
    parent = before[-1] if before else b""
    return blake2b(parent + page_tokens, digest_size=_DIGEST_BYTES).digest()
