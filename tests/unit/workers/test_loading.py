"""What a draft worker loads, and in whose tokens it serves."""

import subprocess
import sys
from pathlib import Path

import pytest

from draft_service.config import DraftConfig
from draft_service.loading import load_engines
from draft_service.translation.engine import TranslatedEngine
from outrider.lm.engine import ModelRefused
from outrider.lm.tokenizer import load_tokenizer, vocabulary_of
from outrider.v1.draft_pb2 import PROPOSER_MODEL
from tests.harness.vocabularies import characters, saved

TARGET = "synthetic:vocab_size=26"
OTHER = "synthetic:vocab_size=30"


def fingerprint(model: str) -> str:
    return vocabulary_of(load_tokenizer(model)).fingerprint


@pytest.mark.parametrize(
    ("settings", "translates"),
    [
        ({"model": OTHER, "target_model": TARGET}, True),
        ({"model": OTHER, "target_model": TARGET, "translation": "off"}, False),
        ({"model": OTHER}, False),
        ({"model": TARGET, "target_model": TARGET}, False),
    ],
)
def test_a_model_with_another_vocabulary_than_its_target_translates(settings: dict[str, str], translates: bool) -> None:
    engines, info = load_engines(DraftConfig(**settings))  # type: ignore[arg-type]
    assert isinstance(engines[PROPOSER_MODEL], TranslatedEngine) is translates
    assert info.vocab_fingerprint == fingerprint(TARGET if translates else settings["model"])
    assert info.model_id == settings["model"]


def test_what_only_copies_serves_the_targets_vocabulary() -> None:
    config = DraftConfig(model=OTHER, target_model=TARGET, proposers="prompt_lookup")
    assert load_engines(config)[1].vocab_fingerprint == fingerprint(TARGET)


def test_vocabularies_with_too_little_in_common_are_refused(tmp_path: Path) -> None:
    target = saved(characters("日本語訳"), tmp_path)
    with pytest.raises(
        ModelRefused, match=rf"{OTHER} shares 0 of its 30 tokens with {target}: too few to draft for it"
    ):
        load_engines(DraftConfig(model=OTHER, target_model=target))


def test_a_target_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ModelRefused, match="'/no/such' does not exist"):
        load_engines(DraftConfig(model=OTHER, target_model="/no/such"))


def test_a_worker_without_a_model_imports_none_of_the_code_of_models() -> None:
    code = """import sys
from draft_service.config import DraftConfig
from draft_service.loading import load_engines
load_engines(DraftConfig(model="synthetic:vocab_size=26"))
print("torch" in sys.modules, "transformers.modeling_utils" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True False\n"
