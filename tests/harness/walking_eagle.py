"""An EAGLE head for the walking target (tests/harness/medusa.py): it makes of a token the state that the target has."""

from dataclasses import replace

import torch
from torch import nn

from outrider.lm.eagle import EagleEngine
from outrider.lm.eagle_config import parse_config
from outrider.lm.eagle_head import EagleHead
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import EngineInfo
from tests.harness.eagle import SIZE, random_eagle1, settings
from tests.harness.medusa import LAYERS, walking_model, walking_vocabulary
from tests.harness.models import VOCAB
from tests.harness.wrappers import served_as


def walking_tensors(noise: float) -> dict[str, torch.Tensor]:
    """By the public names: the more `noise`, the more of all states before a token is in what is made of it."""
    norm: torch.Tensor = walking_model(1.0).base_model.norm.weight  # type: ignore[assignment,union-attr]
    random = random_eagle1()
    tensors = {name: it if "_proj" in name else torch.zeros_like(it) for name, it in random.items()}
    tensors["layers.0.self_attn.o_proj.weight"] *= noise / 10
    tensors["layers.0.mlp.down_proj.weight"] *= 0
    tensors["layers.0.post_attention_layernorm.weight"] += 1
    shaken = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(5)) / SIZE**0.5
    # The words have length 1, normed states the square root of their size.
    tensors["fc.weight"] = torch.cat([norm.diag() * SIZE**0.5, noise * shaken], 1)
    return tensors


def walking_eagle(scale: float = 30.0, noise: float = 0.0, *, pages: int = 1200) -> EagleEngine:
    """Right as often as the target says what it thinks most of; less often, the more noise there is."""
    model = walking_model(scale)
    words, rows = (it.weight for it in (model.get_input_embeddings(), model.get_output_embeddings()))  # type: ignore[no-untyped-call]
    head = nn.Linear(SIZE, VOCAB, bias=False)
    head.weight = nn.Parameter(rows.detach(), requires_grad=False)
    weights = EagleWeights(parse_config(settings(), 1), walking_tensors(noise))
    info = served_as(EngineInfo("eagle", VOCAB, VOCAB, 512, "float32", (), ""), walking_vocabulary())
    made = EagleHead(weights, words.detach(), head, pack=True)
    info = replace(info, context_length=min(512, 4 * pages))
    return EagleEngine(made, info, (LAYERS,), SIZE, pages=pages, page_size=4)
