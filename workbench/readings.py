"""Readings of recorded pools: which rank the text's token has at each slot, and whether draft probabilities hold.

Numpy and numba, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.outcomes import Span, check_covered, grown, row_chunks
from workbench.pools import DraftPools
from workbench.source import Creators, TraceSource, kernel
from workbench.tree import LOGP_STEPS_PER_NAT, Plan

N_BINS = 10  # of probability, equally wide
PROB_UNIT = 1 << 40  # probability 1 in sums, which are whole so that their order does not matter


@kernel
def _count_ranks(
    token: np.ndarray, text: np.ndarray, begin: np.ndarray, n_wanted: np.ndarray, counts: np.ndarray
) -> None:
    """counts[k, r] of rank r (1-based) of the token k places on, r = 0 where it is not among the candidates."""
    for t in range(token.shape[0]):
        for k in range(min(token.shape[2], n_wanted[t])):
            rank = 0
            for w in range(token.shape[3]):
                if token[t, 0, k, w] == text[begin[t] + k]:
                    rank = w + 1
                    break
            counts[k, rank] += 1


def rank_counts(pools: DraftPools, span: Span) -> NDArray[np.int64]:
    """How often the text's token had each rank at each slot of the first level, [K, W + 1]; column 0: not offered."""
    token = pools.levels[0].expansion.token
    counts = np.zeros((token.shape[2], token.shape[3] + 1), np.int64)
    _count_ranks(token, span.token, span.begin, span.n, counts)
    return counts


def rank_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """P(rank r is the text's token) at each slot, [K, W]; 0 at a slot nobody could try."""
    return counts[:, 1:] / np.maximum(counts.sum(axis=1, keepdims=True), 1)


@dataclass(frozen=True)
class Calibration:
    """Nodes of the verified trees by cumulative draft probability, in N_BINS bins of equal width."""

    n_nodes: NDArray[np.int64]  # [N_BINS]
    n_accepted: NDArray[np.int64]  # [N_BINS], nodes on the text
    prob_sum: NDArray[np.int64]  # [N_BINS], of their probabilities, in units of 1 / PROB_UNIT

    def __add__(self, other: Calibration) -> Calibration:
        return Calibration(
            self.n_nodes + other.n_nodes, self.n_accepted + other.n_accepted, self.prob_sum + other.prob_sum
        )


def no_calibration() -> Calibration:
    """Nothing counted."""
    return Calibration(*np.zeros((3, N_BINS), np.int64))


def calibration(plan: Plan, pools: DraftPools, span: Span, rows: NDArray[np.int64]) -> Calibration:
    """Draft probability against acceptance over the trees of the steps that start at `rows` [R].

    Nodes deeper than the recorded text goes are left out: nobody knows whether they would have been accepted.
    """
    check_covered(plan, pools, span)
    creators, found = Creators.of(pools), no_calibration()
    for chunk in row_chunks(len(rows)):
        chosen = rows[chunk]
        _, trees = grown(plan, TraceSource(pools.rows(chosen), creators.rows(chosen)))
        here = span.rows(chosen)
        nodes = trees.token, trees.parent, trees.depth, trees.cum
        is_on = np.empty(trees.token.shape[1] + 1, np.bool_)
        counted = (found.n_nodes, found.n_accepted, found.prob_sum)
        _count_nodes(nodes, trees.n, here.token, here.begin, here.n, is_on, counted)
    return found


@kernel
def _count_nodes(
    nodes: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    n: np.ndarray,
    text: np.ndarray,
    begin: np.ndarray,
    n_wanted: np.ndarray,
    is_on: np.ndarray,
    counted: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    token, parent, depth, cum = nodes
    n_nodes, n_accepted, prob_sum = counted
    is_on[-1] = True
    for t in range(token.shape[0]):
        for i in range(n[t]):
            d = depth[t, i]
            is_on[i] = is_on[parent[t, i]] and d <= n_wanted[t] and token[t, i] == text[begin[t] + d - 1]
            if d <= n_wanted[t]:
                prob = np.exp(cum[t, i] / LOGP_STEPS_PER_NAT)
                q = min(int(prob * N_BINS), N_BINS - 1)
                n_nodes[q] += 1
                n_accepted[q] += is_on[i]
                prob_sum[q] += int(prob * PROB_UNIT)
