"""Drafts that are parts of a target and fed by its features: from directories to engines."""

from pathlib import Path

import torch
from torch import nn

from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.engine import EngineInfo, ModelRefused
from outrider.lm.gguf_once import gguf_read_once
from outrider.lm.load import EngineOptions, device_named, eos_token_ids, vocabulary_of_source
from outrider.lm.medusa import MedusaEngine, MedusaHeads, MedusaWeights
from outrider.lm.quiet import quiet
from outrider.lm.refuse import refusing
from outrider.lm.sizing import context_length
from outrider.lm.source import SourceKind, parse_source


def load_medusa(directory: Path, target: str, options: EngineOptions) -> MedusaEngine:
    """The engine of the heads in a directory, for the MODEL `target`, of which only the output matrix is kept.

    Raises ModelRefused.
    """
    weights, source = MedusaWeights.load(directory), parse_source(target)
    if source.kind in (SourceKind.SYNTHETIC, SourceKind.DISTILLED):
        raise ModelRefused(f"the target of Medusa heads cannot be {source.name}")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = device_named(options.device)
    with refusing(source.name), gguf_read_once(), quiet(lambda _fraction, _what: None):
        config = load_config(source)
        vocabulary = vocabulary_of_source(source, options.tokenizer, config)
        model = load_weights(source, config, options.dtype, device)
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ModelRefused(f"{source.name} has no plain output matrix for Medusa heads to share")
        heads = MedusaHeads(weights, head, pack=options.pack)
        size = min(vocabulary.size, head.out_features)
        info = EngineInfo(
            model_id=f"{source.name} with Medusa heads",
            vocab_size=size,
            padded_vocab_size=head.out_features,
            context_length=context_length(model.config, options.context_length),
            dtype=str(model.dtype).removeprefix("torch."),
            eos_token_ids=eos_token_ids(model, size),
            vocab_fingerprint=vocabulary.fingerprint,
            token_hashes=vocabulary.token_hashes[: 4 * size],
            tokenizer=vocabulary.tokenizer,
        )
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return MedusaEngine(heads, info, layers)
