"""Which forwards a drafter runs in a step, as a function of what the step grows. No torch.

Live drafters note their forwards as they run; a replay, which runs none, computes the same list from the counts it has:
the pairs committed since the drafter last ran (they are run with its first forward) and the starts of every level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

N_CHUNK_ROWS = 1024  # most rows of a branching drafter's first forward


class StepForward(NamedTuple):
    """One forward: its kind, the rows it ran and the starts it grew."""

    kind: str
    n_rows: int
    n_starts: int


def step_forwards(drafter: str, n_slots: int, n_refreshed: int, n_starts: Sequence[int]) -> list[StepForward]:
    """The forwards of one step.

    n_refreshed: pairs committed since the drafter last ran. n_starts: starts of each level that was expanded.
    """
    if drafter == "lookup" or not n_starts:
        return []
    if drafter == "medusa":
        return [StepForward("first", 1, 1)]
    if drafter == "parallelspec":
        return [StepForward("first", n_refreshed + n_slots - 1, 1)]
    later = [StepForward("next", n * n_slots, n) for n in n_starts[1:]]
    return [*_first(n_slots, n_refreshed), *later]


def _first(n_slots: int, n_refreshed: int) -> list[StepForward]:
    """The refresh of a branching drafter, in chunks; the last of them offers candidates."""
    n_chunk = max(1, N_CHUNK_ROWS // n_slots)
    n_before = max(0, -(-n_refreshed // n_chunk) - 1)
    chunks = [StepForward("prompt", n_chunk * n_slots, 0)] * n_before
    return [*chunks, StepForward("first", (n_refreshed - n_before * n_chunk) * n_slots, 1)]


def forward_counts(
    drafter: str, n_slots: int, n_refreshed: NDArray[np.int64], n_levels: NDArray[np.int64], n_grown: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many forwards `step_forwards` lists and the rows of all of them, for R steps, [R] each.

    n_levels: levels expanded. n_grown: starts behind the first level.
    """
    if drafter == "lookup":
        return np.zeros_like(n_refreshed), np.zeros_like(n_refreshed)
    if drafter == "medusa":
        return np.ones_like(n_refreshed), np.ones_like(n_refreshed)
    if drafter == "parallelspec":
        return np.ones_like(n_refreshed), n_refreshed + (n_slots - 1)
    n_chunk = max(1, N_CHUNK_ROWS // n_slots)
    n_before = np.maximum(0, -(-n_refreshed // n_chunk) - 1)
    return n_before + n_levels, (n_refreshed + n_grown) * n_slots
