"""The models behind a draft worker's proposers."""

import logging
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draft_service.config import DraftConfig, TranslationWay
from draft_service.service import Engines
from draft_service.translation.engine import TranslatedEngine
from draft_service.translation.vocabularies import Vocabularies
from outrider.lm.configured import configured_engine, engine_options
from outrider.lm.engine import Engine, EngineInfo, ModelRefused
from outrider.lm.source import SourceKind, parse_source
from outrider.lm.tokenizer import load_tokenizer, vocabulary_of
from outrider.v1 import draft_pb2
from outrider.v1.draft_pb2 import Proposer

log = logging.getLogger(__name__)

# What the worker holds at most when nothing that runs a model is on offer and no context length is configured.
_LOOKUP_CONTEXT = 1 << 20

# Those that are fed by the target.
_FED = {draft_pb2.PROPOSER_MEDUSA, draft_pb2.PROPOSER_EAGLE}
_RUN_A_MODEL = {draft_pb2.PROPOSER_MODEL, draft_pb2.PROPOSER_EARLY_EXIT} | _FED


def load_engines(config: DraftConfig) -> Engines:
    """Loads what the proposers need: nothing but a tokenizer for those that only copy. Raises ModelRefused."""
    engines = {kind: translated(_engine(kind, config), config) for kind in config.kinds if kind in _RUN_A_MODEL}
    if engines:
        return engines, next(iter(engines.values())).info
    return engines, lookup_info(config)


def _engine(kind: Proposer.ValueType, config: DraftConfig) -> Engine:
    if kind == draft_pb2.PROPOSER_MODEL:
        return configured_engine(config, target=config.target_model)
    if kind in _FED:
        from outrider.lm.load_heads import load_eagle, load_medusa

        target, options = config.target_model or config.model, engine_options(config)
        if kind == draft_pb2.PROPOSER_MEDUSA:
            return load_medusa(Path(config.medusa), target, options)
        return load_eagle(Path(config.eagle), target, options)
    if config.early_exit:
        # It stands on the first layers of the target, whose weights are read from where the target's are.
        exit_of = config.model_copy(update={"model": config.early_exit})
        return configured_engine(exit_of, target=config.target_model or config.model)
    return configured_engine(config, layers=config.early_exit_layers)


def translated(engine: Engine, config: DraftConfig) -> Engine:
    """The engine in the tokens of the target, where that is known to have others. Raises ModelRefused."""
    if not _translates(config):
        return engine
    vocabulary = vocabulary_of(_target_tokenizer(config))
    if vocabulary.fingerprint == engine.info.vocab_fingerprint:
        return engine
    vocabularies = Vocabularies.of(engine.info, vocabulary, config.target_model)
    shared = vocabularies.shared
    log.info(
        "translating into the tokens of %s: %d of its %d are shared with the %d of %s",
        *(config.target_model, shared.spelled, shared.size, shared.own_size, config.model),
    )
    return TranslatedEngine(engine, vocabularies)


def lookup_info(config: DraftConfig) -> EngineInfo:
    """What a worker without a model serves: a vocabulary."""
    tokenizer = _target_tokenizer(config) if _translates(config) else load_tokenizer(config.model)
    vocabulary = vocabulary_of(tokenizer)
    return EngineInfo(
        model_id=config.model,
        vocab_size=vocabulary.size,
        padded_vocab_size=vocabulary.size,
        context_length=config.context_length or _LOOKUP_CONTEXT,
        dtype="",
        eos_token_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
        vocab_fingerprint=vocabulary.fingerprint,
        token_hashes=vocabulary.token_hashes,
        tokenizer=tokenizer,
    )


def _target_tokenizer(config: DraftConfig) -> PreTrainedTokenizerBase:
    """Raises ModelRefused, which says whose vocabulary was looked for: it is not this worker's own model."""
    try:
        return load_tokenizer(config.target_model)
    except ModelRefused as error:
        raise ModelRefused(f"the target's vocabulary is wanted, but {error}") from error


def _translates(config: DraftConfig) -> bool:
    """A distilled draft has its target's tokens."""
    off = config.target_model in ("", config.model) or config.translation is TranslationWay.OFF
    return not off and parse_source(config.model).kind is not SourceKind.DISTILLED
