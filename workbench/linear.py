"""Matrix products for few rows, the shape decoding lives on.

On CPU, a weight reordered once for oneDNN reads at memory speed for one to about five rows, where the default product
of PyTorch runs at half that speed for one row and pays again for each further row. Elsewhere (CUDA, float64, builds
without oneDNN) the product is `torch.nn.functional.linear`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_HINT = 4  # rows oneDNN picks the layout for; that layout is the best or nearly so for every row count measured
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


@lru_cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's reordered weights work for this device and dtype (tried, not guessed)."""
    if device.type != "cpu" or dtype not in _PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(8, 8, dtype=dtype), ROWS_HINT)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 8, dtype=dtype), packed, None, "none", [], "")
        torch.ops.mkldnn._linear_pointwise.binary(*[torch.zeros(1, 8, dtype=dtype)] * 2, packed, None, "mul")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


class PackedLinear:
    """A frozen linear map x → x Wᵀ + b with fused neighbours. Inference only: no gradient passes through it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        """Take `weight` [O, I] and `bias` [O] or None; copied into oneDNN's order where that pays."""
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.is_packed = can_pack(weight.device, weight.dtype)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT) if self.is_packed else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] → [M, O]."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        """silu(x Wᵀ + b), [M, O]."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")
        return F.silu(F.linear(x, self.weight, self.bias))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """(x Wᵀ + b) · other, [M, O]."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")
        return F.linear(x, self.weight, self.bias) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """(x Wᵀ + b) + other, [M, O]: a projection and its residual."""
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "add")
        return F.linear(x, self.weight, self.bias) + other
