"""SpecBlock (arXiv:2605.07243): K dependent tokens a forward, blocks from any slot, a head that predicts ranks.

Slot k of pair i predicts the token at i + 2 + k and sits at RoPE id i + 1 + k, in every block of the branch. A later
block inherits the hidden state of the slot it starts at, reads the start's token, and sees the rows of all pairs before
the last, the slots its branch left visible in each ancestor block, and its own slots up to each. A plan of M blocks
costs M forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from workbench.drafters.base import TopLogits
from workbench.drafters.branching import BranchingDrafter
from workbench.drafters.nets import Attend


class SpecBlockDrafter(BranchingDrafter):
    """Block-iterative drafting."""

    kind = "specblock"

    def __init__(self, net: Any, *args: Any, **kwargs: Any) -> None:
        self.n_slots, self.has_tiers = net.config.n_slots, net.config.has_rank_head
        super().__init__(net, *args, **kwargs)

    def _run(
        self, condition: Tensor, embed: Tensor, position: Tensor, attends: Sequence[Attend], is_first: bool
    ) -> Tensor:
        return self._fast(condition[None], embed[None], position[None], attends, is_first)[0]

    def _positions(self, last: Any, n_ancestors: np.ndarray) -> np.ndarray:
        return np.broadcast_to(last, n_ancestors.shape)

    def _tiers(self, normed: Tensor, top: TopLogits) -> Tensor | None:
        return self.tier_scores(normed, top).argmax(-1) if self.has_tiers else None

    def tier_scores(self, normed: Tensor, top: TopLogits) -> Tensor:
        """The rank head's scores [..., 4]."""
        return self._fast.rank_logits(normed, top.logits)
