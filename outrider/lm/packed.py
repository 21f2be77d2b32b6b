"""Linear weights packed once for the CPU's matrix kernels (oneDNN): twice as fast at the few positions of a round.

oneDNN has none for bfloat16 on a CPU without AVX-512: there a kernel of ours takes them, packed in its own way.
"""

from functools import cache

import torch
from torch import nn

from outrider.lm.kernels import kernels

_PACKABLE = {torch.bfloat16, torch.float32, torch.float16}


class PackedLinear(nn.Module):
    """Computes what the nn.Linear that it was made from computes, to the last bits of the sum's order."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # A plain attribute: an opaque tensor is neither moved nor saved.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        output: torch.Tensor = self._product(inputs, self.packed, self.bias, "none", [], "")
        return output


class KernelLinear(nn.Module):
    """The same by a kernel of ours.

    Attributes:
        record: of the weights, for other kernels.
    """

    def __init__(self, linear: nn.Linear) -> None:
        from outrider.lm.kernels.compiled import linear_record
        from outrider.lm.kernels.panels import panelled

        super().__init__()
        found = kernels()
        assert found is not None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._panels = panelled(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self._kernels = found
        self.record = linear_record(self._panels, (linear.out_features, linear.in_features), self._bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]"""
        return self._kernels.linear(self.record, inputs)


def pack_linear(layer: nn.Module) -> nn.Module:
    """The layer with the quickest product that this CPU has for it; the layer itself where that is its own."""
    if type(layer) is not nn.Linear:
        return layer
    if _can_pack(layer):
        return PackedLinear(layer)
    return KernelLinear(layer) if _suits_kernels(layer) else layer


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of a model on the CPU by packed ones, and returns how many.

    A weight that something else also uses (an embedding tied to the head) stays there as it is. Layers whose numeric
    type this CPU has no packed kernel for are left alone.
    """
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # named_children leaves out second names
        if type(child) is nn.Linear and (_can_pack(child) or _suits_kernels(child))
    ]
    packed: dict[int, nn.Module] = {}
    for parent, name, child in linears:
        if id(child) not in packed:
            packed[id(child)] = pack_linear(child)
        setattr(parent, name, packed[id(child)])
    return len(packed)


def _can_pack(linear: nn.Linear) -> bool:
    """Whether this CPU has a packed kernel for the layer, which may be elsewhere."""
    dtype = linear.weight.dtype
    if linear.weight.device.type != "cpu" or dtype not in _PACKABLE:
        return False
    return has_packed(dtype)


def _suits_kernels(linear: nn.Linear) -> bool:
    """Whether a kernel of ours is quicker than torch's product for the layer, which may be elsewhere."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or linear.in_features % 8:
        return False
    return not has_packed(weight.dtype) and kernels() is not None


@cache
def has_packed(dtype: torch.dtype) -> bool:
    """Whether torch has packed products for this CPU in the type."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8, dtype=dtype), None)
    except RuntimeError:  # this CPU has no kernel for the type
        return False
    return True
