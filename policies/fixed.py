"""One drafter under one plan, always."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.policy import Arm, Feedback, Observation


class NoState(NamedTuple):
    """Nothing to remember."""


@dataclass(frozen=True)
class Fixed:
    """A menu of one arm."""

    arm: Arm
    n_uniforms: int = 0

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The one arm."""
        return (self.arm,)

    def init(self, n_streams: int) -> NoState:
        """Nothing."""
        return NoState()

    def choose(self, state: NoState, obs: Observation) -> NDArray[np.int64]:
        """Always arm 0."""
        return np.zeros(len(obs.step), np.int64)

    def update(self, state: NoState, arm: NDArray[np.int64], feedback: Feedback) -> NoState:
        """Nothing is learned."""
        return state
