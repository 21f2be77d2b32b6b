"""A model that was packed leaves no second one in the C library's hands."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.lm import heap
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import synthetic_tokenizer
from tests.harness.models import VOCAB, save_tiny

# In a process of its own: what others allocated and freed would count.
PROGRAM = """
import sys
from pathlib import Path

from outrider.lm.heap import give_back
from outrider.lm.load import EngineOptions, load_engine

def held() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

engine = load_engine(sys.argv[1], EngineOptions(dtype="bfloat16", kv_pages=100, page_size=4, threads=1))
after = held()
give_back()
print(after - held())
"""


@pytest.mark.skipif(heap._trim() is None, reason="no glibc")
def test_what_packing_frees_goes_back_as_a_model_is_loaded(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    synthetic_tokenizer(SyntheticSpec(vocab_size=VOCAB)).save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").stat().st_size / 2 / 1024  # of float32 there
    run = subprocess.run([sys.executable, "-c", PROGRAM, model], capture_output=True, text=True, timeout=100)
    assert not run.returncode, run.stderr
    assert int(run.stdout) < 0.4 * weights
