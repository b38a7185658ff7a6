"""What bandits remember of their arms: sums over the steps each was chosen for, by stream.

An arm's value is a ratio of sums, committed tokens ÷ modelled milliseconds; a mean of ratios would favour arms whose
steps vary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.policy import Feedback

Floats = NDArray[np.float64]


class ArmSums(NamedTuple):
    """Sums of B streams over A arms, [B, A] each."""

    n: Floats  # steps
    tokens: Floats
    ms: Floats


def no_sums(n_streams: int, n_arms: int) -> ArmSums:
    """Nothing chosen yet."""
    return ArmSums(*np.zeros((3, n_streams, n_arms)))


def with_step(sums: ArmSums, arm: NDArray[np.int64], feedback: Feedback) -> ArmSums:
    """The sums after one more step of every stream; changed in place."""
    at = np.arange(len(arm)), arm
    sums.n[at] += 1.0
    sums.tokens[at] += feedback.n_committed
    sums.ms[at] += feedback.ms
    return sums


def rates(tokens: Floats, ms: Floats) -> Floats:
    """Tokens per millisecond, infinite for an arm never chosen: every arm is tried once, in order."""
    return np.divide(tokens, ms, out=np.full(tokens.shape, np.inf), where=ms > 0)
