"""The law of what trees of candidates come to, in closed form: over every tree that a way of growing can draw.

How a tree grows may depend on what was drawn before, as that of a draft worker does: which row gets the next candidate
is decided by a function of the candidates so far, and only then is the candidate drawn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from orchestrator.acceptance import Block, Outcome, branching
from outrider.law.noise import Purpose
from outrider.law.sparse import SparseLaw
from outrider.law.tree import Tree as Shape
from tests.harness.exactness import ALWAYS, LARGEST, NEVER, drawn_law, threshold
from tests.harness.joint import Prefix, Tree
from tests.harness.rows import NOBODY, reference_rows


@dataclass(frozen=True)
class Candidate:
    """`parent` is the index of the candidate that it follows, None for the committed prefix."""

    parent: int | None
    token: int


Candidates = tuple[Candidate, ...]
# Which of the candidates so far gets the next child; a negative number ends the growth.
Grow = Callable[[Candidates], int | None]
END = -1


def prefix_of(candidates: Candidates, index: int | None) -> Prefix:
    if index is None:
        return ()
    return (*prefix_of(candidates, candidates[index].parent), candidates[index].token)


def trees(
    laws: Tree, grow: Grow, candidates: Candidates = (), chance: float = 1.0
) -> Iterator[tuple[Candidates, float]]:
    """Every tree that can be drawn, with its probability."""
    parent = grow(candidates)
    law = None if parent == END else laws.drawn(prefix_of(candidates, parent)).copy()
    if law is not None:
        law[[it.token for it in candidates if it.parent == parent]] = 0
    if law is None or not law.sum():
        yield candidates, chance
        return
    for token in np.flatnonzero(law).tolist():
        drawn = float(law[token] / law.sum())
        yield from trees(laws, grow, (*candidates, Candidate(parent, token)), chance * drawn)


def fixed(*parents: int | None) -> Grow:
    """A shape that does not depend on tokens."""
    return lambda candidates: parents[len(candidates)] if len(candidates) < len(parents) else END


def in_order(candidates: Candidates) -> tuple[list[int], Shape | None]:
    """(the candidates level by level, siblings together as they were drawn; their shape)."""
    order: list[int] = []
    rows: list[int | None] = [None]
    parents: list[int] = []
    for row in range(len(candidates) + 1):
        children = [index for index, it in enumerate(candidates) if it.parent == rows[row]]
        order += children
        rows += children
        parents += [row] * len(children)
    return order, Shape.of(np.array(parents, np.int32))


@dataclass
class Scripted:
    """Noise that says what it was told to, and notes what it was asked: ACCEPT uniforms by (position, ranks so far)."""

    base_length: int = 0
    uniforms: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict)
    asked: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    runners: dict[int, float] = field(default_factory=dict)
    tail_runner: float = NEVER
    tail_uniform: float = 0.5
    ranks: tuple[tuple[int, int], ...] = ()

    def branch(self, position, rank):
        return replace(self, ranks=(*self.ranks, (position, rank))) if rank else self

    def uniform(self, purpose, position):
        assert purpose is Purpose.ACCEPT
        key = position, self.ranks
        assert key not in self.asked, "a uniform is used twice"
        self.asked.append(key)
        return self.uniforms.get(key, LARGEST)

    def exponentials(self, purpose, position, token_ids):
        assert purpose is Purpose.RESAMPLE
        return np.array([self.runners.get(int(token), NEVER) for token in token_ids])

    def tail(self, purpose, position):
        assert purpose is Purpose.RESAMPLE
        return self.tail_runner, self.tail_uniform


class Judged:
    """The rule on one tree: everything is fixed but the noise."""

    def __init__(self, laws: Tree, candidates: Candidates) -> None:
        order, self.shape = in_order(candidates)
        assert self.shape is not None
        self.tokens = np.array([candidates[index].token for index in order], np.int32)
        self.prefixes = [(), *(prefix_of(candidates, index) for index in order)]
        followed = set(self.shape.parents.tolist())
        rows = [
            laws.shipped(prefix, 0) if row in followed else (NOBODY, np.empty(0, np.float32))
            for row, prefix in enumerate(self.prefixes[:-1])
        ]
        self.law = SparseLaw.concatenate(rows)
        self.target = np.stack([laws.target(prefix) for prefix in self.prefixes])

    def outcome(self, noise: Scripted) -> Outcome:
        noise.asked.clear()
        rows = reference_rows(self.target, self.law, noise)
        assert self.shape is not None
        return branching(Block(self.tokens, self.law, rows, noise, self.shape), self.shape)

    def paths(self, uniforms: dict, chance: float = 1.0) -> Iterator[tuple[tuple[int, ...], dict, float]]:
        """(path, uniforms that lead there, probability): thresholds are found one by one, in the order asked."""
        noise = Scripted(uniforms=uniforms)
        path = self.outcome(noise).path
        new = [key for key in noise.asked if key not in uniforms]
        if not new:
            yield path, uniforms, chance
            return
        key = new[0]

        def kept(uniform: float) -> bool:
            return self.outcome(Scripted(uniforms={**uniforms, key: uniform})).path != path

        edge = threshold(kept, 0.0, 1.0)
        for share, uniform in ((edge, ALWAYS), (1.0 - edge, LARGEST)):
            if share:
                yield from self.paths({**uniforms, key: uniform}, chance * share)

    def next_token(self, path: tuple[int, ...], uniforms: dict, vocab_size: int) -> np.ndarray:
        """Law of the token after the path: [vocab_size]."""

        def run(runners: dict[int, float], tail: float, uniform: float = 0.5) -> int:
            outcome = self.outcome(Scripted(0, uniforms, [], runners, tail, uniform))
            assert outcome.path == path
            return outcome.token

        row = path[-1] + 1 if path else 0
        support = self.law.row(row)[0].tolist() if row < len(self.law.sizes) else []
        return drawn_law(run, support, vocab_size)


def emitted(laws: Tree, grow: Grow, length: int, used: Callable[[Candidates], Candidates]) -> np.ndarray:
    """Law of the first `length` tokens of a round and the target after it: [vocab_size] * length."""
    law = np.zeros((laws.vocab_size,) * length)
    for candidates, drawn in trees(laws, grow):
        judged = Judged(laws, used(candidates))
        for path, uniforms, chance in judged.paths({}):
            kept = tuple(judged.tokens[list(path)].tolist())
            if len(kept) >= length:
                law[kept[:length]] += drawn * chance
                continue
            after = judged.next_token(path, uniforms, laws.vocab_size)
            for token in np.flatnonzero(after).tolist():
                said = (*kept, token)
                law[said] += drawn * chance * after[token] * laws.target_law(length - len(said), said)
    return law


def error(laws: Tree, grow: Grow, length: int, used: Callable[[Candidates], Candidates] = lambda drawn: drawn) -> float:
    """Largest difference to what the target says. `used`: what is sent of the candidates that were drawn."""
    return float(np.abs(emitted(laws, grow, length, used) - laws.target_law(length)).max())


def expected_accepted(laws: Tree, grow: Grow) -> float:
    """Draft tokens that a round keeps."""
    return sum(
        drawn * chance * len(path)
        for candidates, drawn in trees(laws, grow)
        for path, _, chance in Judged(laws, candidates).paths({})
    )
