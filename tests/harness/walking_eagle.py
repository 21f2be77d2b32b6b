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
from tests.harness.medusa import LAYERS, walking_ends, walking_vocabulary
from tests.harness.models import VOCAB
from tests.harness.wrappers import served_as


def walking_eagle(scale: float = 30.0, noise: float = 0.0) -> EagleEngine:
    """Right as often as the target says what it thinks most of; less, the more `noise` of the states before a token
    there is in what it makes of it."""
    words, norm, rows = walking_ends(scale)
    tensors = {name: torch.zeros_like(it) for name, it in random_eagle1().items()}
    tensors["layers.0.post_attention_layernorm.weight"] += 1
    shaken = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(5)) / SIZE**0.5
    # The words have length 1, normed states the square root of their size.
    tensors["fc.weight"] = torch.cat([norm.diag() * SIZE**0.5, noise * shaken], 1)
    head = nn.Linear(SIZE, VOCAB, bias=False)
    head.weight = nn.Parameter(rows, requires_grad=False)
    made = EagleHead(EagleWeights(parse_config(settings(), 1), tensors), words, head, pack=True)
    info = served_as(EngineInfo("eagle", VOCAB, VOCAB, 512, "float32", (), ""), walking_vocabulary())
    return EagleEngine(made, replace(info, context_length=512), (LAYERS,), SIZE, pages=1200, page_size=4)
