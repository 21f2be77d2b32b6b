"""Medusa heads while they learn: blocks over the target's last hidden state, before its own output matrix.

Cai et al. 2024, section 2.2.1 ("Medusa-1"): the target stays as it is, and the loss of a head weighs less the further
it looks. What is taught is the target's law at each head's position, not only the token that stands there.
"""

from collections.abc import Sequence

import torch
from torch import nn

from outrider.distill.batches import Batch
from outrider.distill.student import SoftTargets, laws_of
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.decoder import Decoder
from outrider.lm.distilled import reduced
from outrider.lm.medusa import MedusaWeights
from outrider.lm.quiet import quiet
from outrider.lm.source import ModelSource

# Of a head's loss, for each position that it looks further.
_FURTHER = 0.8


class MedusaStudent:
    """Heads of one block each, which at first say what the target would of the next token. float32 weights.

    Args:
        heads: how many.
        kept: [n] int32, the tokens that the loss looks at, ascending; the heads know all.
    """

    def __init__(self, target: ModelSource, heads: int, kept: torch.Tensor, device: torch.device) -> None:
        with quiet(lambda _fraction, _what: None):
            model = load_weights(target, load_config(target), "float32", device)
        model.set_attn_implementation("sdpa")
        self._body = model.base_model.requires_grad_(False)
        self._output = reduced(Decoder.of(model).head, kept.long().to(device))
        size = self._output.in_features
        self.learned = nn.ModuleList(nn.Linear(size, size, device=device) for _ in range(heads))
        for parameter in self.learned.parameters():
            nn.init.zeros_(parameter)

    def loss(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """The heads' losses, a scalar; `weights` [laws, k] of each law's tokens."""
        states, laws = self._states(batch), laws_of(batch)
        losses = [
            _FURTHER**number * SoftTargets.apply(self._logits(number, given), batch.columns[of], weights[of])  # type: ignore[no-untyped-call]
            for number, (given, of) in enumerate(self._lessons(batch, states, laws))
        ]
        return torch.stack(losses).sum()

    def said(self, batch: Batch) -> Sequence[torch.Tensor]:
        """Of each head what it says at each law, [laws, kept]; all equal where a text is too young for it."""
        made = []
        states, laws = self._states(batch), laws_of(batch)
        for number, (given, of) in enumerate(self._lessons(batch, states, laws)):
            rows = states.new_zeros(len(batch.columns), self._output.out_features)
            rows[of] = self._logits(number, given).to(rows.dtype)
            made.append(rows)
        return made

    def weights(self) -> MedusaWeights:
        """What is served, in bfloat16, with the target's own output matrix."""
        tensors = {
            f"{number}.0.linear.{name}": tensor.detach().bfloat16().cpu()
            for number, head in enumerate(self.learned)
            for name, tensor in head.state_dict().items()
        }
        return MedusaWeights(len(self.learned), 1, tensors)

    def _states(self, batch: Batch) -> torch.Tensor:
        """[texts, n, hidden size]: what the target's output matrix gets."""
        with torch.no_grad():
            hidden: torch.Tensor = self._body(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return hidden

    def _lessons(
        self, batch: Batch, states: torch.Tensor, laws: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each head (states [m, hidden size], laws [m]) of all positions where both are there: head k looks from a
        token to the law 1 + k places on."""
        lessons = []
        for number in range(len(self.learned)):
            ahead = 1 + number
            wanted = batch.wanted[:, ahead:]
            lessons.append((states[:, :-ahead][wanted], laws[:, ahead:][wanted]))
        return lessons

    def _logits(self, number: int, states: torch.Tensor) -> torch.Tensor:
        changed = states + nn.functional.silu(self.learned[number](states))
        logits: torch.Tensor = self._output(changed)
        return logits
