"""From MODEL to an engine: what it knows, what it refuses, what it says meanwhile."""

import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    JambaConfig,
    Llama4TextConfig,
    MambaConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from outrider.lm.checkpoint import load_config
from outrider.lm.engine import ModelRefused, Segment
from outrider.lm.load import EngineOptions, load_engine
from outrider.lm.source import parse_source
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer, vocabulary_of
from tests.harness.engines_lm import assert_same, own_logits, own_model, text
from tests.harness.models import CONTEXT, VOCAB, save_tiny

SMALL = EngineOptions(kv_pages=100, page_size=4)


def settings_of(directory: str, **changes: object) -> None:
    """Changes entries of a saved model's config.json."""
    path = Path(directory) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_engine_says_what_it_serves(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", eos_token_id=[2, 7])
    synthetic_tokenizer(SyntheticSpec(vocab_size=VOCAB)).save_pretrained(tmp_path)
    info = load_engine(model, SMALL).info
    vocabulary = vocabulary_of(synthetic_tokenizer(SyntheticSpec(vocab_size=VOCAB)))
    assert (info.model_id, info.vocab_size, info.padded_vocab_size) == (model, VOCAB, VOCAB)
    assert (info.context_length, info.dtype, info.eos_token_ids) == (CONTEXT, "float32", (2, 7))
    assert (info.vocab_fingerprint, info.token_hashes) == (vocabulary.fingerprint, vocabulary.token_hashes)


@pytest.mark.parametrize(("tokens", "real"), [(VOCAB - 11, VOCAB - 11), (VOCAB + 5, VOCAB)])
def test_the_real_vocabulary_is_the_smaller_of_tokenizer_and_head(tmp_path: Path, tokens: int, real: int) -> None:
    model = save_tiny(tmp_path, "llama")
    synthetic_tokenizer(SyntheticSpec(vocab_size=tokens)).save_pretrained(tmp_path)
    info = load_engine(model, SMALL).info
    assert (info.vocab_size, info.padded_vocab_size, len(info.token_hashes)) == (real, VOCAB, 4 * real)


def test_without_a_tokenizer_the_vocabulary_is_its_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        info = load_engine(save_tiny(tmp_path, "llama"), SMALL).info
    assert info.vocab_fingerprint == hashlib.sha256(f"ids:{VOCAB}".encode()).hexdigest()
    assert info.token_hashes == bytes(4 * VOCAB)
    assert "has no tokenizer" in caplog.text


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    info = load_engine(
        save_tiny(tmp_path, "llama"), EngineOptions(kv_pages=100, tokenizer="synthetic:vocab_size=9")
    ).info
    assert info.vocab_size == 9


def test_generation_settings_win_over_the_configuration(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", eos_token_id=3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4, 900]}))
    assert load_engine(model, SMALL).info.eos_token_ids == (4, 5), "ids outside the vocabulary are dropped"


def test_the_loaded_engine_computes_what_the_saved_model_did(tmp_path: Path) -> None:
    engine = load_engine(save_tiny(tmp_path, "qwen2_biases"), SMALL)
    words = text(20, 1)
    assert_same(
        engine.forward([Segment(engine.open(words), words, 20)])[0], own_logits(own_model("qwen2_biases"), words)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_numeric_type_is_the_one_asked_for(tmp_path: Path, dtype: str) -> None:
    engine = load_engine(save_tiny(tmp_path, "llama"), EngineOptions(kv_pages=100, dtype=dtype))
    words = text(5, 1)
    assert engine.info.dtype == dtype
    assert engine.forward([Segment(engine.open(words), words, 5)])[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "gemma2_softcap", "gpt2"])
def test_early_exit_is_the_first_layers_with_norm_and_head(tmp_path: Path, architecture: str, layers: int) -> None:
    engine = load_engine(save_tiny(tmp_path, architecture), EngineOptions(kv_pages=100, layers=layers))
    model, words = own_model(architecture), text(20, 2)
    base = model.base_model
    blocks = base.h if architecture == "gpt2" else base.layers
    del blocks[layers:]
    model.config.num_hidden_layers = layers
    assert_same(engine.forward([Segment(engine.open(words), words, 20)])[0], own_logits(model, words))


def test_progress_never_goes_back_and_ends_at_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path, "llama")
    capfd.readouterr()
    steps: list[tuple[float, str]] = []
    load_engine(model, SMALL, lambda fraction, what: steps.append((fraction, what)))
    fractions = [fraction for fraction, _ in steps]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert {"reading the configuration", "loading weights", "packing weights", "ready"} <= {what for _, what in steps}
    assert capfd.readouterr() == ("", ""), "transformers' bars and advice stay off the terminal"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MambaConfig(num_hidden_layers=1), "mamba has .* cannot be truncated"),
        (JambaConfig(num_hidden_layers=2), "jamba has linear_attention layers, whose state cannot be truncated"),
        (BambaConfig(num_hidden_layers=2), "bamba has .* cannot be truncated"),
        (Qwen3NextConfig(num_hidden_layers=4), "qwen3_next has linear_attention layers"),
        (RecurrentGemmaConfig(num_hidden_layers=3), "recurrent_gemma has .* cannot be truncated"),
        (RwkvConfig(num_hidden_layers=1), "rwkv has .* cannot be truncated"),
        (Llama4TextConfig(num_hidden_layers=4), "llama4_text has chunked_attention layers"),
        (T5Config(), "t5 is an encoder-decoder model"),
        (ViTConfig(), "vit is not a causal language model"),
    ],
    ids=lambda it: getattr(it, "model_type", ""),
)
def test_c4_models_without_truncatable_state_are_refused_before_their_weights(
    tmp_path: Path, config: MambaConfig, why: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=rf"^{tmp_path} cannot be served: {why}"):
        load_engine(str(tmp_path), SMALL)


