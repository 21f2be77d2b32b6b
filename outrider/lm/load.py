"""From MODEL to an engine that has proved itself."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.lm.attention import ATTENTION, Recording
from outrider.lm.attention_choice import AttentionName, choose_attention, page_size_for
from outrider.lm.causal_lm import CausalLm, Run, run_model
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.decoder import layer_by_layer
from outrider.lm.distilled import DistilledDraft
from outrider.lm.engine import Engine, EngineInfo, ModelRefused
from outrider.lm.fused import FusedDecoder
from outrider.lm.gguf_once import gguf_read_once
from outrider.lm.graph_choice import GraphsName, choose_graphs, wants_scratch
from outrider.lm.heap import give_back
from outrider.lm.kernels import kernels
from outrider.lm.kv import PagePool
from outrider.lm.kv_storage import KvStorage, LayerShape
from outrider.lm.packed import has_packed, pack_linears
from outrider.lm.probe import probe, probe_tokens, reference_logits
from outrider.lm.quiet import Progress, quiet
from outrider.lm.reduced_head import ReducedHead
from outrider.lm.refuse import refuse_layers, refusing
from outrider.lm.sizing import LEAST_PAGES, choose_pages, context_length
from outrider.lm.source import ModelSource, SourceKind, parse_source
from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.tokenizer import Vocabulary, load_tokenizer, vocabulary_of

_log = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


@dataclass(frozen=True)
class EngineOptions:
    """How a model is served.

    Attributes:
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's, bfloat16 for GGUF.
        device: a torch device, or "auto": CUDA when there is one.
        threads: torch's threads; 0 leaves them.
        kv_pages: pages of the KV cache; 0 chooses from context length and free memory.
        page_size: tokens per page; 0 chooses by the device.
        context_length: longest sequence in tokens; 0 means the model's own.
        layers: early exit: only the first N layers, with norm and head; 0 means all.
        pack: whether linear weights are packed for the CPU.
        attention: whether pages are read where they lie (flex) or gathered first; auto: flex on CUDA.
        graphs: whether passes of few rows are recorded and played; auto: where attention is flex on CUDA.
        tokenizer: MODEL whose tokenizer defines the vocabulary; "" means the model's own.
        target: MODEL that a distilled draft shares its embeddings with; "" means the one that it names.

    Raises ValueError naming a number that is out of range.
    """

    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    kv_pages: int = 0
    page_size: int = 0
    context_length: int = 0
    layers: int = 0
    pack: bool = True
    attention: AttentionName = "auto"
    graphs: GraphsName = "auto"
    tokenizer: str = ""
    target: str = ""

    def __post_init__(self) -> None:
        for name in ("threads", "context_length", "layers", "page_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")
        if self.kv_pages and self.kv_pages < LEAST_PAGES:
            raise ValueError(f"kv_pages is {self.kv_pages}, must be 0 or at least {LEAST_PAGES}")
        if self.context_length == 1:
            raise ValueError("context_length is 1, must be 0 or at least 2")


def load_engine(model: str, options: EngineOptions = EngineOptions(), progress: Progress | None = None) -> Engine:
    """Loads a MODEL, checks that it can be served exactly, and returns its engine.

    Args:
        model: as for `parse_source`.
        options: how to serve it.
        progress: called with (fraction in [0, 1], what is being done), never decreasing, on the calling thread.

    Raises ModelRefused with one sentence for the operator.
    """
    report = _never_decreasing(progress or (lambda _fraction, _what: None))
    source = parse_source(model)
    synthetic = SyntheticEngine.of(source)
    if synthetic is not None:
        return synthetic
    if options.threads:
        torch.set_num_threads(options.threads)
    device = device_named(options.device)
    report(0.0, "reading the configuration")
    with refusing(source.name), gguf_read_once(), quiet(lambda part, what: report(0.05 + 0.75 * part, what)):
        model_with_weights, vocabulary = load_model(source, options, device)
        engine = build_engine(source.name, model_with_weights, vocabulary, options, report)
    report(1.0, "ready")
    return engine


def load_model(source: ModelSource, options: EngineOptions, device: torch.device) -> tuple[PreTrainedModel, Vocabulary]:
    """The transformers model behind a checkpoint or a distilled draft, unchanged otherwise, and its vocabulary.

    Raises ModelRefused, and whatever transformers raises.
    """
    draft = DistilledDraft.load(Path(source.location)) if source.kind is SourceKind.DISTILLED else None
    base = draft.base(options.target) if draft else source
    config = load_config(base, draft.layers if draft else options.layers)
    vocabulary = vocabulary_of_source(base, options.tokenizer, config)
    model = load_weights(base, config, options.dtype, device)
    if draft:
        draft.install(model, vocabulary.fingerprint)
    return model, vocabulary


def build_engine(
    name: str, model: PreTrainedModel, vocabulary: Vocabulary, options: EngineOptions, report: Progress
) -> CausalLm:
    """Wraps a loaded model: its own logits first, then paged attention and packed weights, then the self-check.

    Raises ModelRefused when the model does not go through the attention interface or fails the self-check.
    """
    report(0.8, "checking the model")
    context = context_length(model.config, options.context_length)
    tokens = probe_tokens(min(vocabulary.size, *_vocabulary_rows(model)), context)
    reference = reference_logits(model, tokens)
    model.set_attn_implementation(ATTENTION)
    shapes = _record(model)
    report(0.85, "packing weights")
    run = _run_of(model, shapes, pack=options.pack)
    engine = _assemble(name, model, run, shapes, vocabulary, reference.shape[1], context, options)
    report(0.9, "checking the paged path")
    # One page is for the second sequence of the check.
    check = partial(probe, engine, tokens, reference, max(2, engine.info.context_length - engine.storage.page_size))
    choose_attention(engine, shapes, options.attention, engine.storage.page_size, check)
    choose_graphs(engine, options.graphs, check, lambda part, what: report(0.9 + 0.1 * part, what))
    return engine


def _assemble(
    name: str,
    model: PreTrainedModel,
    run: Run,
    layers: Sequence[LayerShape],
    vocabulary: Vocabulary,
    head_rows: int,
    context: int,
    options: EngineOptions,
) -> CausalLm:
    page_size = page_size_for(options.page_size, model.device)
    pages = options.kv_pages or choose_pages(layers, context, page_size, model.device)
    held = pages * page_size
    if held < context:
        _log.warning("%d KV pages hold %d tokens: the context length is cut from %d to that", pages, held, context)
    size, config = min(vocabulary.size, head_rows), model.config.get_text_config(decoder=True)
    info = EngineInfo(
        model_id=name,
        vocab_size=size,
        padded_vocab_size=head_rows,
        context_length=min(context, held),
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=eos_token_ids(model, size),
        vocab_fingerprint=vocabulary.fingerprint,
        token_hashes=vocabulary.token_hashes[: 4 * size],
        tokenizer=vocabulary.tokenizer,
        hidden_size=0 if isinstance(model.get_output_embeddings(), ReducedHead) else config.hidden_size,  # type: ignore[no-untyped-call]
        layers=config.num_hidden_layers,
    )
    scratch = wants_scratch(options.graphs, model.device)
    storage = KvStorage(layers, pages, page_size, model.device, scratch=scratch)
    return CausalLm(run, model.device, info, PagePool(pages, page_size), storage)


def _run_of(model: PreTrainedModel, shapes: Sequence[LayerShape], *, pack: bool) -> Run:
    """The model's pass with the fewest operations known for it."""
    if pack and model.device.type == "cpu" and model.dtype == torch.bfloat16:
        _warn_of_slow_products()
    fused = FusedDecoder.of(model, shapes, pack=pack)
    if fused:
        return fused
    if pack:
        pack_linears(model)
        give_back()
    # A distilled draft's few layers cost little more than what transformers does around them.
    distilled = isinstance(model.get_output_embeddings(), ReducedHead)  # type: ignore[no-untyped-call]
    return layer_by_layer(model) if distilled else partial(run_model, model)


