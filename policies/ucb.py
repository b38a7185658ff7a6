"""UCB1 (Auer, Cesa-Bianchi & Fischer 2002): the best rate plus a bonus that falls with the arm's own pulls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.armsums import ArmSums, Floats, no_sums, rates, with_step
from workbench.policy import Arm, Feedback, Observation


def bonus(n: Floats, scale: Floats, c: float) -> Floats:
    """c · scale · √(2 ln N / n) of pulls n [B, A], N their sum over the arms; infinite where n is 0.

    `scale` [B] carries the unit: rewards are rates, not numbers in [0, 1].
    """
    total = np.maximum(n.sum(axis=1, keepdims=True), 1.0)
    spread = np.divide(2.0 * np.log(total), n, out=np.full(n.shape, np.inf), where=n > 0)
    return c * scale[:, None] * np.sqrt(spread)


def overall_rate(state: ArmSums) -> Floats:
    """Tokens per millisecond over all arms, [B]; 1 before the first step."""
    ms = state.ms.sum(axis=1)
    return np.divide(state.tokens.sum(axis=1), ms, out=np.ones(len(ms)), where=ms > 0)


def upper_bounds(state: ArmSums, c: float) -> Floats:
    """Rate plus bonus, [B, A]; infinite for an arm never chosen."""
    value = rates(state.tokens, state.ms)
    return np.where(state.n > 0, value + bonus(state.n, overall_rate(state), c), np.inf)


@dataclass(frozen=True)
class Ucb:
    """c: weight of the bonus, in units of the rate over all arms."""

    arms: tuple[Arm, ...]
    c: float = 0.2
    n_uniforms: int = 0

    def init(self, n_streams: int) -> ArmSums:
        """Nothing chosen yet."""
        return no_sums(n_streams, len(self.arms))

    def choose(self, state: ArmSums, obs: Observation) -> NDArray[np.int64]:
        """The largest upper bound; of equal ones the first."""
        return upper_bounds(state, self.c).argmax(axis=1)

    def update(self, state: ArmSums, arm: NDArray[np.int64], feedback: Feedback) -> ArmSums:
        """Add the step to its arm."""
        return with_step(state, arm, feedback)
