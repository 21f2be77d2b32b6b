"""One item of a Verify call, from the message to its outcome."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from outrider.law.sparse import Int32Array
from outrider.lm.engine import EngineInfo
from outrider.lm.passes import Work
from outrider.net.arrays import ArrayError, tokens_in_vocab
from outrider.net.errors import OutriderError, invalid_field
from outrider.v1 import target_pb2, types_pb2

MAX_SESSION_ID = 128


@dataclass(eq=False)
class Job:
    """A block to score. The event loop makes it and reads its outcome; in between it belongs to the engine thread.

    Attributes:
        prefix_tokens: [n] int32, the last committed tokens, ending at base_length.
        draft_tokens: [lookahead] int32.
        on_done: called on the event loop once the outcome is there.
        number: order of arrival in the engine thread.
        work: its positions; None before it began.
        outcome: [lookahead + 1, vocab_size] logits on the CPU, or why there are none.
    """

    session_id: str
    epoch: int
    base_length: int
    prefix_tokens: Int32Array
    prefix_hash: int
    draft_tokens: Int32Array
    on_done: Callable[[], None]
    arrived_at: float = field(default_factory=time.monotonic)
    number: int = 0
    work: Work | None = None
    outcome: torch.Tensor | OutriderError | None = None

    @property
    def opens(self) -> bool:
        """Whether the message holds the whole prefix."""
        return len(self.prefix_tokens) == self.base_length


def parse_item(item: target_pb2.VerifyItem, info: EngineInfo, max_lookahead: int, on_done: Callable[[], None]) -> Job:
    """Checks an item. Raises OutriderError: INVALID_FIELD or CONTEXT_EXCEEDED."""
    if not 1 <= len(item.session_id) <= MAX_SESSION_ID:
        raise invalid_field(f"session_id has {len(item.session_id)} characters, must be 1 to {MAX_SESSION_ID}")
    if item.row_format != target_pb2.ROW_FORMAT_LOGITS:
        raise invalid_field(f"row_format is {item.row_format}, only ROW_FORMAT_LOGITS is served")
    prefix = _tokens(item.prefix_tokens, "prefix_tokens", info.vocab_size)
    draft = _tokens(item.draft_tokens, "draft_tokens", info.vocab_size)
    if not 1 <= len(prefix) <= item.base_length:
        raise invalid_field(f"prefix_tokens holds {len(prefix)} tokens, must be 1 to base_length {item.base_length}")
    if len(draft) > max_lookahead:
        raise invalid_field(f"draft_tokens holds {len(draft)} tokens, limit {max_lookahead}")
    if item.base_length + len(draft) > info.context_length:
        raise OutriderError(
            types_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
            f"base_length {item.base_length} + {len(draft)} draft tokens exceed the context of {info.context_length}",
        )
    return Job(item.session_id, item.epoch, item.base_length, prefix, item.prefix_hash, draft, on_done)


def _tokens(data: bytes, name: Literal["prefix_tokens", "draft_tokens"], vocab_size: int) -> Int32Array:
    try:
        return tokens_in_vocab(data, name, vocab_size)
    except ArrayError as error:
        raise invalid_field(str(error)) from error
