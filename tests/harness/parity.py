"""Greedy parity with a model's own words, and the one excuse for a difference: two logits that are nearly equal."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

# Logits closer than this are equal as far as float32 sums in another order can tell.
NEAR_TIE = 1e-5


@dataclass(frozen=True)
class Mismatch:
    """The first difference between two outputs.

    Attributes:
        index: of the token in the output.
        ours, theirs: the tokens there; None where an output has ended.
        margin: between the two largest of the reference's logits there.
    """

    index: int
    ours: int | None
    theirs: int | None
    margin: float

    @property
    def excused(self) -> bool:
        return self.margin < NEAR_TIE

    def __str__(self) -> str:
        verdict = "a near-tie" if self.excused else "UNEXPLAINED"
        return f"token {self.index}: {self.ours} instead of {self.theirs}, margin {self.margin:.2g} ({verdict})"


@torch.inference_mode()
def generate_alone(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers' own `generate` says greedily; an end of sequence is its last token."""
    ids = torch.tensor([list(prompt)])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)  # type: ignore[operator]
    return said[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def margin_after(model: PreTrainedModel, tokens: Sequence[int]) -> float:
    """Between the two largest logits after the tokens."""
    best = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def first_mismatch(
    model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Mismatch | None:
    """Where our output leaves theirs, with the margin that `model` has there."""
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    index = next((index for index, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    margin = margin_after(model, [*prompt, *theirs[:index]])
    at = [tokens[index] if index < len(tokens) else None for tokens in (ours, theirs)]
    return Mismatch(index, *at, margin)
