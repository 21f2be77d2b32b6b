"""Arrays and messages: numpy views over `bytes` fields, without a loop, and the blocks built from them."""

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from outrider.law.logprobs import LogprobRows
from outrider.law.rows import SupportRows
from outrider.law.sparse import Float32Array, Int32Array, SparseLaw
from outrider.net.bounds import MAX_LAW_TOP
from outrider.v1 import draft_pb2, target_pb2, types_pb2

_DTYPES = {
    torch.float32: target_pb2.LOGITS_DTYPE_FLOAT32,
    torch.bfloat16: target_pb2.LOGITS_DTYPE_BFLOAT16,
    torch.float16: target_pb2.LOGITS_DTYPE_FLOAT16,
}
_TORCH_DTYPES = {number: dtype for dtype, number in _DTYPES.items()}


class ArrayError(ValueError):
    """Bytes that are not the array their field documents. The message names the field."""


def to_bytes(tokens: Int32Array) -> bytes:
    """int32 array -> little-endian bytes."""
    return tokens.astype("<i4", copy=False).tobytes()


def int32s(data: bytes, name: str) -> Int32Array:
    """Little-endian int32 bytes -> read-only array. Raises ArrayError when the length is no multiple of 4."""
    if len(data) % 4:
        raise ArrayError(f"{name} has {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype="<i4")


def float32s(data: bytes, name: str) -> Float32Array:
    """Little-endian float32 bytes -> read-only array. Raises ArrayError when the length is no multiple of 4."""
    if len(data) % 4:
        raise ArrayError(f"{name} has {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype="<f4")


def float64s(data: bytes, name: str) -> npt.NDArray[np.float64]:
    """Little-endian float64 bytes -> read-only array. Raises ArrayError when the length is no multiple of 8."""
    if len(data) % 8:
        raise ArrayError(f"{name} has {len(data)} bytes, not a multiple of 8")
    return np.frombuffer(data, dtype="<f8")


def tokens_in_vocab(data: bytes, name: str, vocab_size: int) -> Int32Array:
    """Token ids. Raises ArrayError naming the first id outside [0, vocab_size)."""
    tokens = int32s(data, name)
    unsigned = tokens.view("<u4")  # a negative id is a large one: a single comparison sees both
    if len(tokens) and unsigned.max() >= vocab_size:
        raise ArrayError(f"{name} holds token {tokens[unsigned >= vocab_size][0]}, outside [0, {vocab_size})")
    return tokens


class PrefixHash:
    """Hash of a growing prefix: BLAKE2b over little-endian int32 tokens, 8-byte digest."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self.length = 0

    def extend(self, tokens: Int32Array) -> None:
        """Appends tokens. O(len(tokens))."""
        self._hash.update(to_bytes(tokens))
        self.length += len(tokens)

    def value(self) -> int:
        """The hash of everything so far, as the wire's fixed64."""
        return int.from_bytes(self._hash.digest(), "little")


def prefix_hash(tokens: Int32Array) -> int:
    """The hash of a whole prefix."""
    whole = PrefixHash()
    whole.extend(tokens)
    return whole.value()


def block_message(
    tokens: Int32Array, law: SparseLaw | None, timing: draft_pb2.DraftTiming | None = None
) -> draft_pb2.Block:
    """A block with its draft law, or without."""
    if law is None:
        return draft_pb2.Block(tokens=to_bytes(tokens), timing=timing)
    message = types_pb2.DraftLaw(
        sizes=to_bytes(law.sizes),
        token_ids=to_bytes(law.token_ids),
        probs=law.probs.astype("<f4", copy=False).tobytes(),
    )
    return draft_pb2.Block(tokens=to_bytes(tokens), law=message, timing=timing)


def law_from_message(
    message: types_pb2.DraftLaw, rows: int, top: int = MAX_LAW_TOP, *, tree: bool = False
) -> SparseLaw:
    """The draft law of a block of `rows` tokens, with `top` entries a row at most on average; shapes are checked,
    contents are not. Rows of a tree may be empty. Raises ArrayError.
    """
    if len(message.sizes) != 4 * rows:
        raise ArrayError(f"law.sizes has {len(message.sizes)} bytes for {rows} tokens")
    if len(message.token_ids) > 4 * rows * top:
        raise ArrayError(f"law.token_ids has {len(message.token_ids)} bytes, limit {4 * rows * top}")
    law = SparseLaw(
        int32s(message.sizes, "law.sizes"),
        int32s(message.token_ids, "law.token_ids"),
        float32s(message.probs, "law.probs"),
    )
    least = 0 if tree else 1
    if len(law.sizes) and law.sizes.min() < least:
        raise ArrayError(f"law.sizes holds a size below {least}")
    if not int(law.sizes.sum(dtype=np.int64)) == len(law.token_ids) == len(law.probs):
        raise ArrayError(
            f"law.sizes sums to {law.sizes.sum()}, with {len(law.token_ids)} ids and {len(law.probs)} probs"
        )
    return law


def logits_message(rows: torch.Tensor) -> target_pb2.LogitsRows:
    """[rows, vocab_size] logits in the dtype that the model computed them in."""
    host = rows.detach().cpu().contiguous()
    data = host.view(torch.uint8).numpy().tobytes()
    return target_pb2.LogitsRows(data=data, dtype=_DTYPES[rows.dtype], vocab_size=rows.shape[1])


def logits_from_message(message: target_pb2.LogitsRows, rows: int) -> torch.Tensor:
    """[rows, vocab_size] float32 logits. Raises ArrayError when dtype or size is not what was asked for."""
    dtype = _TORCH_DTYPES.get(message.dtype)
    if dtype is None:
        raise ArrayError(f"logits.dtype is {message.dtype}")
    wanted = rows * message.vocab_size * dtype.itemsize
    if len(message.data) != wanted or wanted == 0:
        raise ArrayError(
            f"logits.data has {len(message.data)} bytes, {rows} rows of {message.vocab_size} need {wanted}"
        )
    flat = torch.frombuffer(bytearray(message.data), dtype=dtype)
    return flat.view(rows, message.vocab_size).float()


def features_message(states: torch.Tensor, start: int) -> types_pb2.Features:
    """[n, width] bfloat16, of the tokens from position `start` on."""
    data = states.contiguous().view(torch.uint8).numpy().tobytes()
    return types_pb2.Features(states=data, start=start)


def features_from_message(message: types_pb2.Features, width: int) -> torch.Tensor:
    """[n, width] bfloat16. Raises ArrayError when the size is no multiple of a token's, or a state is not finite."""
    if width <= 0 or len(message.states) % (2 * width):
        raise ArrayError(f"features.states has {len(message.states)} bytes, {width} elements a token")
    states = (
        torch.frombuffer(bytearray(message.states), dtype=torch.bfloat16).view(-1, width) if message.states else None
    )
    if states is None:
        return torch.empty(0, width, dtype=torch.bfloat16)
    if not bool(states.isfinite().all()):
        raise ArrayError("features.states holds a number that is not finite")
    return states


def support_message(rows: SupportRows) -> target_pb2.SupportRows:
    """The rows of one block."""
    return target_pb2.SupportRows(
        probs=rows.probs.astype("<f4", copy=False).tobytes(),
        tail_masses=rows.tail_masses.astype("<f8", copy=False).tobytes(),
        tail_tokens=to_bytes(rows.tail_tokens),
    )


def support_from_message(message: target_pb2.SupportRows, entries: int, lookahead: int, vocab_size: int) -> SupportRows:
    """The rows of a block whose draft law has so many entries. Raises ArrayError when a size or a token is impossible;
    whether they are a law is for who uses them to check.
    """
    rows = SupportRows(
        float32s(message.probs, "support.probs"),
        float64s(message.tail_masses, "support.tail_masses"),
        tokens_in_vocab(message.tail_tokens, "support.tail_tokens", vocab_size),
    )
    sizes = len(rows.probs), len(rows.tail_masses), len(rows.tail_tokens)
    if sizes != (entries, lookahead + 1, lookahead + 1):
        raise ArrayError(f"support has {sizes} entries for a draft law of {entries} and a block of {lookahead}")
    return rows


def sample_message(tokens: Int32Array) -> target_pb2.SampleRows:
    """The target's own tokens of one block."""
    return target_pb2.SampleRows(tokens=to_bytes(tokens))


def sample_from_message(message: target_pb2.SampleRows, lookahead: int, vocab_size: int) -> Int32Array:
    """[lookahead + 1] int32. Raises ArrayError when there are more or fewer, or one is no token."""
    tokens = tokens_in_vocab(message.tokens, "sample.tokens", vocab_size)
    if len(tokens) != lookahead + 1:
        raise ArrayError(f"sample.tokens holds {len(tokens)} tokens for a block of {lookahead}")
    return tokens


def logprobs_message(rows: LogprobRows) -> target_pb2.LogprobRows:
    """The log probabilities of one block."""
    return target_pb2.LogprobRows(
        support=rows.support.astype("<f4", copy=False).tobytes(),
        drawn=rows.drawn.astype("<f4", copy=False).tobytes(),
        top_ids=to_bytes(rows.top_ids),
        top=rows.top.astype("<f4", copy=False).tobytes(),
    )


def logprobs_from_message(
    message: target_pb2.LogprobRows, entries: int, lookahead: int, top: int, vocab_size: int
) -> LogprobRows:
    """The log probabilities of a block with so many support tokens. Raises ArrayError when a size, a token or a number
    is impossible.
    """
    rows = lookahead + 1
    support, drawn = float32s(message.support, "logprobs.support"), float32s(message.drawn, "logprobs.drawn")
    ids = tokens_in_vocab(message.top_ids, "logprobs.top_ids", vocab_size)
    values = float32s(message.top, "logprobs.top")
    width = min(top, vocab_size)
    if (len(support), len(drawn), len(ids), len(values)) != (entries, rows, rows * width, rows * width):
        raise ArrayError(f"logprobs has {len(support)}, {len(drawn)}, {len(ids)} and {len(values)} entries")
    if any(np.isnan(part).any() for part in (support, drawn, values)):
        raise ArrayError("logprobs holds NaN")
    return LogprobRows(support, drawn, ids.reshape(rows, width), values.reshape(rows, width))
