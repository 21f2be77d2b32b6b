"""A shard: text with the target's laws on it, on disk, whole or not there."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.sparse import Float32Array, Int32Array

Float16Array = npt.NDArray[np.float16]
Int16Array = npt.NDArray[np.int16]
_GROUP = 64


@dataclass(frozen=True)
class ScoredText:
    """A text, and what the target thinks comes next at some of its positions.

    Attributes:
        tokens: [n] int32.
        scored: [n] bool: whether what follows this token has a law here.
        ids: [scored, k] int32, the likeliest tokens of these laws, likeliest first.
        logits: [scored, k] float16, their raw logits less the largest.
        states: [n, width] int16, the bits of bfloat16: some states of the target at each token, where a student is fed
            by them.
    """

    tokens: Int32Array
    scored: npt.NDArray[np.bool_]
    ids: Int32Array
    logits: Float16Array
    states: Int16Array | None = None


def save_shard(directory: Path, texts: Sequence[ScoredText]) -> None:
    """Writes the texts beside the directory's place and renames them when they are whole."""
    part = directory.with_name(f"{directory.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    np.save(part / "lengths.npy", np.array([len(text.tokens) for text in texts]))
    for name in ("tokens", "scored", "ids", "logits"):
        np.save(part / f"{name}.npy", np.concatenate([getattr(text, name) for text in texts]))
    part.rename(directory)


def load_shard(directory: Path) -> list[ScoredText]:
    """The texts that `save_shard` wrote: views of its files, read when they are looked at."""
    tokens, scored, ids, logits = (
        np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("tokens", "scored", "ids", "logits")
    )
    ends = np.load(directory / "lengths.npy").cumsum()
    rows = np.concatenate([[0], np.cumsum(scored)])
    spans = [(int(start), int(end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [ScoredText(tokens[a:b], scored[a:b], ids[rows[a] : rows[b]], logits[rows[a] : rows[b]]) for a, b in spans]


def likeliest(logits: torch.Tensor, k: int) -> tuple[Int32Array, Float32Array]:
    """[rows, vocab] to the k largest of each row, largest first: [rows, k] ids, and logits less the largest.

    The k largest lie in the k groups with the largest maxima, so only these are looked into.
    """
    rows, vocab = logits.shape
    k = min(k, vocab)
    groups = torch.nn.functional.pad(logits, (0, -vocab % _GROUP), value=-torch.inf).view(rows, -1, _GROUP)
    best = groups.amax(-1).topk(min(k, groups.shape[1])).indices  # [rows, k]
    candidates = groups.gather(1, best[..., None].expand(-1, -1, _GROUP)).flatten(1)
    values, places = candidates.topk(k)
    ids = best.gather(1, places // _GROUP) * _GROUP + places % _GROUP
    relative = (values - values[:, :1]).float()
    return ids.cpu().numpy().astype(np.int32), relative.cpu().numpy()
