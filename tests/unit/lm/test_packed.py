"""Packed linear layers compute what the plain ones do."""

import pytest
import torch
from torch import nn

from outrider.lm import packed
from outrider.lm.packed import PackedLinear, has_packed, pack_linear, pack_linears


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head
        self.untouched = nn.LayerNorm(6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (1, 0, 48), (2, 3, 48)])
@torch.inference_mode()
def test_equal_to_the_plain_layer(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    if not has_packed(dtype):
        pytest.skip("torch has no packed product of this type for this processor")
    plain = nn.Linear(48, 33, bias=bias, dtype=dtype)
    inputs = torch.randn(shape, generator=generator).to(dtype)
    actual, expected = PackedLinear(plain)(inputs), plain(inputs)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_a_tied_weight_stays_in_the_embedding_and_is_packed_once() -> None:
    model = Tied()
    expected = model.embedding(torch.tensor([3])) @ model.embedding.weight.T
    assert pack_linears(model) == 1
    assert isinstance(model.head, PackedLinear)
    assert model.again is model.head
    torch.testing.assert_close(model.head(model.embedding(torch.tensor([3]))), expected)


def test_a_processor_without_a_kernel_leaves_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear(8, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(packed, "has_packed", lambda _dtype: False)
    monkeypatch.setattr(packed, "kernels", lambda: None)
    assert pack_linear(plain) is plain


def test_types_without_a_kernel_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
