"""Linear weights packed once for the CPU's matrix kernels (oneDNN): twice as fast at the few positions of a round."""

from functools import cache

import torch
from torch import nn

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


def pack_linear(layer: nn.Module) -> nn.Module:
    """The packed layer; the layer itself when it is no nn.Linear or this CPU has no packed kernel for it."""
    return PackedLinear(layer) if type(layer) is nn.Linear and _can_pack(layer) else layer


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of a model on the CPU by packed ones, and returns how many.

    A weight that something else also uses (an embedding tied to the head) stays there as it is. Layers whose numeric
    type this CPU has no packed kernel for are left alone.
    """
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # named_children leaves out second names
        if type(child) is nn.Linear and _can_pack(child)
    ]
    packed: dict[int, PackedLinear] = {}
    for parent, name, child in linears:
        if id(child) not in packed:
            packed[id(child)] = PackedLinear(child)
        setattr(parent, name, packed[id(child)])
    return len(packed)


def _can_pack(linear: nn.Linear) -> bool:
    """Whether this CPU has a packed kernel for the layer, which may be elsewhere."""
    dtype = linear.weight.dtype
    if linear.weight.device.type != "cpu" or dtype not in _PACKABLE:
        return False
    return _has_kernel(dtype)


@cache
def _has_kernel(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8, dtype=dtype), None)
    except RuntimeError:  # this CPU has no kernel for the type
        return False
    return True
