"""Llama-like models by their parts, and a forward pass that calls the parts itself."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.attention import Paged, Recording, serving
from outrider.lm.causal_lm import Run, run_model
from outrider.lm.engine import ModelRefused
from outrider.lm.features import Hidden

_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Decoder:
    """The parts of a llama-like model that a draft replaces or shares."""

    embeddings: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear

    @staticmethod
    def of(model: PreTrainedModel) -> "Decoder":
        """Raises ModelRefused when the model has not these parts."""
        body: Any = model.base_model
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        kinds = {"embed_tokens": nn.Embedding, "layers": nn.ModuleList, "norm": nn.Module, "rotary_emb": nn.Module}
        plain = isinstance(head, nn.Linear) and head.bias is None
        if not plain or not all(isinstance(getattr(body, it, None), kinds[it]) for it in kinds):
            raise _another(model)
        return Decoder(body.embed_tokens, body.layers, body.norm, head)

    def layers_from(self, first: int) -> nn.ModuleDict:
        """The layers from that index on, by index."""
        return nn.ModuleDict({str(index): layer for index, layer in enumerate(self.layers) if index >= first})


def layer_by_layer(model: PreTrainedModel) -> Run:
    """As `run_model`, with nothing around the parts: a quarter less time for a model of two layers."""
    body: Any = model.base_model
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def run(
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        paged: Paged,
        shown: Hidden | None = None,
    ) -> torch.Tensor:
        if shown is not None:
            raise ValueError("a draft shows no features")
        with serving(paged):
            hidden = body.embed_tokens(tokens[None])
            rotations = body.rotary_emb(hidden, positions[None])
            for layer in body.layers:
                hidden = layer(hidden, position_embeddings=rotations)
            logits: torch.Tensor = head(body.norm(hidden[:, wanted]))[0]
        return logits

    return run


@torch.inference_mode()
def require_only_parts(model: PreTrainedModel) -> None:
    """Raises ModelRefused when the model does something between its parts (scales embeddings, caps logits)."""
    Decoder.of(model)
    if getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):  # small logits hide it
        raise _another(model)
    token = torch.ones(1, dtype=torch.int64, device=model.device)
    arguments = token, 0 * token, 0 * token, Recording()
    whole = run_model(model, *arguments).float()
    try:
        parts = layer_by_layer(model)(*arguments).float()
    except (TypeError, ValueError, AttributeError) as error:  # its layers want more than hidden states and positions
        raise _another(model) from error
    if not bool((parts - whole).norm() <= _TOLERANCE * whole.norm()):
        raise _another(model)


def _another(model: PreTrainedModel) -> ModelRefused:
    return ModelRefused(
        f"{model.config.model_type} is not built as Llama is (embeddings, layers, a norm and a linear head, nothing "
        "between them), so no draft can be distilled for it"
    )
