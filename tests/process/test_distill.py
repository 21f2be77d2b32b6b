"""`outrider distill` as a user runs it."""

from pathlib import Path

import pytest

from draft_service.config import DraftConfig
from draft_service.loading import load_engines
from outrider.config import parse_config
from outrider.lm.distilled import DistilledDraft
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import Segment
from outrider.lm.features import Feeding
from outrider.lm.load import EngineOptions, load_engine
from tests.harness.commands import outrider
from tests.harness.models import VOCAB, save_tiny
from tests.harness.workers import int32


async def test_distill_makes_a_draft_and_goes_on_where_it_was(tmp_path: Path) -> None:
    target, out = save_tiny(tmp_path / "target", "llama"), tmp_path / "draft"
    sizes = (
        "--layers",
        "1",
        "--kept",
        "32",
        "--texts",
        "16",
        "--answer-tokens",
        "8",
        "--epochs",
        "1",
        "--threads",
        "1",
    )
    code, report, err = await outrider("distill", "--target", target, "--out", str(out), *sizes)
    assert code == 0, err
    assert "tokens/pass, greedy" in report
    assert {path.name for path in out.iterdir()} == {"draft.json", "draft.safetensors", "report.json", "work"}
    engine = load_engine(str(out), EngineOptions(kv_pages=20, target=target))
    assert engine.info.vocab_size == VOCAB
    code, again, _ = await outrider("distill", "--target", target, "--out", str(out), *sizes)
    assert (code, again) == (0, report)


async def test_an_exit_is_made_and_served(tmp_path: Path) -> None:
    target, out = save_tiny(tmp_path / "target", "llama"), tmp_path / "exit"
    kind = ("--kind", "exit", "--exit-layers", "1", "--kept", "32")
    sizes = ("--texts", "16", "--answer-tokens", "8", "--epochs", "1", "--threads", "1")
    code, _, err = await outrider("distill", "--target", target, "--out", str(out), *kind, *sizes)
    assert code == 0, err
    made = DistilledDraft.load(out)
    assert (made.layers, made.shared) == (2, 1)
    flags = ["--model", target, "--proposers", "early_exit,prompt_lookup", "--kv-pages", "20"]
    engines, _ = load_engines(parse_config(DraftConfig, [*flags, "--early-exit", str(out)]))
    (engine,) = engines.values()
    words = int32([1, 5, 9])
    (logits,) = engine.forward([Segment(engine.open(words), words, 1)])
    seen = (logits[0] > -1e29).nonzero()[:, 0].tolist()
    assert seen == made.tensors["kept"].tolist()


async def test_medusa_heads_are_made_and_served(tmp_path: Path) -> None:
    target, out = save_tiny(tmp_path / "target", "llama"), tmp_path / "heads"
    sizes = ("--texts", "16", "--answer-tokens", "8", "--epochs", "1", "--threads", "1", "--kept", "32")
    code, report, err = await outrider(
        "distill", "--kind", "medusa", "--heads", "2", "--target", target, "--out", str(out), *sizes
    )
    assert code == 0, err
    assert "accepted at position 2" in report
    flags = ["--model", target, "--proposers", "medusa,prompt_lookup", "--medusa", str(out)]
    engines, info = load_engines(parse_config(DraftConfig, flags))
    (engine,) = engines.values()
    assert engine.info.feeding == Feeding((3,), 32, window=1, longest=2)
    assert info.vocab_size == VOCAB


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
async def test_an_eagle_head_is_made(tmp_path: Path, kind: str) -> None:
    target, out = save_tiny(tmp_path / "target", "llama"), tmp_path / "head"
    sizes = ("--texts", "16", "--answer-tokens", "8", "--epochs", "1", "--threads", "1", "--kept", "32")
    code, report, err = await outrider(
        "distill", "--kind", kind, "--positions", "2", "--lookahead", "3", "--target", target, "--out", str(out), *sizes
    )
    assert code == 0, err
    assert "accepted at position 3" in report
    made = EagleWeights.load(out)
    assert made.config.kind == {"eagle": 1, "eagle3": 3}[kind]
    assert made.config.llama.vocab_size == VOCAB


@pytest.mark.parametrize("flags", [("--kind", "exit"), ("--exit-layers", "1")])
async def test_an_exit_and_its_layers_go_together(tmp_path: Path, flags: tuple[str, ...]) -> None:
    code, _, err = await outrider("distill", "--target", "x", "--out", str(tmp_path / "draft"), *flags)
    assert code == 1
    assert "--kind exit needs --exit-layers, and no other kind has them" in err


async def test_distill_says_in_one_line_what_it_cannot_do(tmp_path: Path) -> None:
    out = str(tmp_path / "draft")
    for model, why in ((save_tiny(tmp_path / "gpt2", "gpt2"), "not built as Llama is"), ("synthetic:", "no layers")):
        code, _, err = await outrider("distill", "--target", model, "--out", out)
        assert code == 1
        assert why in err
        assert err.rstrip().splitlines()[-1].startswith("error: ")
