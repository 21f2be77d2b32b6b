"""The target's laws and the drafts' side by side, and the draw of the token that ends a round.

Every row is divided by its float64 sum before it is used. The draft's race draws in proportion to the float32 numbers
shipped, whatever their sum, so a sum of 0.9999999 is no error as long as it is divided out: the output law is then the
target's to the last bits of float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.law.batch import BoolArray, Segments, refuse
from outrider.law.noise import BatchNoise, Float64Array, Int64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array, SparseLaw
from outrider.law.tree import Tree


@dataclass(frozen=True)
class Block:
    """A block and what the target says about it.

    Attributes:
        tokens: [lookahead] draft tokens; token i stands at position noise.base_length + i.
        law: [lookahead] rows, the laws that the tokens were drawn from; audited. In a tree row i is the law of what
            follows row i, without entries where that is nothing.
        rows: [lookahead + 1] rows of the target over the support of `law`.
        noise: of the round.
        tree: the shape; None for a chain.
    """

    tokens: Int32Array
    law: SparseLaw
    rows: SupportRows
    noise: RoundNoise
    tree: Tree | None = None


@dataclass(frozen=True)
class RowLaws:
    """Both laws of some rows on the draft's support S, the target's with its tail and the draft's each summing to 1.

    Attributes:
        support: which entries are whose.
        token_ids: [entries] of S.
        target: [entries] target_probs of S.
        draft: [entries] draft_probs of S.
        tails: [rows] the target's mass outside S.
        tail_tokens: [rows] the token that the target draws outside S.
    """

    support: Segments
    token_ids: Int32Array
    target: Float64Array
    draft: Float64Array
    tails: Float64Array
    tail_tokens: Int32Array

    def take(self, rows: Int64Array) -> "RowLaws":
        """Some of the rows."""
        support, where = self.support.take(rows)
        entries = self.token_ids[where], self.target[where], self.draft[where]
        return RowLaws(support, *entries, self.tails[rows], self.tail_tokens[rows])


@dataclass(frozen=True)
class BlockLaws:
    """The rows of many blocks. A block has lookahead + 1 of them, one after another: one for each draft token, and a
    last one without a draft token, whose S is empty.

    Attributes:
        blocks: which rows are whose.
        last: [rows] whether a row is the last of its block.
        rows: the laws.
        ratios: [rows] target_probs over draft_probs of the draft token, 0 in a last row.
    """

    blocks: Segments
    last: BoolArray
    rows: RowLaws
    ratios: Float64Array


def side_by_side(blocks: Sequence[Block]) -> BlockLaws:
    """Both laws of one block or more.

    Raises Refused for blocks whose shapes do not fit, that have a draft token without draft probability, or a row that
    is no law.
    """
    rows = _rows(blocks)
    last = rows.offsets == rows.sizes[rows.owners] - 1
    support = _support(blocks, rows, last)
    target = np.concatenate([block.rows.probs for block in blocks]).astype(np.float64)
    draft = np.concatenate([block.law.probs for block in blocks]).astype(np.float64)
    tails = np.concatenate([block.rows.tail_masses for block in blocks])
    least = np.minimum(support.reduce(np.minimum, target, 0.0), tails)
    refuse(~(least >= 0), rows.owners, lambda row: "the target's rows hold NaN or a probability below 0")
    target_sums = _positive(support.reduce(np.add, target, 0.0) + tails, rows)
    # The 1 of a last row divides nothing.
    draft_sums = _positive(support.reduce(np.add, draft, 1.0), rows)
    laws = RowLaws(
        support,
        np.concatenate([block.law.token_ids for block in blocks]),
        target / target_sums[support.owners],
        draft / draft_sums[support.owners],
        tails / target_sums,
        np.concatenate([block.rows.tail_tokens for block in blocks]),
    )
    return BlockLaws(rows, last, laws, _ratios(blocks, rows, last, laws))


def accept_uniforms(laws: BlockLaws, noise: BatchNoise) -> Float64Array:
    """[rows] the ACCEPT uniform of each draft token; 1, below no probability, in a last row."""
    drafted = np.flatnonzero(~laws.last)
    rounds, offsets = laws.blocks.owners[drafted], laws.blocks.offsets[drafted]
    uniforms = np.ones(len(laws.last))
    uniforms[drafted] = noise.uniforms(Purpose.ACCEPT, rounds, noise.base_lengths[rounds] + offsets)
    return uniforms


def residual(laws: RowLaws, weights: Float64Array) -> tuple[Float64Array, Float64Array]:
    """max(weight * target - draft, 0) of rows: ([entries] on the support, [rows] the rest together), not normalised.

    Where nothing is left the laws are equal up to rounding, and a rejection had probability 1e-16: the target's law.
    """
    left = np.maximum(weights[laws.support.owners] * laws.target - laws.draft, 0.0)
    tails = weights * laws.tails
    some = (laws.support.reduce(np.maximum, left, 0.0) > 0) | (tails > 0)
    return np.where(some[laws.support.owners], left, laws.target), np.where(some, tails, laws.tails)


def draw(laws: BlockLaws, accepted: Int64Array, weights: Float64Array, noise: BatchNoise) -> Int32Array:
    """The token of each block after its accepted ones, from the residual law of that row, by the RESAMPLE noise of its
    position: [blocks].

    The tokens of the support race one by one, all others as one runner with the sum of their weights; if that one wins,
    the token is the one that the target drew among them. Equal in law to a race of all, with noise for few.
    """
    rows = laws.rows.take(laws.blocks.starts + accepted)
    rates, tails = residual(rows, weights)
    blocks, owners, positions = np.arange(len(accepted)), rows.support.owners, noise.base_lengths + accepted
    runners = scores(rates, noise.exponentials(Purpose.RESAMPLE, owners, positions[owners], rows.token_ids))
    best = rows.support.reduce(np.minimum, runners, np.inf)
    tail_scores = scores(tails, noise.tails(Purpose.RESAMPLE, blocks, positions))
    from_support = (best <= tail_scores) & (best < np.inf)
    drawn, winners = rows.support.first((runners == best[owners]) & from_support[owners])
    tokens = rows.tail_tokens.copy()
    tokens[drawn] = rows.token_ids[winners]
    return tokens


def _rows(blocks: Sequence[Block]) -> Segments:
    """The rows of each block."""
    counts = [(len(it.tokens), len(it.law.sizes), len(it.rows.tail_masses), len(it.rows.tail_tokens)) for it in blocks]
    bad = [law != tokens or not masses == tails == tokens + 1 for tokens, law, masses, tails in counts]
    refuse(
        np.array(bad),
        np.arange(len(blocks)),
        lambda block: "{} draft tokens, {} draft rows, {} target rows".format(*counts[block]),
    )
    return Segments.of([masses for _, _, masses, _ in counts])


def _support(blocks: Sequence[Block], rows: Segments, last: BoolArray) -> Segments:
    """The entries of each row."""
    sizes = np.ones(len(last), np.int64)
    sizes[~last] = np.concatenate([block.law.sizes for block in blocks])
    smallest = rows.reduce(np.minimum, sizes, 0)
    sizes[last] = 0
    total = rows.reduce(np.add, sizes, 0)
    ids, draft, target = np.array([(len(it.law.token_ids), len(it.law.probs), len(it.rows.probs)) for it in blocks]).T
    refuse(
        (smallest < 1) | (total != ids) | (total != draft),
        np.arange(len(blocks)),
        lambda block: "the draft law has an empty row, or another number of entries than its sizes say",
    )
    refuse(
        total != target,
        np.arange(len(blocks)),
        lambda block: f"{total[block]} entries of draft law, {target[block]} of target law",
    )
    return Segments.of(sizes)


def _ratios(blocks: Sequence[Block], rows: Segments, last: BoolArray, laws: RowLaws) -> Float64Array:
    tokens = np.zeros(len(last), np.int32)
    tokens[~last] = np.concatenate([block.tokens for block in blocks])
    drawn = np.flatnonzero((laws.token_ids == tokens[laws.support.owners]) & (laws.draft > 0))
    times = np.bincount(laws.support.owners[drawn], minlength=len(last))

    def why(row: int) -> str:
        missing = np.flatnonzero((rows.owners == rows.owners[row]) & ~last & (times == 0))
        return f"draft tokens {tokens[missing].tolist()} have no draft probability, or more than one"

    refuse((times != 1) & ~last, rows.owners, why)
    ratios = np.zeros(len(last))
    ratios[~last] = laws.target[drawn] / laws.draft[drawn]
    return ratios


def _positive(sums: Float64Array, rows: Segments) -> Float64Array:
    """The sums themselves. Raises Refused for blocks with one that is not finite and positive."""
    refuse(~((sums > 0) & (sums < np.inf)), rows.owners, lambda row: f"probabilities sum to {sums[row]}")
    return sums
