"""The hindsight oracle: the fewest steps any choice of arms could take. It sees the future, so it is no policy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.pools import Text
from workbench.source import kernel


@kernel
def _fewest(
    n_accepted: np.ndarray, first_row: np.ndarray, n_rows: np.ndarray, left: np.ndarray, out: np.ndarray
) -> None:
    """Steps of each episode, by the shortest way from its end: left[t] steps are left at position t."""
    for e in range(first_row.shape[0]):
        end = n_rows[e] + 1
        left[end] = 0
        for t in range(end - 1, 0, -1):
            best = left[t + 1]
            for a in range(n_accepted.shape[0]):
                best = min(best, left[min(t + n_accepted[a, first_row[e] + t - 1] + 1, end)])
            left[t] = best + 1
        out[e] = left[1] if end > 1 else 0


def fewest_steps(n_accepted: NDArray[np.int32], text: Text) -> NDArray[np.int64]:
    """[E], for arms whose outcome tables accept n_accepted [A, R]."""
    n_rows = np.diff(text.row_offset)
    out, left = np.zeros(text.n_episodes, np.int64), np.zeros(int(n_rows.max(initial=0)) + 2, np.int64)
    _fewest(n_accepted, text.row_offset[:-1], n_rows, left, out)
    return out
