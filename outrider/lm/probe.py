"""The self-check at load: the paged, ragged path must give what the model's own forward gives.

It costs a few short passes and catches what no list of architectures can: a mask, a cache or a kernel that does not do
what this runtime believes.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.law.sparse import Int32Array
from outrider.lm.engine import Engine, ModelRefused, Segment
from outrider.lm.reduced_head import left_out

# Largest relative error (L2, per position): of every position in float32, of the median one in half precision, where a
# mixture of experts may route single tokens differently.
_FLOAT_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1
_LENGTH = 24


def probe_tokens(vocab_size: int, context_length: int, most: int = _LENGTH) -> Int32Array:
    """[n] scattered tokens, 2 <= n <= most, the same for equal models."""
    length = min(most, context_length)
    return (np.arange(1, length + 1, dtype=np.int64) * 7919 % vocab_size).astype(np.int32)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: Int32Array) -> torch.Tensor:
    """[n, head rows]: the model's own forward, without a cache, with its own attention.

    Raises ModelRefused when they are not finite.
    """
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.device)[None]
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    if not bool(logits.amax(-1).isfinite().all()):
        raise ModelRefused(f"its logits are not finite in {str(logits.dtype).removeprefix('torch.')}")
    return logits


def probe(engine: Engine, tokens: Int32Array, reference: torch.Tensor, room: int) -> None:
    """Holds the engine against `reference` [n, head rows] on its first `room` tokens, room >= 2.

    Raises ModelRefused when they differ.
    """
    tokens, reference = tokens[:room], reference[:room]
    middle = len(tokens) // 2
    first, second = engine.open(tokens[:1]), engine.open(tokens[:1])
    try:
        ahead = engine.forward([Segment(first, tokens[:middle], middle)])[0]
        _, rest = engine.forward(
            [Segment(second, tokens[:1], 1), Segment(first, tokens[middle:], len(tokens) - middle)]
        )
        compare("ragged pass", torch.cat([ahead, rest]), reference)
        first.truncate(middle - 1)
        again = engine.forward([Segment(first, tokens[middle - 1 :], len(tokens) - middle + 1)])[0]
        compare("pass after a truncation", again, reference[middle - 1 :])
    finally:
        first.free()
        second.free()


def compare(what: str, logits: torch.Tensor, reference: torch.Tensor) -> None:
    """Raises ModelRefused when logits [n, vocabulary] of a pass differ from the reference [n, head rows]."""
    scored = ~left_out(reference[0, : logits.shape[1]])
    expected, logits = reference[:, : logits.shape[1]][:, scored].float(), logits[:, scored]
    centred = expected - expected.mean(-1, keepdim=True)  # a shift of all logits means nothing
    error = (logits.float() - expected).norm(dim=-1) / centred.norm(dim=-1).clamp_min(1e-6)
    strict = reference.dtype == torch.float32
    worst = float(error.max() if strict else error.median())
    if not worst <= (_FLOAT_TOLERANCE if strict else _HALF_TOLERANCE):
        raise ModelRefused(f"the self-check failed: a {what} differs from the model's own forward by {worst:.2g}")
