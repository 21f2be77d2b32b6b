"""`outrider distill` as a user runs it."""

from pathlib import Path

from outrider.lm.load import EngineOptions, load_engine
from tests.harness.commands import outrider
from tests.harness.models import VOCAB, save_tiny


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


async def test_distill_says_in_one_line_what_it_cannot_do(tmp_path: Path) -> None:
    out = str(tmp_path / "draft")
    for model, why in ((save_tiny(tmp_path / "gpt2", "gpt2"), "not built as Llama is"), ("synthetic:", "no layers")):
        code, _, err = await outrider("distill", "--target", model, "--out", out)
        assert code == 1
        assert why in err
        assert err.rstrip().splitlines()[-1].startswith("error: ")
