"""Trees of rank paths chosen from a table of how often each rank is right: Medusa's greedy and Sequoia's programme.

Both take the probability that a path is accepted as the product of its nodes' (arXiv:2401.10774 §3.3; arXiv:2402.12374
§3.1), and the value of a tree as the sum over its nodes: the tokens it is expected to accept.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from workbench.errors import InputError
from workbench.tree import StaticPlan

Path = tuple[int, ...]


def expected_tokens(paths: tuple[Path, ...], by_slot: NDArray[np.float64]) -> float:
    """Sum over the nodes of the product of their path's probabilities by_slot [K, W]: P(rank r is right at slot k)."""
    return float(sum(np.prod([by_slot[k, r] for k, r in enumerate(path)]) for path in paths))


def medusa_tree(by_slot: NDArray[np.float64], budget: int) -> StaticPlan:
    """The `budget` likeliest nodes, taken best first; by_slot [K, W]. Ties: the shorter, then the smaller path.

    A node that is never right is not worth its place, so the tree may be smaller.
    """
    n_slots, width = by_slot.shape
    heap: list[tuple[float, int, Path]] = []

    def offer(path: Path, prob: float) -> None:
        if prob > 0:
            heapq.heappush(heap, (-prob, len(path), path))

    order = np.argsort(-by_slot, axis=1, kind="stable")  # ranks of each slot, likeliest first
    place = {(k, int(r)): i for k in range(n_slots) for i, r in enumerate(order[k])}
    offer((int(order[0, 0]),), float(by_slot[0, order[0, 0]]))
    paths: list[Path] = []
    while heap and len(paths) < budget:
        negative, depth, path = heapq.heappop(heap)
        paths.append(path)
        i = place[depth - 1, path[-1]] + 1
        if i < width:
            before = np.prod([by_slot[k, r] for k, r in enumerate(path[:-1])])
            offer((*path[:-1], int(order[depth - 1, i])), float(before * by_slot[depth - 1, order[depth - 1, i]]))
        if depth < n_slots:
            offer((*path, int(order[depth, 0])), -negative * float(by_slot[depth, order[depth, 0]]))
    if not paths:
        raise InputError("no candidate of this drafter was ever right, so there is no tree to choose")
    return StaticPlan(tuple(paths))


def sequoia_tree(by_rank: NDArray[np.float64], budget: int, max_depth: int) -> StaticPlan:
    """Sequoia's optimum: acceptance depends on the rank alone, by_rank [W]; depth at most max_depth."""
    best, split = _sequoia_tables(by_rank, budget, max_depth)
    n = int(np.argmax(best[max_depth, :, -1]))  # the smallest tree of the best value
    paths = tuple(_paths(split, max_depth, n, len(by_rank), ()))
    if not paths:
        raise InputError("no candidate of this drafter was ever right, so there is no tree to choose")
    return StaticPlan(paths)


def _sequoia_tables(
    by_rank: NDArray[np.float64], budget: int, max_depth: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """best[d, n, b]: most tokens expected below a node: n nodes, depth at most d, the first b ranks as children.

    split[d, n, b]: how many of the n stand at and below the child of rank b (0 = none).
    """
    width = len(by_rank)
    best = np.zeros((max_depth + 1, budget + 1, width + 1))
    split = np.zeros(best.shape, np.int64)
    for d in range(1, max_depth + 1):
        below = best[d - 1, :, width]  # [n]
        for b in range(1, width + 1):
            for n in range(budget + 1):
                m = np.arange(1, n + 1)
                options = np.concatenate(
                    [[best[d, n, b - 1]], best[d, n - m, b - 1] + by_rank[b - 1] * (1 + below[m - 1])]
                )
                split[d, n, b] = np.argmax(options)
                best[d, n, b] = options[split[d, n, b]]
    return best, split


def _paths(split: NDArray[np.int64], d: int, n: int, b: int, above: Path) -> list[Path]:
    """The nodes of the optimum of (d, n, b) under the path `above`."""
    if d == 0 or n == 0 or b == 0:
        return []
    m = int(split[d, n, b])
    here = [] if m == 0 else [(*above, b - 1), *_paths(split, d - 1, m - 1, split.shape[2] - 1, (*above, b - 1))]
    return _paths(split, d, n - m, b - 1, above) + here
