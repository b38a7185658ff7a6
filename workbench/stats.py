"""Bootstrap intervals over prompts, for any statistic of sums (tau and speedups are ratios of sums)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # sums [R, C] -> value [R]

_CHUNK_CELLS = 4_000_000  # resampled counts held at once, R * P


@dataclass(frozen=True)
class Interval:
    """A value with its percentile bootstrap interval; `low` and `high` are NaN where none can be computed."""

    value: float
    low: float
    high: float
    n: int  # resampled units (prompts)


def bootstrap(
    columns: NDArray[np.float64], statistic: Statistic, seed: int, n_resamples: int = 2000, level: float = 0.95
) -> Interval:
    """Percentile bootstrap over units: `columns` [P, C] are per-unit sums, resampled by whole rows.

    The same rows are drawn for every column, so a statistic of two policies' columns is a paired comparison.
    """
    columns = np.asarray(columns, np.float64)
    n_units = len(columns)
    value = float(statistic(columns.sum(axis=0, keepdims=True))[0]) if n_units else float("nan")
    if n_units < 2 or np.isnan(value):
        return Interval(value, float("nan"), float("nan"), n_units)
    draws = _resampled_statistic(columns, statistic, np.random.default_rng(seed), n_resamples)
    if np.isnan(draws).any():
        return Interval(value, float("nan"), float("nan"), n_units)
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(draws, [tail, 100.0 - tail])
    return Interval(value, float(low), float(high), n_units)


def _resampled_statistic(
    columns: NDArray[np.float64], statistic: Statistic, rng: np.random.Generator, n_resamples: int
) -> NDArray[np.float64]:
    """`statistic` of `n_resamples` resampled sums -> [R], in chunks of bounded memory."""
    n_units = len(columns)
    chunk = max(1, min(n_resamples, _CHUNK_CELLS // n_units))
    uniform = np.full(n_units, 1.0 / n_units)
    parts = []
    for first in range(0, n_resamples, chunk):
        counts = rng.multinomial(n_units, uniform, size=min(chunk, n_resamples - first))  # [R, P]
        parts.append(statistic(counts @ columns))
    return np.concatenate(parts)
