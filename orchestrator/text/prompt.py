"""What a request continues, as token ids."""

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.law.sparse import Int32Array
from outrider.net.errors import invalid_field
from outrider.v1 import orchestrator_pb2

MAX_PROMPT_BYTES = 4 * 1024 * 1024
MAX_MESSAGES = 1024
ROLES = ("system", "user", "assistant")


def prompt_tokens(
    request: orchestrator_pb2.GenerateRequest, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> Int32Array:
    """[n] int32 token ids of the request's input, n >= 1.

    Special tokens are those that the tokenizer puts around or finds in raw text, those that the chat template writes,
    and none beside the given token ids. Raises OutriderError(INVALID_FIELD) naming the field.
    """
    kind = request.WhichOneof("input")
    if kind is None:
        raise invalid_field("input is missing: one of prompt, chat and token_ids is required")
    if kind == "token_ids":
        ids = np.array(request.token_ids.ids, dtype=np.int32)
    elif kind == "prompt":
        ids = _encode(tokenizer, check_text("prompt", request.prompt), special_tokens=True)
    else:
        ids = _encode(tokenizer, format_chat(request.chat, tokenizer), special_tokens=False)
    return _checked(kind, ids, vocab_size)


def check_text(field: str, text: str) -> str:
    """The text, when it is not empty, at most 4 MiB of UTF-8 and free of lone surrogates. Raises OutriderError."""
    if not text:
        raise invalid_field(f"{field} is empty")
    size = len(encode_utf8(field, text))
    if size > MAX_PROMPT_BYTES:
        raise invalid_field(f"{field} has {size} bytes of UTF-8, limit {MAX_PROMPT_BYTES}")
    return text


def encode_utf8(field: str, text: str) -> bytes:
    """The text's UTF-8. Raises OutriderError naming the offset of a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid_field(f"{field} has a lone surrogate at character {error.start}") from None


def format_chat(chat: orchestrator_pb2.Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    """The conversation as the model's chat template writes it, open for the assistant. Raises OutriderError."""
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise invalid_field(f"chat.messages has {len(chat.messages)} entries, must be in [1, {MAX_MESSAGES}]")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise invalid_field(
                f"chat.messages[{index}].role is {message.role[:32]!r}, must be one of {', '.join(ROLES)}"
            )
        encode_utf8(f"chat.messages[{index}].content", message.content)
    if not tokenizer.chat_template:
        raise invalid_field("chat cannot be formatted: the model's tokenizer has no chat template")
    conversation = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise invalid_field(f"chat is refused by the model's chat template: {error}") from error
    return check_text("chat", str(text))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool) -> Int32Array:
    return np.array(tokenizer(text, add_special_tokens=special_tokens).input_ids, dtype=np.int32)


def _checked(field: str, ids: Int32Array, vocab_size: int) -> Int32Array:
    if not len(ids):
        raise invalid_field(f"{field} is empty: it has no tokens")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        index = int(outside[0])
        raise invalid_field(f"{field} holds token {ids[index]} at index {index}, must be in [0, {vocab_size})")
    return ids
