"""Discounted UCB (Garivier & Moulines 2011, arXiv:0805.3415): UCB on sums that forget, for arms that drift."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.armsums import ArmSums, no_sums, with_step
from policies.ucb import upper_bounds
from workbench.policy import Arm, Feedback, Observation


@dataclass(frozen=True)
class DiscountedUcb:
    """discount: what every sum is multiplied by before a step is added; 1 is plain UCB."""

    arms: tuple[Arm, ...]
    c: float = 0.2
    discount: float = 0.99
    n_uniforms: int = 0

    def init(self, n_streams: int) -> ArmSums:
        """Nothing chosen yet."""
        return no_sums(n_streams, len(self.arms))

    def choose(self, state: ArmSums, obs: Observation) -> NDArray[np.int64]:
        """The largest upper bound of the discounted sums; of equal ones the first."""
        return upper_bounds(state, self.c).argmax(axis=1)

    def update(self, state: ArmSums, arm: NDArray[np.int64], feedback: Feedback) -> ArmSums:
        """Discount everything, then add the step."""
        for sums in state:
            sums *= self.discount
        return with_step(state, arm, feedback)
