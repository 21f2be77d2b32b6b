"""The law of whole sequences, in closed form: a round's tokens and what follows them, over every block there is.

A rule like `block` decides about a prefix by looking at the tokens after it, so the law of one position is not enough.
Here every block that the draft can draw is enumerated over a small vocabulary whose laws depend on the whole prefix;
for each, thresholds found by bisection give the law of the accepted count and of the token after it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from orchestrator.acceptance import Outcome
from outrider.law.draft import truncate
from outrider.law.sparse import SparseLaw
from tests.harness.exactness import ALWAYS, LARGEST, Rule, ScriptedNoise, drawn_law, threshold

Prefix = tuple[int, ...]
Row = tuple[np.ndarray, np.ndarray]  # token_ids, probs


@dataclass(frozen=True)
class Tree:
    """Target and draft as functions of the prefix.

    Attributes:
        shipped: (prefix, token drawn after it) -> the law beside it.
        drawn: the law that draft tokens are drawn from, [vocab_size] float64, sums to 1.
        ends: whether the draft goes no further after a prefix, as it does after a stop token.
    """

    vocab_size: int
    lookahead: int
    target: Callable[[Prefix], np.ndarray]  # [vocab_size] float32
    shipped: Callable[[Prefix, int], Row]
    drawn: Callable[[Prefix], np.ndarray]
    ends: Callable[[Prefix], bool] = lambda prefix: False

    @staticmethod
    def honest(lookahead: int, target: Callable[[Prefix], np.ndarray], draft: Callable[[Prefix], Row]) -> "Tree":
        """A tree whose draft tokens are drawn from exactly the law beside them."""
        vocab_size = len(target(()))

        def drawn(prefix: Prefix) -> np.ndarray:
            token_ids, probs = draft(prefix)
            law = np.zeros(vocab_size)
            law[token_ids] = normalised(probs)
            return law

        return Tree(vocab_size, lookahead, target, lambda prefix, token: draft(prefix), drawn)

    def blocks(self, start: Prefix = (), prefix: Prefix = (), chance: float = 1.0) -> Iterator[tuple[Prefix, float]]:
        """Every block that can be drawn after `start`, with its probability."""
        whole = start + prefix
        if len(prefix) == self.lookahead or (prefix and self.ends(whole)):
            yield prefix, chance
            return
        law = self.drawn(whole)
        for token in np.flatnonzero(law).tolist():
            yield from self.blocks(start, (*prefix, token), chance * law[token])

    def target_law(self, length: int, start: Prefix = ()) -> np.ndarray:
        """Law of the `length` tokens after `start` as the target alone says them: [vocab_size] * length."""
        if not length:
            return np.ones(())
        law = normalised(self.target(start)).tolist()
        return np.stack([chance * self.target_law(length - 1, (*start, token)) for token, chance in enumerate(law)])


def normalised(rows) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.float64)
    return rows / rows.sum(axis=-1, keepdims=True)


def random_tree(seed: int, lookahead: int = 2, vocab_size: int = 3, top: int = 2, sharpness: float = 1.0) -> Tree:
    """Laws that have nothing to do with each other, nor with those of any other prefix."""

    def law(prefix: Prefix, whose: int) -> np.ndarray:
        rng = np.random.default_rng([seed, whose, *prefix])
        return rng.dirichlet(np.full(vocab_size, sharpness)).astype(np.float32)

    def draft(prefix: Prefix) -> Row:
        (row,) = truncate(torch.from_numpy(law(prefix, 1))[None], top)
        return row

    return Tree.honest(lookahead, lambda prefix: law(prefix, 0), draft)


class Judged:
    """A rule on one block: everything is fixed but the noise."""

    def __init__(self, rule: Rule, tree: Tree, start: Prefix, tokens: Prefix) -> None:
        before = [start + tokens[:index] for index in range(len(tokens) + 1)]
        self._rule, self._tree, self._base = rule, tree, len(start)
        self._tokens = np.array(tokens, np.int32)
        self._law = SparseLaw.concatenate([tree.shipped(*pair) for pair in zip(before, tokens, strict=False)])
        self._rows = np.stack([tree.target(prefix) for prefix in before])

    def outcome(self, accept: Sequence[float], runners: dict[int, float], tail: float, uniform: float = 0.5) -> Outcome:
        """`accept` holds the ACCEPT uniform of each draft token, the rest is as in ScriptedNoise."""
        uniforms = {self._base + index: it for index, it in enumerate(accept)}
        noise = ScriptedNoise(self._base, uniforms, runners, tail, uniform)
        return self._rule(self._tokens, self._law, self._rows, noise)

    def accepted(self, accept: Sequence[float]) -> int:
        return self.outcome(accept, {}, 1.0).accepted

    def thresholds(self) -> list[float]:
        """Of each ACCEPT uniform: where it changes the accepted count, whatever the others are; 1 if it never does."""
        return [self._threshold(index) for index in range(len(self._tokens))]

    def _threshold(self, index: int) -> float:
        for others in product((ALWAYS, LARGEST), repeat=len(self._tokens) - 1):

            def count(uniform: float, others: tuple[float, ...] = others) -> int:
                return self.accepted([*others[:index], uniform, *others[index:]])

            kept = count(ALWAYS)
            if kept != count(LARGEST):
                return threshold(lambda uniform, count=count, kept=kept: count(uniform) == kept, 0.0, 1.0)
        return 1.0

    def counts(self) -> dict[int, tuple[float, tuple[float, ...]]]:
        """By accepted count: its probability, and the likeliest kind of uniforms that give it."""
        edges = self.thresholds()
        found: dict[int, list[tuple[float, tuple[float, ...]]]] = {}
        for below in product((True, False), repeat=len(edges)):
            chance = float(np.prod([edge if it else 1 - edge for it, edge in zip(below, edges, strict=True)]))
            accept = tuple(ALWAYS if it else LARGEST for it in below)
            if chance > 0:
                found.setdefault(self.accepted(accept), []).append((chance, accept))
        return {count: (sum(it for it, _ in kinds), max(kinds)[1]) for count, kinds in found.items()}

    def next_token(self, count: int, accept: Sequence[float]) -> np.ndarray:
        """Law of the token after `count` accepted ones: [vocab_size]."""

        def run(runners: dict[int, float], tail: float, uniform: float = 0.5) -> int:
            outcome = self.outcome(accept, runners, tail, uniform)
            assert outcome.accepted == count
            return outcome.token

        support = self._law.row(count)[0].tolist() if count < len(self._tokens) else []
        return drawn_law(run, support, self._tree.vocab_size)


def emitted_law(rule: Rule, tree: Tree, length: int, start: Prefix = (), *, rounds: bool = False) -> np.ndarray:
    """Law of the `length` tokens after `start` when a round is judged by the rule: [vocab_size] * length.

    What follows the round is the target's own law; with `rounds`, more rounds.
    """
    if not length:
        return np.ones(())

    def rest(prefix: Prefix, count: int) -> np.ndarray:
        return emitted_law(rule, tree, count, prefix, rounds=True) if rounds else tree.target_law(count, prefix)

    law = np.zeros((tree.vocab_size,) * length)
    for tokens, drawn in tree.blocks(start):
        judged = Judged(rule, tree, start, tokens)
        for count, (chance, accept) in judged.counts().items():
            if count >= length:
                law[tokens[:length]] += drawn * chance
                continue
            after = judged.next_token(count, accept)
            for token in np.flatnonzero(after).tolist():
                said = (*tokens[:count], token)
                law[said] += drawn * chance * after[token] * rest(start + said, length - len(said))
    return law


def expected_accepted(rule: Rule, tree: Tree) -> float:
    """Draft tokens that a round keeps, in expectation over block and noise."""
    return sum(
        drawn * chance * count
        for tokens, drawn in tree.blocks()
        for count, (chance, _) in Judged(rule, tree, (), tokens).counts().items()
    )


def error(rule: Rule, tree: Tree) -> float:
    """Largest difference between what one round and the target after it say, and what the target says."""
    length = tree.lookahead + 1
    return float(np.abs(emitted_law(rule, tree, length) - tree.target_law(length)).max())
