"""How much of a Verify answer its dense rows may take: said once, for those who ask and for the one who answers."""

from outrider.net.channel import MAX_MESSAGE_BYTES

# Room in an answer for everything that is not logits.
_ENVELOPE_BYTES = 4 * 1024 * 1024
MAX_ROWS_BYTES = MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def row_bytes(vocab_size: int, dtype: str) -> int:
    """Bytes of the logits of one position of a model whose weights have the dtype; of an unknown one as of float32."""
    return vocab_size * _DTYPE_BYTES.get(dtype, _DTYPE_BYTES["float32"])
