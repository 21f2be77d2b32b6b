"""Medusa heads for tests."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from outrider.lm.engine import Engine, EngineInfo
from outrider.lm.load import EngineOptions, build_engine
from outrider.lm.medusa import MedusaEngine, MedusaHeads, MedusaWeights
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import Vocabulary, synthetic_tokenizer, vocabulary_of
from tests.harness.engines_lm import bare_vocabulary
from tests.harness.models import VOCAB, tiny_config, tiny_model
from tests.harness.wrappers import ChangedEngine, served_as

SIZE, HEADS, LAYERS = 32, 3, 3


def random_heads(*, own: bool = True, blocks: int = 1, seed: int = 3) -> dict[str, torch.Tensor]:
    """By the names of the public layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(HEADS):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(SIZE, SIZE, generator=generator) / 4
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(SIZE, generator=generator)
        if own:
            tensors[f"{head}.{blocks}.weight"] = torch.randn(VOCAB, SIZE, generator=generator)
    return tensors


def said_by_formula(
    tensors: dict[str, torch.Tensor], head: int, blocks: int, states: torch.Tensor, target_rows: torch.Tensor
) -> torch.Tensor:
    """Cai et al. 2024, section 2.1, float32."""
    for block in range(blocks):
        weight, bias = (tensors[f"{head}.{block}.linear.{name}"] for name in ("weight", "bias"))
        inner = states @ weight.T + bias
        states = states + inner * torch.sigmoid(inner)
    return states @ tensors.get(f"{head}.{blocks}.weight", target_rows).T


def next_token(token: int) -> int:
    """What the walking target says after a token."""
    return (token * 7 + 3) % VOCAB


def walking_target(scale: float = 30.0) -> Engine:
    """An engine over `walking_model`."""
    options = EngineOptions(kv_pages=1200, page_size=4)
    model, vocabulary = walking_model(scale), bare_vocabulary(VOCAB)
    engine = build_engine("walking", model, vocabulary, options, lambda _fraction, _what: None)
    return ChangedEngine(engine, info=served_as(engine.info, walking_vocabulary()))


def walking_model(scale: float) -> PreTrainedModel:
    """A real tiny model that looks at its last token alone, and thinks most of `next_token`: the more, the larger
    `scale`. Its features say which token the last one is."""
    model = tiny_model(tiny_config("llama", max_position_embeddings=512))
    with torch.no_grad():
        for layer in model.base_model.layers:  # type: ignore[union-attr]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.copy_(_directions())  # type: ignore[no-untyped-call]
        model.get_output_embeddings().weight.copy_(_rows(1, scale))  # type: ignore[no-untyped-call]
    return model


def walking_heads(scale: float = 30.0) -> MedusaEngine:
    """Heads that are right about it as often as it says what it thinks most of."""
    tensors = {}
    for head in range(HEADS):
        tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"] = (
            torch.zeros(SIZE, SIZE),
            torch.zeros(SIZE),
        )
        tensors[f"{head}.1.weight"] = _rows(2 + head, scale)
    heads = MedusaHeads(MedusaWeights(HEADS, 1, tensors), torch.nn.Linear(SIZE, VOCAB, bias=False))
    info = served_as(EngineInfo("heads", VOCAB, VOCAB, 64, "float32", (), ""), walking_vocabulary())
    return MedusaEngine(heads, replace(info, context_length=512), LAYERS)


def _directions() -> torch.Tensor:
    """[vocab, size] of one length, each unlike all others."""
    rows = torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(8))
    return rows / rows.norm(dim=1, keepdim=True)


def _rows(steps: int, scale: float) -> torch.Tensor:
    """An output matrix that says, after a token's direction, the token so many steps on."""
    rows = torch.zeros(VOCAB, SIZE)
    for token in range(VOCAB):
        later = token
        for _ in range(steps):
            later = next_token(later)
        rows[later] = _directions()[token]
    return rows * scale / SIZE**0.5


def walking_vocabulary() -> Vocabulary:
    return vocabulary_of(synthetic_tokenizer(SyntheticSpec(vocab_size=VOCAB)))
