"""What an engine serves, as the pairing check sees it."""

import numpy as np

from outrider.law.params import LAW_VERSION
from outrider.lm.engine import EngineInfo
from outrider.net.arrays import to_bytes
from outrider.v1 import types_pb2


def model_info(info: EngineInfo, *, include_token_hashes: bool) -> types_pb2.ModelInfo:
    """The message of an engine's info."""
    return types_pb2.ModelInfo(
        model_id=info.model_id,
        vocab_fingerprint=info.vocab_fingerprint,
        vocab_size=info.vocab_size,
        padded_vocab_size=info.padded_vocab_size,
        context_length=info.context_length,
        dtype=info.dtype,
        law_version=LAW_VERSION,
        eos_token_ids=to_bytes(np.array(info.eos_token_ids, np.int32)),
        token_hashes=info.token_hashes if include_token_hashes else b"",
    )
