"""Drafts that are fed by a target's features: from directories to engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from outrider.lm.attention_choice import page_size_for
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.eagle import EagleEngine
from outrider.lm.eagle_head import EagleHead
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import EngineInfo, ModelRefused
from outrider.lm.gguf_once import gguf_read_once
from outrider.lm.load import EngineOptions, device_named, eos_token_ids, vocabulary_of_source
from outrider.lm.medusa import MedusaEngine, MedusaHeads, MedusaWeights
from outrider.lm.quiet import quiet
from outrider.lm.refuse import refusing
from outrider.lm.sizing import choose_pages, context_length
from outrider.lm.source import SourceKind, parse_source
from outrider.net.bounds import MAX_FEATURE_LAYERS


@dataclass(frozen=True)
class TargetEnds:
    """What such drafts share with their target, which is never read as a whole.

    Attributes:
        embeddings: [rows, hidden size].
        head: its output matrix.
        layers: how many it has.
        info: of its vocabulary, with the longest context and the numeric type.
    """

    embeddings: torch.Tensor
    head: nn.Linear
    layers: int
    info: EngineInfo


def load_medusa(directory: Path, target: str, options: EngineOptions) -> MedusaEngine:
    """The engine of the heads in a directory, for the MODEL `target`, of which only the output matrix is kept.

    Raises ModelRefused.
    """
    weights = MedusaWeights.load(directory)
    with _ends(target, "Medusa heads", options) as ends:
        return MedusaEngine(MedusaHeads(weights, ends.head, pack=options.pack), ends.info, ends.layers)


def load_eagle(directory: Path, target: str, options: EngineOptions) -> EagleEngine:
    """The engine of the EAGLE head in a directory, for the MODEL `target`, of which embeddings and output matrix are
    kept where the head has none of its own.

    Raises ModelRefused.
    """
    weights = EagleWeights.load(directory)
    with _ends(target, "an EAGLE head", options) as ends:
        _require_fit(weights, ends, directory)
        head = EagleHead(weights, ends.embeddings, ends.head, pack=options.pack)
        size, context = page_size_for(options.page_size, head.device), ends.info.context_length
        pages = options.kv_pages or choose_pages([head.shape], context, size, head.device)
        info = replace(ends.info, context_length=min(context, pages * size), padded_vocab_size=head.rows)
        layers = weights.config.layers_of(ends.layers)
        return EagleEngine(head, info, layers, weights.config.target_size, pages=pages, page_size=size)


def _require_fit(weights: EagleWeights, ends: TargetEnds, directory: Path) -> None:
    """Raises ModelRefused when the head is another target's."""
    config, hidden_size = weights.config, ends.head.in_features
    layers, rows = config.layers_of(ends.layers), config.llama.vocab_size
    if config.target_size != hidden_size:
        why = f"whose states have {config.target_size} elements, and not {hidden_size}"
    elif not all(0 <= layer <= ends.layers for layer in layers):
        why = f"whose layers {', '.join(map(str, layers))} feed it, of which this one has {ends.layers}"
    elif rows < ends.info.vocab_size:
        why = f"with a vocabulary of {rows} tokens, and not {ends.info.vocab_size}"
    elif config.llama.hidden_size != hidden_size and "lm_head.weight" not in weights.tensors:
        raise ModelRefused(f"the EAGLE head in {directory} has neither an output matrix nor states for the target's")
    elif len(layers) > MAX_FEATURE_LAYERS:
        raise ModelRefused(f"{directory} is fed by {len(layers)} layers, more than {MAX_FEATURE_LAYERS}")
    else:
        return
    raise ModelRefused(f"the EAGLE head in {directory} is for another target, {why}")


@contextmanager
def _ends(target: str, what: str, options: EngineOptions) -> Iterator[TargetEnds]:
    """Reads them; what comes out of the body is refused in the target's name."""
    source = parse_source(target)
    if source.kind in (SourceKind.SYNTHETIC, SourceKind.DISTILLED):
        raise ModelRefused(f"the target of {what} cannot be {source.name}")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = device_named(options.device)
    with refusing(source.name), gguf_read_once(), quiet(lambda _fraction, _what: None):
        config = load_config(source)
        layers = config.get_text_config(decoder=True).num_hidden_layers
        vocabulary = vocabulary_of_source(source, options.tokenizer, config)
        # Whatever lies between its ends is not even read.
        model = load_weights(source, load_config(source, 1), options.dtype, device)
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Linear) or head.bias is not None or not isinstance(embeddings, nn.Embedding):
            raise ModelRefused(f"{source.name} has no plain output matrix for {what} to share")
        size = min(vocabulary.size, head.out_features)
        info = EngineInfo(
            model_id=f"{source.name} with {what}",
            vocab_size=size,
            padded_vocab_size=head.out_features,
            context_length=context_length(config, options.context_length),
            dtype=str(model.dtype).removeprefix("torch."),
            eos_token_ids=eos_token_ids(model, size),
            vocab_fingerprint=vocabulary.fingerprint,
            token_hashes=vocabulary.token_hashes[: 4 * size],
            tokenizer=vocabulary.tokenizer,
        )
        yield TargetEnds(embeddings.weight.detach(), head, layers, info)
