"""ε-greedy: the arm of the best rate so far, and a random one in a share ε of the steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.armsums import ArmSums, no_sums, rates, with_step
from workbench.policy import Arm, Feedback, Observation


@dataclass(frozen=True)
class EpsilonGreedy:
    """epsilon: share of steps whose arm is drawn evenly."""

    arms: tuple[Arm, ...]
    epsilon: float = 0.1
    n_uniforms: int = 2

    def init(self, n_streams: int) -> ArmSums:
        """Nothing chosen yet."""
        return no_sums(n_streams, len(self.arms))

    def choose(self, state: ArmSums, obs: Observation) -> NDArray[np.int64]:
        """The first draw says whether to explore, the second where."""
        best = rates(state.tokens, state.ms).argmax(axis=1)
        drawn = (obs.uniform[:, 1] * len(self.arms)).astype(np.int64)
        return np.where(obs.uniform[:, 0] < self.epsilon, drawn, best)

    def update(self, state: ArmSums, arm: NDArray[np.int64], feedback: Feedback) -> ArmSums:
        """Add the step to its arm."""
        return with_step(state, arm, feedback)
