"""Engines over tiny real models, and what those models say on their own."""

import hashlib

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.law.sparse import Int32Array
from outrider.lm.attention_choice import AttentionName
from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import Engine, Segment, SequenceState
from outrider.lm.graph_choice import GraphsName
from outrider.lm.load import EngineOptions, build_engine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import Vocabulary, synthetic_tokenizer, vocabulary_of
from tests.harness.models import VOCAB, tiny_config, tiny_model
from tests.harness.wrappers import ChangedEngine, served_as

PAGE = 4


def bare_vocabulary(size: int) -> Vocabulary:
    return Vocabulary(size, hashlib.sha256(f"ids:{size}".encode()).hexdigest(), bytes(4 * size))


def tiny_engine(
    architecture: str,
    *,
    pages: int = 200,
    page_size: int = PAGE,
    pack: bool = True,
    dtype: torch.dtype = torch.float32,
    attention: AttentionName = "auto",
    graphs: GraphsName = "auto",
    device: str = "cpu",
    **changes: object,
) -> CausalLm:
    """An engine over the tiny model of an architecture; weights as `own_model` has them."""
    options = EngineOptions(kv_pages=pages, page_size=page_size, pack=pack, attention=attention, graphs=graphs)
    model = tiny_model(tiny_config(architecture, **changes)).to(device, dtype)
    return build_engine(architecture, model, bare_vocabulary(VOCAB), options, lambda _fraction, _what: None)


def served_tiny_engine(architecture: str, **changes: object) -> Engine:
    """The same under the vocabulary of the synthetic tokenizer, so that an orchestrator can pair with it."""
    inner = tiny_engine(architecture, pages=1200, **changes)  # type: ignore[arg-type]
    vocabulary = vocabulary_of(synthetic_tokenizer(SyntheticSpec(vocab_size=VOCAB)))
    return ChangedEngine(inner, info=served_as(inner.info, vocabulary))


def own_model(architecture: str, **changes: object) -> PreTrainedModel:
    return tiny_model(tiny_config(architecture, **changes))


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: Int32Array) -> torch.Tensor:
    """[n, vocab]: the model's own forward, eager attention, no cache."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return logits


def text(length: int, seed: int) -> Int32Array:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def feed(engine: CausalLm, sequence: SequenceState, tokens: Int32Array) -> torch.Tensor:
    """Appends tokens and returns all their rows."""
    return engine.forward([Segment(sequence, tokens, len(tokens))])[0]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-5 of the largest logit: float32 sums in another order."""
    assert actual.shape == expected.shape
    worst = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    assert worst < 1e-5, f"differs by {worst:.2g} of the largest logit"
