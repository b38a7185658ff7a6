"""EAGLE-3 (arXiv:2503.01840): one layer over [embedding ; stream], run once a tree level on its own recycled output.

The row of pair i sits at RoPE id i, its stream is `fc` of the target's features, and it predicts the token at i + 2. A
tree node of depth d has the stream its parent's row put out, before the final norm, its own token, and as RoPE id the
last pair's plus d; it sees all committed rows, its ancestors' rows and itself. A plan of L levels costs L forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from workbench.drafters.branching import BranchingDrafter
from workbench.drafters.nets import Attend


class Eagle3Drafter(BranchingDrafter):
    """Autoregressive drafting, one slot a block."""

    kind = "eagle3"
    n_slots = 1

    def _run(
        self, condition: Tensor, embed: Tensor, position: Tensor, attends: Sequence[Attend], is_first: bool
    ) -> Tensor:
        stream = self._fast.fc(condition) if is_first else condition
        return self._fast(stream[None], embed[None], position[None], attends[0])[0, :, None]

    def _positions(self, last: Any, n_ancestors: np.ndarray) -> np.ndarray:
        return last + n_ancestors
