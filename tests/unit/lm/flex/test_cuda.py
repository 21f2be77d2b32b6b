"""The kernels themselves and recorded graphs, where there is a GPU."""

import pytest
import torch
from torch._dynamo.utils import counters

from outrider.lm.attention import PagedPass
from outrider.lm.causal_lm import CausalLm
from outrider.lm.flex.compiled import CompiledKernel
from outrider.lm.flex.paged import Flex
from tests.harness.engines_lm import feed, text, tiny_engine
from tests.harness.steps_lm import through_steps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, Triton and a C compiler"),
    pytest.mark.timeout(900),
]

# Heads as wide as the kernels want them.
WIDER = {"head_dim": 16}


def cuda_engine(architecture: str, graphs: str, **changes: object) -> CausalLm:
    return tiny_engine(  # type: ignore[arg-type]
        architecture, attention="flex", graphs=graphs, page_size=16, device="cuda", **WIDER, **changes
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral_window", "gemma2_softcap", "gpt_oss_sinks"])
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_engines_equal_the_models_own_forward(architecture: str, graphs: str) -> None:
    if architecture == "gpt_oss_sinks" and graphs == "on":
        pytest.skip("its experts are chosen on the host")
    engine = cuda_engine(architecture, graphs)
    assert isinstance(engine.paged, Flex)
    assert isinstance(engine.paged.kernel, CompiledKernel)
    assert (engine._fixed is not None) == (graphs == "on")
    through_steps(engine, architecture, page=16, **WIDER)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_nothing_is_compiled_in_service(graphs: str) -> None:
    engine = cuda_engine("llama", graphs)
    feed(engine, engine.open(text(1, 0)), text(200, 0))  # a prompt's entries
    before = counters["stats"]["unique_graphs"]
    through_steps(engine, "llama", page=16, **WIDER)
    assert counters["stats"]["unique_graphs"] == before


def test_half_precision_agrees_with_gathered_pages() -> None:
    words = text(60, 5)
    flex, gathered = (cuda_engine("llama", graphs, dtype=torch.bfloat16) for graphs in ("on", "off"))
    gathered.attend_by(PagedPass)
    one, other = (feed(it, it.open(words[:1]), words).float() for it in (flex, gathered))
    assert float((one - other).norm() / other.norm()) < 0.05
