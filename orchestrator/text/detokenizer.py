"""Incremental detokenisation."""

from typing import Protocol, Self

from transformers import PreTrainedTokenizerBase

from outrider.law.sparse import Int32Array


class Detokenizer(Protocol):
    """Text of a generation, token by token."""

    def push(self, token: int) -> str:
        """The text that the token adds; empty inside a character."""

    def flush(self) -> str:
        """The text of what is left at the end: U+FFFD for bytes that never became a character. Idempotent."""

    def fork(self) -> Self:
        """An independent copy. O(1)."""


class Spelling:
    """How a tokenizer spells tokens; built once per process, shared by all sessions (read-only after construction)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        raise NotImplementedError

    def detokenizer(self, prompt: Int32Array) -> Detokenizer:
        """A detokenizer for what follows the prompt."""
        raise NotImplementedError

    def name(self, token: int) -> str:
        """The token as the vocabulary spells it; empty for an id that it does not hold."""
        raise NotImplementedError
