"""Checks proposals instead of believing them: PROPOSE noise is a function, so the draws can be repeated."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.law.batch import Segments, each_or_why, refuse
from outrider.law.noise import BatchNoise, Int64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.sparse import Int32Array, SparseLaw

# How far a row's sum may be from 1, and, relatively, a winner's score from the smallest: the last bits of float32 and
# of another machine's logarithm.
SUM_TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Claim:
    """A block as a draft proposes it.

    Attributes:
        tokens: [lookahead] draft tokens; token i stands at position noise.base_length + i.
        law: [lookahead] rows.
        noise: of the round that the block was made for.
        vocab_size: real token ids.
    """

    tokens: Int32Array
    law: SparseLaw
    noise: RoundNoise
    vocab_size: int


def audit(tokens: Int32Array, law: SparseLaw, noise: RoundNoise, vocab_size: int) -> str | None:
    """Why a block must be dropped, or None when it may be used; arguments as in Claim.

    A law that passes is one that the tokens can have been drawn from, under the round's own noise: every accidental lie
    about the draft's law (a stale temperature, truncation after the draw, another seed) is caught here, at once.

    Returns one sentence that names the first failing check, without a full stop.
    """
    (fault,) = audit_each([Claim(tokens, law, noise, vocab_size)])
    return fault


def audit_each(claims: Sequence[Claim]) -> list[str | None]:
    """`audit` of many blocks in one call: what it says about each, whatever the others are."""
    return each_or_why(claims, _audited)


def _audited(claims: Sequence[Claim]) -> list[None]:
    """Raises Refused for those that fail."""
    blocks = _rows(claims)
    rows = _entries(claims, blocks)
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
        ~(np.abs(sums - 1.0) <= SUM_TOLERANCE),
        blocks.owners,
        lambda row: f"draft law row {within[row]} sums to {sums[row]:.8g}",
    )
    noise = BatchNoise.of([claim.noise for claim in claims])
    positions = noise.base_lengths[owners] + within[rows.owners]
    race = scores(probs, noise.exponentials(Purpose.PROPOSE, owners, positions, token_ids))
    drawn = rows.reduce(np.minimum, np.where(token_ids == tokens[rows.owners], race, np.inf), np.inf)
    best = rows.reduce(np.minimum, race, np.inf)

    def why(row: int) -> str:
        fault = "is not in" if np.isinf(drawn[row]) else "was not drawn from"
        return f"draft token {tokens[row]} {fault} row {within[row]} of its law"

    refuse(~(drawn <= best * (1.0 + SCORE_TOLERANCE)), blocks.owners, why)
    return [None] * len(claims)


def _rows(claims: Sequence[Claim]) -> Segments:
    """The rows of each block."""
    tokens = np.array([len(claim.tokens) for claim in claims])
    rows = np.array([len(claim.law.sizes) for claim in claims])
    refuse(
        tokens != rows,
        np.arange(len(claims)),
        lambda block: f"{tokens[block]} draft tokens with {rows[block]} rows of draft law",
    )
    return Segments.of(rows)


def _entries(claims: Sequence[Claim], blocks: Segments) -> Segments:
    """The entries of each row."""
    sizes = np.concatenate([claim.law.sizes for claim in claims]).astype(np.int64)
    refuse(sizes < 1, blocks.owners, lambda row: "a row of the draft law is empty")
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
