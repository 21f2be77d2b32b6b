"""The self-check must fail on every mistake that it is there for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.lm import attention, fused, packed, ragged
from outrider.lm.attention import LayerCall
from outrider.lm.engine import ModelRefused
from outrider.lm.kv import PagedSequence
from outrider.lm.kv_storage import KvStorage
from tests.harness.engines_lm import tiny_engine


def _by_torch(patch: pytest.MonkeyPatch) -> None:
    """Whatever kernels there are, torch's operations do it."""
    for module in (attention, fused):
        patch.setattr(module, "kernels", lambda: None)


def _sees_everything(patch: pytest.MonkeyPatch) -> None:
    _by_torch(patch)
    patch.setattr(ragged, "_mask", lambda *_: None)


def _ignores_the_window(patch: pytest.MonkeyPatch) -> None:
    _by_torch(patch)
    own = attention.PagedPass.attend

    def attend(self: attention.PagedPass, call: LayerCall) -> torch.Tensor:
        call.window = None
        return own(self, call)

    patch.setattr(attention.PagedPass, "attend", attend)


def _ignores_the_softcap(patch: pytest.MonkeyPatch) -> None:
    own = attention.PagedPass.attend

    def attend(self: attention.PagedPass, call: LayerCall) -> torch.Tensor:
        call.softcap = None
        return own(self, call)

    patch.setattr(attention.PagedPass, "attend", attend)


def _ignores_the_sinks(patch: pytest.MonkeyPatch) -> None:
    own = attention.PagedPass.attend

    def attend(self: attention.PagedPass, call: LayerCall) -> torch.Tensor:
        call.sinks = None
        return own(self, call)

    patch.setattr(attention.PagedPass, "attend", attend)


def _mixes_layers_up(patch: pytest.MonkeyPatch) -> None:
    _by_torch(patch)
    own = KvStorage.read
    patch.setattr(KvStorage, "read", lambda self, layer, *rest: own(self, min(layer, 1), *rest))


def _loses_a_key(patch: pytest.MonkeyPatch) -> None:
    own = KvStorage.write

    def write(self: KvStorage, layer: int, slots: torch.Tensor, key_value: torch.Tensor) -> None:
        own(self, layer, slots[:1].expand(len(slots)), key_value)

    patch.setattr(KvStorage, "write", write)


def _forgets_one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    own = PagedSequence.truncate
    patch.setattr(PagedSequence, "truncate", lambda self, length: own(self, min(length + 1, self.length)))


def _packs_another_weight(patch: pytest.MonkeyPatch) -> None:
    # Each layer by itself, whatever kernels could do at once.
    patch.setattr(fused, "_stack", lambda _: None)
    for kind in (packed.PackedLinear, packed.KernelLinear):
        own = kind.forward
        patch.setattr(kind, "forward", lambda self, inputs, own=own: own(self, inputs) * 1.5)


@pytest.mark.parametrize(
    ("mistake", "architecture"),
    [
        (_sees_everything, "llama"),
        (_ignores_the_window, "mistral_window"),
        (_ignores_the_softcap, "gemma2_softcap"),
        (_ignores_the_sinks, "gpt_oss_sinks"),
        (_mixes_layers_up, "llama"),
        (_loses_a_key, "gpt2"),
        (_forgets_one_token_too_few, "llama"),
        (_packs_another_weight, "llama"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mistake_refuses_the_model(
    mistake: Callable[[pytest.MonkeyPatch], Any], architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(ModelRefused, match="self-check failed"):
        tiny_engine(architecture, dtype=dtype)


def test_logits_that_are_not_finite_refuse_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "silu", lambda it: it * float("inf"))
    with pytest.raises(ModelRefused, match="not finite in float32"):
        tiny_engine("llama", hidden_act="silu")


@pytest.mark.parametrize(("pages", "page"), [(3, 1), (3, 4), (3, 16), (200, 1)])
def test_the_check_fits_into_few_pages(pages: int, page: int) -> None:
    assert tiny_engine("llama", pages=pages, page_size=page).pages() == (0, pages)
