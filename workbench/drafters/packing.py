"""A network's copy for drafting, its weights reordered once where that makes few-row products faster (see `linear`)."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from workbench.linear import PackedLinear, can_pack


class Packed(nn.Module):
    """A frozen linear on reordered weights; some columns alone are reordered when first asked for."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = linear  # holds the weights the parts are cut from; shared with the network itself
        self._parts: dict[tuple[int, int], PackedLinear] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self._part(0, self._linear.in_features)(x)

    def columns(self, x: Tensor, first: int, last: int) -> Tensor:
        """x [..., last - first] times the transpose of weight[:, first:last]."""
        return self._part(first, last)(x)

    def _part(self, first: int, last: int) -> PackedLinear:
        found = self._parts.get((first, last))
        if found is None:
            is_whole = last - first == self._linear.in_features
            bias = self._linear.bias if is_whole else None
            found = self._parts[first, last] = PackedLinear(self._linear.weight[:, first:last], bias)
        return found


Net = TypeVar("Net", bound=nn.Module)


def pack(net: Net) -> Net:
    """A frozen network that computes the same with reordered weights; `net` itself where that does not pay.

    Later changes of `net`'s weights do not reach it: pack anew.
    """
    weight = next(net.parameters())
    if not can_pack(weight.device, weight.dtype):
        return net
    memo = {id(p): p for p in net.parameters()}  # the copy shares the parameters
    packed = copy.deepcopy(net, memo)
    for module in list(packed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Packed(child))
    return packed
