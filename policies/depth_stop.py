"""Stop deepening a tree once little probability is left at its frontier: a rule that wraps any plan of several levels.

Dynamic depth (arXiv:2409.00142): the sum of the frontier's cumulative draft probabilities says how likely a further
level is to be reached; below `mass` no further forward is run. On a chain it is the confidence stop (the probability of
the whole chain so far). Probabilities are summed as integers, so that one position and many agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.errors import InputError
from workbench.tree import LOGP_STEPS_PER_NAT, PADDING, Expansion, Forest, Plan, Starts, Trees

_UNIT = 1 << 30  # probability 1
_STEPS = 22 * LOGP_STEPS_PER_NAT  # beyond it a probability rounds to 0
_PROB = np.round(np.exp(-np.arange(_STEPS) / LOGP_STEPS_PER_NAT) * _UNIT).astype(np.int64)


@dataclass(frozen=True)
class DepthStopPlan:
    """`inner`, grown only while the probabilities of the next starts add up to at least `mass`."""

    inner: Plan
    mass: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.mass <= 1e6:
            raise InputError(f"depth stop: mass must be a number from 0 on, not {self.mass!r}")

    @property
    def kind(self) -> str:
        """The inner plan's."""
        return self.inner.kind

    @property
    def budget(self) -> int:
        """The inner plan's."""
        return self.inner.budget

    @property
    def n_levels(self) -> int:
        """The inner plan's."""
        return self.inner.n_levels

    @property
    def width(self) -> int:
        """The inner plan's."""
        return self.inner.width

    @property
    def n_slots(self) -> int:
        """The inner plan's."""
        return self.inner.n_slots

    def seed(self, n_positions: int) -> Forest:
        """The inner plan's."""
        return self.inner.seed(n_positions)

    def starts(self, forest: Forest, level: int) -> Starts:
        """The inner plan's, none where they are too unlikely."""
        starts = self.inner.starts(forest, level)
        if level == 0:
            return starts
        is_real = starts.node >= 0
        rows = np.arange(len(starts.n))[:, None]
        cum = np.where(is_real, forest.cum[rows, np.where(is_real, starts.node, 0)], -_STEPS)
        left = _PROB[np.clip(-cum, 0, _STEPS - 1)].sum(axis=1, where=is_real & (cum > -_STEPS))
        is_over = left < round(self.mass * _UNIT)
        node = np.where(is_over[:, None], np.int32(PADDING), starts.node)
        return replace(starts, node=node, n=np.where(is_over, np.int32(0), starts.n))

    def attach(self, forest: Forest, starts: Starts, expansion: Expansion, level: int) -> None:
        """The inner plan's."""
        self.inner.attach(forest, starts, expansion, level)

    def finish(self, forest: Forest) -> Trees:
        """The inner plan's."""
        return self.inner.finish(forest)
