"""One item of a Verify call, from the message to its outcome."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.logprobs import MAX_LOGPROBS, LogprobRows
from outrider.law.masking import Words
from outrider.law.params import ParamError, SeededLaw, check, from_law_spec
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array
from outrider.law.tree import Tree
from outrider.lm.engine import EngineInfo
from outrider.lm.features import Tap
from outrider.lm.passes import Work
from outrider.net.arrays import ArrayError, int32s, tokens_in_vocab
from outrider.net.bounds import MAX_FEATURE_BYTES, MAX_FEATURE_LAYERS, MAX_LAW_TOP, MAX_SESSION_ID
from outrider.net.errors import OutriderError, invalid_field
from outrider.v1 import target_pb2, types_pb2

# What a verified block comes to: dense logits on the CPU, SupportRows, or the target's own tokens.
Rows: TypeAlias = torch.Tensor | SupportRows | Int32Array


@dataclass(frozen=True)
class Scored:
    """A verified block.

    Attributes:
        rows: in the format asked for.
        logprobs: where the item asks for them and the format is not LOGITS.
    """

    rows: Rows
    logprobs: LogprobRows | None = None


_FORMATS = {target_pb2.ROW_FORMAT_LOGITS, target_pb2.ROW_FORMAT_SUPPORT, target_pb2.ROW_FORMAT_SAMPLE}


@dataclass(eq=False)
class Job:
    """A block to score. The event loop makes it and reads its outcome; in between it belongs to the engine thread.

    Attributes:
        prefix_tokens: [n] int32, the last committed tokens, ending at base_length.
        draft_tokens: [lookahead] int32.
        row_format: what to return.
        law: of the session, where this job opens it for a format that needs one.
        support: (sizes, token ids) of the draft law where the format is SUPPORT; None otherwise.
        logprobs: how many of the likeliest tokens' log probabilities to return; None for no log probability at all.
        on_done: called on the event loop once the outcome is there.
        number: order of arrival in the engine thread.
        work: its positions; None before it began.
        outcome: the rows, or why there are none.
        traceparent: of the round that it is part of; empty where that is not traced.
        masks: the tokens that the session's language allows, a row per row; None without one.
        tree: the block's shape; None for a chain.
        tap: gathers the features that are wanted; None where none are.
    """

    session_id: str
    epoch: int
    base_length: int
    prefix_tokens: Int32Array
    prefix_hash: int
    draft_tokens: Int32Array
    row_format: target_pb2.RowFormat.ValueType
    law: SeededLaw | None
    support: tuple[Int32Array, Int32Array] | None
    logprobs: int | None
    on_done: Callable[[], None]
    arrived_at: float = field(default_factory=time.monotonic)
    number: int = 0
    work: Work | None = None
    outcome: Scored | OutriderError | None = None
    masks: Words | None = None
    traceparent: str = ""
    tree: Tree | None = None
    tap: Tap | None = None

    @property
    def opens(self) -> bool:
        """Whether the message holds the whole prefix."""
        return len(self.prefix_tokens) == self.base_length

    @property
    def needs_law(self) -> bool:
        """Whether its rows are made from the session's law."""
        return self.row_format != target_pb2.ROW_FORMAT_LOGITS

    @property
    def parents(self) -> npt.NDArray[np.integer] | None:
        """[lookahead] the places in the session of what the draft tokens follow; None in a chain."""
        return None if self.tree is None else self.base_length - 1 + self.tree.parents


def parse_item(item: target_pb2.VerifyItem, info: EngineInfo, max_lookahead: int, on_done: Callable[[], None]) -> Job:
    """Checks an item. Raises OutriderError: INVALID_FIELD or CONTEXT_EXCEEDED."""
    if not 1 <= len(item.session_id) <= MAX_SESSION_ID:
        raise invalid_field(f"session_id has {len(item.session_id)} characters, must be 1 to {MAX_SESSION_ID}")
    if item.row_format not in _FORMATS:
        raise invalid_field(f"row_format is {item.row_format}, must be LOGITS, SUPPORT or SAMPLE")
    prefix = _tokens(item.prefix_tokens, "prefix_tokens", info.vocab_size)
    draft = _tokens(item.draft_tokens, "draft_tokens", info.vocab_size)
    if not 1 <= len(prefix) <= item.base_length:
        raise invalid_field(f"prefix_tokens holds {len(prefix)} tokens, must be 1 to base_length {item.base_length}")
    if len(draft) > max_lookahead:
        raise invalid_field(f"draft_tokens holds {len(draft)} tokens, limit {max_lookahead}")
    tree = _tree(item, len(draft))
    depth = len(draft) if tree is None else tree.depth
    if item.base_length + depth > info.context_length:
        raise OutriderError(
            types_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
            f"base_length {item.base_length} + {depth} draft tokens exceed the context of {info.context_length}",
        )
    return Job(
        item.session_id,
        item.epoch,
        item.base_length,
        prefix,
        item.prefix_hash,
        draft,
        item.row_format,
        _law(item, len(prefix), info.vocab_size),
        _support(item, len(draft), info.vocab_size),
        _logprobs(item),
        on_done,
        tree=tree,
        tap=_tap(item, len(draft), info),
    )


