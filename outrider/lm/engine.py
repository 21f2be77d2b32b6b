"""What a worker needs of a model: sequences with state that truncates, and one ragged forward over many of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from outrider.law.sparse import Int32Array
from outrider.lm.features import FeatureWindow, Feeding, Tap


class OutOfPages(Exception):
    """The KV cache has no free page for what was asked; nothing was changed."""


class ModelRefused(Exception):
    """The model cannot be served; the message is one sentence for the operator that says why."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine serves.

    Attributes:
        model_id: the MODEL it was loaded from.
        vocab_size: real token ids; rows are cut to it.
        padded_vocab_size: rows of the output head.
        context_length: longest sequence, in tokens.
        dtype: "float32", "bfloat16" or "float16".
        eos_token_ids: end-of-sequence tokens.
        vocab_fingerprint: SHA-256 hex over the (id, token) pairs.
        token_hashes: [vocab_size] uint32 little-endian bytes, CRC-32 of each token's text.
        tokenizer: what spells the tokens; None where the vocabulary is bare ids.
        hidden_size, layers: of its features (features.py); 0 where it shows none.
        feeding: what it wants to be fed with; None where nothing.
    """

    model_id: str
    vocab_size: int
    padded_vocab_size: int
    context_length: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    vocab_fingerprint: str
    token_hashes: bytes = field(repr=False, default=b"")
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False, compare=False, default=None)
    hidden_size: int = 0
    layers: int = 0
    feeding: Feeding | None = None


class SequenceState(Protocol):
    """The cached state of one session's prefix. Used by the engine thread alone."""

    @property
    def length(self) -> int:
        """Number of leading tokens whose state is cached."""

    def truncate(self, length: int) -> None:
        """Forgets everything after the first `length` tokens; copies nothing.

        Raises ValueError when length > self.length.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Leaves of a tree one path: the entries at these places (branches.py), from the trunk on, one following the
        other. They become a chain without being computed again; all others are forgotten.

        Raises ValueError when they are no path.
        """

    def free(self) -> None:
        """Gives the state back. Idempotent."""


@dataclass(frozen=True)
class Segment:
    """One session's new positions in a forward pass.

    Attributes:
        sequence: the state that the tokens are appended to.
        tokens: [n] int32, n >= 1, at the places sequence.length ... sequence.length + n - 1.
        rows: how many of the last places need logits, 0 <= rows <= n.
        parents: [n] the place of the entry that each token follows; None where each follows the one before it. With
            others the sequence holds a tree until `keep` or `truncate` makes it a chain again.
        tap: gets the features of its tokens; None where nobody wants any.
        fed: the target's features of the tokens before the last committed one, for an engine that wants them.
    """

    sequence: SequenceState
    tokens: Int32Array
    rows: int
    parents: npt.NDArray[np.integer] | None = None
    tap: Tap | None = None
    fed: FeatureWindow | None = None


class Engine(Protocol):
    """A causal language model with state per sequence. Not thread-safe: one thread owns it."""

    @property
    def info(self) -> EngineInfo:
        """What is served."""

    def open(self, tokens: Int32Array) -> SequenceState:
        """A new sequence that already holds the longest cached prefix of `tokens`, possibly none and never all of them:
        at least the last token is left to compute, since its logits are wanted."""

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """Appends every segment's tokens to its sequence in one pass.

        Returns one [rows, vocab_size] tensor per segment, in the model's dtype, on the model's device: raw logits,
        cut to the real vocabulary, row i scoring what follows the token at that place.
        Raises OutOfPages before anything changed, and so ValueError where a tap wants features that there are none of.
        """

    def pages(self) -> tuple[int, int]:
        """(used, total) pages of the KV cache; (0, 0) without one."""

    def shared_pages(self) -> int:
        """Pages of the KV cache that more than one sequence holds."""