def test_an_architecture_outside_the_attention_interface_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="falcon does not use transformers' attention interface"):
        load_engine(save_tiny(tmp_path, "falcon"), SMALL)


def test_missing_weights_are_refused_not_invented(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_engine(model, SMALL)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama")
    settings_of(model, intermediate_size=64)
    with pytest.raises(ModelRefused, match="cannot be served"):
        load_engine(model, SMALL)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("model.safetensors", b"\x00" * 64, "cannot be served"),
        ("config.json", b"{", "cannot be served"),
        ("config.json", b'{"model_type": "of_tomorrow"}', "of_tomorrow"),
    ],
)
def test_broken_files_are_one_sentence(tmp_path: Path, file: str, content: bytes, why: str) -> None:
    model = save_tiny(tmp_path, "llama")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelRefused, match=why) as caught:
        load_engine(model, SMALL)
    assert "\n" not in str(caught.value)


def test_missing_weight_files_are_one_sentence(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"cannot be served: .*model\.safetensors"):
        load_engine(model, SMALL)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (EngineOptions(layers=4), "the model has 3 layers, 4 were asked for"),
        (
            EngineOptions(context_length=CONTEXT + 1),
            f"context length of {CONTEXT + 1} was asked for, the model has {CONTEXT}",
        ),
        (EngineOptions(dtype="int8"), "dtype 'int8' is none of auto, float32"),
        (EngineOptions(device="quantum"), "device 'quantum' is none that torch knows"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options: EngineOptions, why: str) -> None:
    with pytest.raises(ModelRefused, match=why):
        load_engine(save_tiny(tmp_path, "llama"), options)


@pytest.mark.parametrize(
    ("name", "value"), [("threads", -1), ("layers", -1), ("context_length", 1), ("page_size", -1), ("kv_pages", 2)]
)
def test_numbers_out_of_range_name_themselves(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        EngineOptions(**{name: value})  # type: ignore[arg-type]


def test_a_position_encoding_that_depends_on_the_length_ends_the_context(tmp_path: Path) -> None:
    """With dynamic NTK a longer neighbour in the batch would change a sequence's logits."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    engine = load_engine(save_tiny(tmp_path, "llama", rope_parameters=rope), SMALL)
    assert engine.info.context_length == 64


def test_the_context_can_be_shorter_than_the_models(tmp_path: Path) -> None:
    assert load_engine(save_tiny(tmp_path, "llama"), EngineOptions(context_length=20)).info.context_length == 20


@pytest.mark.skipif("OUTRIDER_TEST_GGUF" not in os.environ, reason="OUTRIDER_TEST_GGUF names no GGUF file")
def test_a_gguf_file_is_loaded_in_bfloat16(capfd: pytest.CaptureFixture[str]) -> None:
    model = f"gguf:{os.environ['OUTRIDER_TEST_GGUF']}"
    engine = load_engine(model, EngineOptions(kv_pages=100, layers=2))
    assert (engine.info.dtype, engine.info.model_id) == ("bfloat16", model)
    assert len(engine.info.token_hashes) == 4 * engine.info.vocab_size
    assert load_config(parse_source(model)).num_hidden_layers > 2
    tokens = np.arange(9, dtype=np.int32)
    assert engine.forward([Segment(engine.open(tokens), tokens, 9)])[0].shape == (9, engine.info.vocab_size)
    assert capfd.readouterr().err.count("\n") == 0