def _tree(item: target_pb2.VerifyItem, lookahead: int) -> Tree | None:
    if not item.draft_parents:
        return None
    try:
        parents = int32s(item.draft_parents, "draft_parents")
        if len(parents) != lookahead:
            raise invalid_field(f"draft_parents holds {len(parents)} rows for {lookahead} draft tokens")
        return Tree.of(parents)
    except ArrayError as error:
        raise invalid_field(str(error)) from error
    except ValueError as error:
        raise invalid_field(f"draft_parents: {error}") from error


def _tap(item: target_pb2.VerifyItem, lookahead: int, info: EngineInfo) -> Tap | None:
    layers = item.feature_layers
    if not layers:
        return None
    if not info.hidden_size:
        raise invalid_field("feature_layers is set, and this model shows no features")
    if len(layers) > MAX_FEATURE_LAYERS or max(layers) > info.layers:
        raise invalid_field(f"feature_layers is {list(layers)[:8]}, limit {MAX_FEATURE_LAYERS} in [0, {info.layers}]")
    if item.feature_start >= item.base_length:
        raise invalid_field(f"feature_start is {item.feature_start}, must be less than base_length {item.base_length}")
    size = feature_bytes(item.base_length + lookahead - item.feature_start, len(layers), info.hidden_size)
    if size > MAX_FEATURE_BYTES:
        raise invalid_field(f"feature_start asks for {size} bytes of features, limit {MAX_FEATURE_BYTES}")
    return Tap(layers, item.feature_start)


def feature_bytes(tokens: int, layers: int, hidden_size: int) -> int:
    """Of their features on the wire."""
    return 2 * tokens * layers * hidden_size


def _law(item: target_pb2.VerifyItem, prefix_length: int, vocab_size: int) -> SeededLaw | None:
    """The law that the session is to keep; None where the item does not open it, or needs none."""
    if prefix_length < item.base_length or item.row_format == target_pb2.ROW_FORMAT_LOGITS:
        return None
    if not item.HasField("law"):
        raise invalid_field("law is not set, which an item that opens a session needs for this row_format")
    try:
        params, seed = from_law_spec(item.law)
        check(params, vocab_size)
    except ParamError as error:
        raise invalid_field(str(error)) from error
    return SeededLaw(params, seed)


def _logprobs(item: target_pb2.VerifyItem) -> int | None:
    if not item.HasField("logprobs") or item.row_format == target_pb2.ROW_FORMAT_LOGITS:
        return None
    if item.logprobs > MAX_LOGPROBS:
        raise invalid_field(f"logprobs is {item.logprobs}, must be in [0, {MAX_LOGPROBS}]")
    return item.logprobs


def _support(item: target_pb2.VerifyItem, lookahead: int, vocab_size: int) -> tuple[Int32Array, Int32Array] | None:
    if item.row_format != target_pb2.ROW_FORMAT_SUPPORT:
        return None
    try:
        sizes = int32s(item.support_sizes, "support_sizes")
    except ArrayError as error:
        raise invalid_field(str(error)) from error
    ids = _tokens(item.support_ids, "support_ids", vocab_size)
    if len(sizes) != lookahead:
        raise invalid_field(f"support_sizes holds {len(sizes)} sizes for {lookahead} draft tokens")
    if len(sizes) and not 0 <= int(sizes.min()) <= int(sizes.max()) <= MAX_LAW_TOP:
        raise invalid_field(f"support_sizes holds a size outside [0, {MAX_LAW_TOP}]")
    if int(sizes.sum(dtype=np.int64)) != len(ids):
        raise invalid_field(f"support_sizes sums to {sizes.sum(dtype=np.int64)}, with {len(ids)} support_ids")
    rows = np.repeat(np.arange(lookahead, dtype=np.int64), sizes)
    keys = np.sort(rows * vocab_size + ids)
    if (keys[1:] == keys[:-1]).any():
        raise invalid_field("support_ids holds a token twice in one row")
    return sizes, ids


def _tokens(data: bytes, name: Literal["prefix_tokens", "draft_tokens", "support_ids"], vocab_size: int) -> Int32Array:
    try:
        return tokens_in_vocab(data, name, vocab_size)
    except ArrayError as error:
        raise invalid_field(str(error)) from error
