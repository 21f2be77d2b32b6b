"""An output head that scores only some of the vocabulary: what is left out can be no winner anywhere."""

import torch
from torch import nn

# What a left-out token scores: its probability is 0.0 in float32 at every temperature, under every bias and penalty,
# yet it is finite, so that a mask which leaves nothing else still leaves a law.
LEFT_OUT = -1e30


def left_out(logits: torch.Tensor) -> torch.Tensor:
    """Which logits stand for a token that is not scored, also where the model scales what its head says."""
    return logits < max(-1e20, torch.finfo(logits.dtype).min / 2)


def _floor(dtype: torch.dtype) -> float:
    return max(LEFT_OUT, torch.finfo(dtype).min)


class ReducedHead(nn.Module):
    """Stands where a model has its output head.

    Args:
        linear: hidden size to the number of kept tokens.
        kept: [n] int64, their ids, ascending.
        vocab_size: columns of the logits.
    """

    kept: torch.Tensor

    def __init__(self, linear: nn.Linear, kept: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.linear = linear
        self.vocab_size = vocab_size
        self.register_buffer("kept", kept)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden size] to [..., vocab_size]: the kept tokens' logits, LEFT_OUT elsewhere (float16: its least)."""
        scores: torch.Tensor = self.linear(hidden)
        everywhere = scores.new_full((*scores.shape[:-1], self.vocab_size), _floor(scores.dtype))
        return everywhere.index_copy_(-1, self.kept, scores)
