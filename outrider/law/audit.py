"""Checks proposals instead of believing them: PROPOSE noise is a function, so the draws can be repeated."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.law.batch import BoolArray, Refused, Segments, each_or_why, refuse
from outrider.law.noise import BatchNoise, Float64Array, Int64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.sparse import Float32Array, Int32Array, SparseLaw
from outrider.law.tree import Tree, depths_of

# How far a row's sum may be from 1, and, relatively, a winner's score from the smallest: the last bits of float32 and
# of another machine's logarithm.
SUM_TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Claim:
    """A block as a draft proposes it.

    Attributes:
        tokens: [lookahead] draft tokens; token i stands at position noise.base_length + i.
        law: [lookahead] rows; in a tree row i is that of the tokens that follow row i.
        noise: of the round that the block was made for.
        vocab_size: real token ids.
        tree: the shape; None for a chain.
    """

    tokens: Int32Array
    law: SparseLaw
    noise: RoundNoise
    vocab_size: int
    tree: Tree | None = None

    @property
    def followed(self) -> BoolArray:
        """[lookahead] whether something was drawn from each row."""
        rows = np.ones(len(self.law.sizes), np.bool_)
        if self.tree is not None:
            rows[:] = False
            rows[self.tree.parents] = True
        return rows

    @property
    def firsts(self) -> Int32Array:
        """[lookahead] what was drawn first from each row; 0 where nothing was."""
        if self.tree is None:
            return self.tokens
        firsts = np.zeros(len(self.tokens), np.int32)
        first = self.tree.ranks == 0
        firsts[self.tree.parents[first]] = self.tokens[first]
        return firsts

    @property
    def noises(self) -> list[RoundNoise]:
        """[lookahead] of each row."""
        if self.tree is None:
            return [self.noise] * len(self.tokens)
        return self.tree.noises(self.noise)[: len(self.tokens)]


def audit(
    tokens: Int32Array, law: SparseLaw, noise: RoundNoise, vocab_size: int, tree: Tree | None = None
) -> str | None:
    """Why a block must be dropped, or None when it may be used; arguments as in Claim.

    A law that passes is one that the tokens can have been drawn from, under the round's own noise: every accidental lie
    about the draft's law (a stale temperature, truncation after the draw, another seed) is caught here, at once.

    Returns one sentence that names the first failing check, without a full stop.
    """
    (fault,) = audit_each([Claim(tokens, law, noise, vocab_size, tree)])
    return fault


def audit_each(claims: Sequence[Claim]) -> list[str | None]:
    """`audit` of many blocks in one call: what it says about each, whatever the others are."""
    return each_or_why(claims, _audited)


def _audited(claims: Sequence[Claim]) -> list[None]:
    """Raises Refused for those that fail."""
    blocks = _rows(claims)
    followed = np.concatenate([claim.followed for claim in claims])
    rows = _entries(claims, blocks, followed)
    tokens = np.concatenate([claim.tokens for claim in claims])
    token_ids = np.concatenate([claim.law.token_ids for claim in claims])
    probs = np.concatenate([claim.law.probs for claim in claims])
    owners, limits = blocks.owners[rows.owners], np.array([claim.vocab_size for claim in claims])
    _check_ids("draft token", tokens, blocks.owners, limits)
    _check_ids("draft law token", token_ids, owners, limits)
    # Written so that NaN fails too; infinity fails the sum.
    refuse(~(probs > 0), owners, lambda entry: f"draft probability {probs[entry]} is not above 0")
    _check_distinct(token_ids, blocks, rows)
    sums = rows.reduce(np.add, probs.astype(np.float64), 0.0)
    within = blocks.offsets
    refuse(
        ~(np.abs(sums - 1.0) <= SUM_TOLERANCE) & followed,
        blocks.owners,
        lambda row: f"draft law row {within[row]} sums to {sums[row]:.8g}",
    )
    race = _race(claims, blocks, rows, token_ids, probs)
    firsts = np.concatenate([claim.firsts for claim in claims])
    drawn = rows.reduce(np.minimum, np.where(token_ids == firsts[rows.owners], race, np.inf), np.inf)
    best = rows.reduce(np.minimum, race, np.inf)

    def why(row: int) -> str:
        return _not_drawn(int(firsts[row]), int(within[row]), missing=bool(np.isinf(drawn[row])))

    refuse(~(drawn <= best * (1.0 + SCORE_TOLERANCE)) & followed, blocks.owners, why)
    _check_siblings(claims, blocks, rows, token_ids, race)
    return [None] * len(claims)


def _race(
    claims: Sequence[Claim], blocks: Segments, rows: Segments, token_ids: Int32Array, probs: Float32Array
) -> Float64Array:
    """[entries] the scores of each row's race."""
    if any(claim.tree is not None for claim in claims):
        noise = BatchNoise.of([noise for claim in claims for noise in claim.noises])
        depths = [depths_of(claim.tree, len(claim.tokens) + 1)[:-1] for claim in claims]
        positions = noise.base_lengths + np.concatenate(depths).astype(np.int64)
        whose, positions = rows.owners, positions[rows.owners]
    else:
        noise = BatchNoise.of([claim.noise for claim in claims])
        whose = blocks.owners[rows.owners]
        positions = noise.base_lengths[whose] + blocks.offsets[rows.owners]
    return scores(probs, noise.exponentials(Purpose.PROPOSE, whose, positions, token_ids))