def _warn_of_slow_products() -> None:
    if not has_packed(torch.bfloat16) and kernels() is None:
        _log.warning(
            "torch is slow at bfloat16 on this processor, most of all at the positions of a block: "
            'install "outrider[cpu]" or serve in float32'
        )


def _vocabulary_rows(model: PreTrainedModel) -> list[int]:
    """Rows of the embedding and of the head."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights = [getattr(it, "weight", None) for it in (model.get_input_embeddings(), head)]
    return [len(weight) for weight in weights if isinstance(weight, torch.Tensor)]


@torch.inference_mode()
def _record(model: PreTrainedModel) -> list[LayerShape]:
    """What the layers keep, seen in a pass over one token."""
    recording = Recording()
    one = torch.zeros(1, dtype=torch.int64, device=model.device)
    run_model(model, one, one, one, recording)
    refuse_layers(model.config, recording.layers)
    return recording.layers


def vocabulary_of_source(source: ModelSource, tokenizer: str, config: PreTrainedConfig) -> Vocabulary:
    """The vocabulary of the tokenizer; without one, of the bare ids."""
    if not tokenizer and source.kind is SourceKind.DIRECTORY and not _has_tokenizer(Path(source.location)):
        size = config.get_text_config(decoder=True).vocab_size
        _log.warning("%s has no tokenizer: its vocabulary is taken to be the ids below %d", source.name, size)
        return Vocabulary(size, hashlib.sha256(f"ids:{size}".encode()).hexdigest(), bytes(4 * size))
    return vocabulary_of(load_tokenizer(tokenizer or source.name))


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _TOKENIZER_FILES)


def _never_decreasing(progress: Progress) -> Progress:
    last = (-1.0, "")

    def report(fraction: float, what: str) -> None:
        nonlocal last
        now = (max(last[0], fraction), what)
        if now != last:
            last = now
            progress(*now)

    return report


def device_named(name: str) -> torch.device:
    """Where a model goes. Raises ModelRefused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelRefused(f"device {name!r} is none that torch knows") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("device cuda was asked for, and torch sees none")
    return device


def eos_token_ids(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """From the generation settings, else from the configuration."""
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    ids = [found] if isinstance(found, int) else list(found or [])
    return tuple(sorted({it for it in ids if 0 <= it < vocab_size}))
