"""Thompson sampling: draw each arm's rate from a normal posterior of the ratio of sums, take the best draw.

The spread of a ratio r = Σ tokens ÷ Σ ms over n steps is that of the residuals tokens − r · ms (delta method), with one
prior residual of the size of the mean tokens a step, so that an arm whose first steps agree stays uncertain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from workbench.policy import Arm, Feedback, Observation

Floats = NDArray[np.float64]


class Moments(NamedTuple):
    """Sums of B streams over A arms, [B, A] each."""

    n: Floats
    tokens: Floats
    ms: Floats
    tokens2: Floats
    tokens_ms: Floats
    ms2: Floats


def posterior(state: Moments) -> tuple[Floats, Floats]:
    """Mean and standard deviation of every arm's rate, [B, A]; meaningless where n is 0."""
    n, ms = np.maximum(state.n, 1.0), np.where(state.ms > 0, state.ms, 1.0)
    rate = state.tokens / ms
    residuals = state.tokens2 - 2.0 * rate * state.tokens_ms + rate**2 * state.ms2
    prior = (state.tokens / n) ** 2
    return rate, np.sqrt(np.maximum(residuals, 0.0) + prior) / ms


@dataclass(frozen=True)
class Thompson:
    """A menu sampled by plausibility. Every arm is tried once first."""

    arms: tuple[Arm, ...]

    @property
    def n_uniforms(self) -> int:
        """One draw an arm."""
        return len(self.arms)

    def init(self, n_streams: int) -> Moments:
        """Nothing chosen yet."""
        return Moments(*np.zeros((len(Moments._fields), n_streams, len(self.arms))))

    def choose(self, state: Moments, obs: Observation) -> NDArray[np.int64]:
        """The best draw; an arm never chosen comes first."""
        rate, spread = posterior(state)
        return np.where(state.n > 0, rate + spread * ndtri(obs.uniform), np.inf).argmax(axis=1)

    def update(self, state: Moments, arm: NDArray[np.int64], feedback: Feedback) -> Moments:
        """Add the step to its arm."""
        at, tokens, ms = (np.arange(len(arm)), arm), feedback.n_committed.astype(np.float64), feedback.ms
        values = (np.ones(len(arm)), tokens, ms, tokens**2, tokens * ms, ms**2)
        for sums, value in zip(state, values):
            sums[at] += value
        return state
