"""What a target says about a block, short of its whole law: made where the logits are, judged where the block is.

Both kinds of row are made here and only here: by the target on its device, and by the orchestrator from dense logits,
so that the tokens do not depend on what crossed the wire. Nothing dense leaves the device of the law.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.noise import Purpose, RoundNoise
from outrider.law.parallel import for_rows
from outrider.law.sample import Race
from outrider.law.sparse import Float32Array, Int32Array
from outrider.law.tree import Tree, depths_of

Float64Array = npt.NDArray[np.float64]

# The inverse distribution function looks first for the chunk of this many tokens, then for the token in it.
_CHUNK = 512


@dataclass(frozen=True)
class SupportRows:
    """The target's law on the draft's support S, and the tail beside it; SupportRows in target.proto.

    Attributes:
        probs: [sum(sizes)] float32, target_probs of the support tokens, in the order of the draft law's token_ids.
        tail_masses: [lookahead + 1] float64, sum of target_probs outside S. The last row's S is empty.
        tail_tokens: [lookahead + 1] int32, drawn outside S by inverse CDF, with RESAMPLE noise of the row's position; 0
            where the mass is 0.
    """

    probs: Float32Array
    tail_masses: Float64Array
    tail_tokens: Int32Array


@dataclass(frozen=True)
class Support:
    """A block as far as its SupportRows depend on it.

    Attributes:
        noise: of the round; row i stands at position noise.base_length + i, in a tree at that of its depth.
        sizes: [lookahead] int32, entries of the draft law after each row but the last.
        token_ids: [sum(sizes)] int32, distinct within a row.
        tree: the block's shape; None for a chain.
    """

    noise: RoundNoise
    sizes: Int32Array
    token_ids: Int32Array
    tree: Tree | None = None

    @property
    def rows(self) -> int:
        """lookahead + 1."""
        return len(self.sizes) + 1

    @property
    def positions(self) -> list[int]:
        """[rows] where the token after each row stands."""
        return _positions(self.noise, self.tree, self.rows)


@dataclass(frozen=True)
class Sample:
    """A block as far as its target tokens depend on it.

    Attributes:
        noise: of the round; row i stands at position noise.base_length + i, in a tree at that of its depth.
        rows: lookahead + 1.
        tree: the block's shape; None for a chain.
    """

    noise: RoundNoise
    rows: int
    tree: Tree | None = None

    @property
    def positions(self) -> list[int]:
        """[rows] where the token after each row stands."""
        return _positions(self.noise, self.tree, self.rows)


def _positions(noise: RoundNoise, tree: Tree | None, rows: int) -> list[int]:
    return [noise.base_length + depth for depth in depths_of(tree, rows)]


def support_rows(target_probs: torch.Tensor, blocks: Sequence[Support]) -> list[SupportRows]:
    """The rows of `ratio` and `block`, of many blocks in one call.

    Args:
        target_probs: [sum of the blocks' rows, vocab_size] float32, contiguous, on any device. Changed during the call.
        blocks: in the order of the rows.

    Returns one SupportRows per block. A row does not depend on its neighbours, to the last bit.
    Raises ValueError when rows and blocks differ in number.
    """
    rows = _require_rows(target_probs, [block.rows for block in blocks])
    sizes = np.concatenate([np.append(block.sizes, 0) for block in blocks]).astype(np.int64)
    entries = np.repeat(np.arange(rows), sizes), np.concatenate([block.token_ids for block in blocks]).astype(np.int64)
    where = tuple(torch.from_numpy(index).to(target_probs.device) for index in entries)
    on_support = target_probs[where]
    # What is left is the tail, zero by zero: its sum is no difference of almost equal numbers.
    target_probs[where] = 0.0
    noises = [(block.noise, position) for block in blocks for position in block.positions]
    masses, tokens = _draw(target_probs, [noise.tail(Purpose.RESAMPLE, position)[1] for noise, position in noises])
    target_probs[where] = on_support
    return list(_split(blocks, on_support.cpu().numpy(), masses, tokens))


def sample_rows(target_probs: torch.Tensor, blocks: Sequence[Sample]) -> list[Int32Array]:
    """The rows of `greedy` and `coupled`, of many blocks in one call: the winner of the race over each row's law with
    COUPLE noise, the lowest id among equals. Of a one-hot law that is its token, whatever the noise.

    Args:
        target_probs: [sum of the blocks' rows, vocab_size] float32, contiguous, on any device.
        blocks: in the order of the rows.

    Returns one [rows] int32 array per block. A row does not depend on its neighbours, to the last bit.
    Raises ValueError when rows and blocks differ in number, or a row is no law.
    """
    rows = _require_rows(target_probs, [block.rows for block in blocks])
    race = race_of(blocks, target_probs.shape[1])
    race.look(np.arange(rows), target_probs)
    return np.split(race.result(), np.cumsum([block.rows for block in blocks])[:-1])


def race_of(blocks: Sequence[Sample], vocab_size: int) -> Race:
    """The races of all blocks' rows, in their order: `sample_rows` for laws that come in parts."""
    seeds = [block.noise.seed for block in blocks for _ in range(block.rows)]
    positions = [position for block in blocks for position in block.positions]
    return Race(seeds, positions, vocab_size)


def bonus_tokens(probs: torch.Tensor, noises: Sequence[RoundNoise], positions: Sequence[int]) -> list[int]:
    """The token that a round ends with when its block is accepted whole and the target's law is the row's: what a draft
    can best expect of it.

    Args:
        probs: [rows, vocab_size] float32, contiguous, on any device.
        noises: [rows] of the rounds.
        positions: [rows] where the tokens stand.
    """
    uniforms = [noise.tail(Purpose.RESAMPLE, position)[1] for noise, position in zip(noises, positions, strict=True)]
    tokens: list[int] = _draw(probs, uniforms)[1].tolist()
    return tokens


def _require_rows(target_probs: torch.Tensor, rows: Sequence[int]) -> int:
    if len(target_probs) != sum(rows):
        raise ValueError(f"{len(target_probs)} rows of law for blocks of {sum(rows)} rows")
    return sum(rows)


def _split(
    blocks: Sequence[Support], on_support: Float32Array, masses: Float64Array, tokens: Int32Array
) -> Iterator[SupportRows]:
    entry = row = 0
    for block in blocks:
        entries = slice(entry, entry := entry + len(block.token_ids))
        rows = slice(row, row := row + block.rows)
        yield SupportRows(on_support[entries], masses[rows], tokens[rows])


def _draw(weights: torch.Tensor, uniforms: Sequence[float]) -> tuple[Float64Array, Int32Array]:
    """(sum, token drawn by inverse CDF in id order; 0 where the sum is 0) of each row of weights [rows, vocab_size]."""
    reached = np.cumsum(_chunk_sums(weights), axis=1)
    masses = reached[:, -1].copy()
    wanted = np.array(uniforms) * masses
    chunks = (reached <= wanted[:, None]).sum(axis=1)
    # A sum of zero reaches nothing.
    chunks = np.minimum(chunks, reached.shape[1] - 1)
    rows = np.arange(len(chunks))
    before = np.where(chunks > 0, reached[rows, chunks - 1], 0.0)
    ids, inside = _chunk(weights, chunks * _CHUNK)
    running = before[:, None] + np.cumsum(inside, axis=1, dtype=np.float64)
    # The chunk's own sum may end an ulp short of what its total promised: then it is the chunk's last token.
    last = inside.shape[1] - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    first = np.minimum((running <= wanted[:, None]).sum(axis=1), last)
    return masses, np.where(masses > 0, ids[rows, first], 0).astype(np.int32)


def _chunk_sums(weights: torch.Tensor) -> Float64Array:
    """[rows, chunks] float64 sums of successive _CHUNK columns, the last of what is left."""
    if weights.device.type != "cpu":
        return _chunk_sums_on_device(weights)
    # A row at a time: torch would turn all of them into float64 first, and a row fits the cache.
    laws, whole = weights.numpy(), weights.shape[1] // _CHUNK * _CHUNK

    def sums(row: int) -> Float64Array:
        of_chunks = laws[row, :whole].reshape(-1, _CHUNK).sum(axis=1, dtype=np.float64)
        return np.append(of_chunks, laws[row, whole:].sum(dtype=np.float64))

    return np.stack(for_rows(sums, *laws.shape))


def _chunk_sums_on_device(weights: torch.Tensor) -> Float64Array:
    whole = weights.shape[1] // _CHUNK * _CHUNK
    parts = weights[:, :whole].reshape(len(weights), whole // _CHUNK, _CHUNK), weights[:, None, whole:]
    sums: Float64Array = torch.cat([part.sum(dim=2, dtype=torch.float64) for part in parts], dim=1).cpu().numpy()
    return sums


def _chunk(weights: torch.Tensor, starts: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int64], Float32Array]:
    """(ids, weights) [rows, _CHUNK] of the chunk of each row; weights 0 beyond the vocabulary."""
    ids = starts[:, None] + np.arange(_CHUNK)
    index = torch.from_numpy(np.minimum(ids, weights.shape[1] - 1)).to(weights.device)
    values = weights.gather(1, index).cpu().numpy()
    return ids, np.where(ids < weights.shape[1], values, np.float32(0))