def _check_siblings(
    claims: Sequence[Claim], blocks: Segments, rows: Segments, token_ids: Int32Array, race: Float64Array
) -> None:
    """What a race is won by without those that won before: the siblings of a tree, in their order."""
    faults: dict[int, str] = {}
    for number, claim in enumerate(claims):
        for row in np.unique(claim.tree.parents).tolist() if claim.tree is not None else ():
            start = rows.starts[blocks.starts[number] + row]
            entries = slice(start, start + claim.law.sizes[row])
            left = dict(zip(token_ids[entries].tolist(), race[entries].tolist(), strict=True))
            for token in claim.tokens[claim.tree.children(row)].tolist() if claim.tree is not None else ():
                score = left.pop(token, None)
                if score is None or score > min(left.values(), default=np.inf) * (1.0 + SCORE_TOLERANCE):
                    faults.setdefault(number, _not_drawn(token, row, missing=score is None))
    if faults:
        raise Refused(faults)


def _not_drawn(token: int, row: int, *, missing: bool) -> str:
    return f"draft token {token} {'is not in' if missing else 'was not drawn from'} row {row} of its law"


def _rows(claims: Sequence[Claim]) -> Segments:
    """The rows of each block."""
    tokens = np.array([len(claim.tokens) for claim in claims])
    rows = np.array([len(claim.law.sizes) for claim in claims])
    shapes = [len(claim.tokens) if claim.tree is None else len(claim.tree.parents) for claim in claims]
    refuse(
        tokens != shapes,
        np.arange(len(claims)),
        lambda block: f"{tokens[block]} draft tokens with {shapes[block]} parents",
    )
    refuse(
        tokens != rows,
        np.arange(len(claims)),
        lambda block: f"{tokens[block]} draft tokens with {rows[block]} rows of draft law",
    )
    return Segments.of(rows)


def _entries(claims: Sequence[Claim], blocks: Segments, followed: BoolArray) -> Segments:
    """The entries of each row."""
    sizes = np.concatenate([claim.law.sizes for claim in claims]).astype(np.int64)
    refuse((sizes < 1) & followed, blocks.owners, lambda row: "a row of the draft law is empty")
    refuse((sizes != 0) & ~followed, blocks.owners, lambda row: "a row of the draft law is followed by no token")
    total = blocks.reduce(np.add, sizes, 0)
    ids = np.array([len(claim.law.token_ids) for claim in claims])
    probs = np.array([len(claim.law.probs) for claim in claims])
    refuse(
        (total != ids) | (total != probs),
        np.arange(len(claims)),
        lambda block: f"draft law of {total[block]} entries with {ids[block]} ids and {probs[block]} probabilities",
    )
    return Segments.of(sizes)


def _check_ids(name: str, ids: Int32Array, blocks: Int64Array, limits: Int64Array) -> None:
    refuse(
        (ids < 0) | (ids >= limits[blocks]),
        blocks,
        lambda at: f"{name} {ids[at]} is outside [0, {limits[blocks[at]]})",
    )


def _check_distinct(token_ids: Int32Array, blocks: Segments, rows: Segments) -> None:
    keys = np.sort(rows.owners << 32 | token_ids)
    repeated = keys[1:][keys[1:] == keys[:-1]]
    of_rows = repeated >> 32
    refuse(
        np.ones(len(repeated), np.bool_),
        blocks.owners[of_rows],
        lambda at: f"draft law token {repeated[at] & 0xFFFFFFFF} stands twice in row {blocks.offsets[of_rows[at]]}",
    )
