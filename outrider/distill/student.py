"""The draft while it learns: the target's first layers with a head of few rows. Of an exit the first ones stay as they
are."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from outrider.distill.batches import Batch
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.decoder import Decoder
from outrider.lm.distilled import DistilledDraft, reduced
from outrider.lm.engine import ModelRefused
from outrider.lm.quiet import quiet
from outrider.lm.source import ModelSource

# The final norm is made for the last layer's output. After the first ones its logits are far too sure; what is learned
# at first is to say less.
_NORM_SCALE = 0.3


class Learner(Protocol):
    """What training and measuring need."""

    @property
    def learned(self) -> nn.Module:
        """The modules that change."""

    def loss(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """A scalar; `weights` [laws, k] of each law's tokens."""

    def said(self, batch: Batch) -> Sequence[torch.Tensor]:
        """What it says at each law, [laws, kept], for each place in a block; the last for all places beyond."""


class Student(nn.Module):
    """float32 weights; embeddings are the target's and do not learn.

    Args:
        kept: [n] int32, the tokens that it can propose, ascending.
        own_head: whether the head's rows learn; if not, they stay the target's and are not part of the draft.
        shared: how many of the layers do not learn and are not part of it either.
    """

    def __init__(
        self,
        target: ModelSource,
        layers: int,
        kept: torch.Tensor,
        device: torch.device,
        own_head: bool = True,
        shared: int = 0,
    ) -> None:
        """Raises ModelRefused when the target has fewer layers, and whatever reading it raises."""
        super().__init__()
        with quiet(lambda _fraction, _what: None):
            model = load_weights(target, load_config(target, layers), "float32", device)
        model.set_attn_implementation("sdpa")
        decoder = Decoder.of(model)
        self._body = model.base_model.requires_grad_(False)
        self._head = reduced(decoder.head, kept.long().to(device))
        self.learned = nn.ModuleDict({"layers": decoder.layers_from(shared), "norm": decoder.norm})
        if own_head:
            self.learned["head"] = self._head
        with torch.no_grad():
            for weight in decoder.norm.parameters():
                weight.mul_(_NORM_SCALE)
        self.learned.requires_grad_(True)
        self._kept, self._layers, self._shared = kept, layers, shared

    @staticmethod
    def of(draft: DistilledDraft, target: ModelSource, device: torch.device) -> "Student":
        """One that goes on where the draft is. Raises ModelRefused when its layers are not the target's."""
        tensors = dict(draft.tensors)
        own_head = "head.weight" in tensors
        student = Student(target, draft.layers, tensors.pop("kept"), device, own_head, draft.shared)
        try:
            student.learned.load_state_dict(tensors)
        except RuntimeError as error:
            raise ModelRefused(f"the draft was made for {draft.target}, whose layers are other ones") from error
        return student

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """tokens [texts, n] int64, padded at the end, and wanted [texts, n] bool: logits [wanted, kept]."""
        hidden = self._body(input_ids=tokens, use_cache=False).last_hidden_state
        logits: torch.Tensor = self._head(hidden[wanted])
        return logits

    def loss(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """A scalar; `weights` [laws, k] of each law's tokens."""
        logits = self(batch.tokens, batch.wanted)
        loss: torch.Tensor = SoftTargets.apply(logits, batch.columns, weights)  # type: ignore[no-untyped-call]
        return loss

    def said(self, batch: Batch) -> Sequence[torch.Tensor]:
        """What it says at each law, [laws, kept], at whatever place of a block: one element."""
        return [self(batch.tokens, batch.wanted)]

    def draft(self, target: ModelSource, vocab_fingerprint: str) -> DistilledDraft:
        """What is served, in bfloat16."""
        tensors = {name: tensor.detach().bfloat16().cpu() for name, tensor in self.learned.state_dict().items()}
        tensors["kept"] = self._kept.to(torch.int32)
        return DistilledDraft(target.portable_name, self._layers, vocab_fingerprint, tensors, self._shared)


def laws_of(batch: Batch) -> torch.Tensor:
    """[texts, n] int64: which law stands at a position where one is wanted."""
    return batch.wanted.flatten().cumsum(0).view(batch.wanted.shape) - 1


class SoftTargets(torch.autograd.Function):
    """Cross-entropy against a few weighted tokens in each row, summed: one exponential a logit, forward and backward.

    logits [rows, kept] any float; columns [rows, k] int64, distinct in a row where their weight is not 0; weights
    [rows, k] float32.
    """

    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,
        columns: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The loss, a scalar."""
        scores = logits.float()
        scores = scores - scores.amax(1, keepdim=True)
        chosen = scores.gather(1, columns)
        gradient = scores.exp_()
        total = gradient.sum(1, keepdim=True)
        loss = ((total.log() - chosen) * weights).sum()
        gradient.mul_(weights.sum(1, keepdim=True) / total).scatter_add_(1, columns, -weights)
        context.save_for_backward(gradient.to(logits.dtype))
        return loss

    @staticmethod
    def backward(context: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Of the logits alone."""
        (gradient,) = context.saved_tensors
        return gradient * upstream, None, None
