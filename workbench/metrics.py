"""The glossary's measures: one definition each, as a sentence (for tables and tooltips) and as a function of arrays.

A ratio is taken of sums; the functions of sums below also serve as the statistic of a bootstrap. Arrays are columns of
the steps table, R rows (steps) long. A value never measured is NaN, with its count beside it; it is never 0. Other code
bases mean other things by "acceptance length" and "acceptance rate", so every name here is tied to its sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
LOOP_NGRAM = 9  # tokens that must recur for text to count as a loop
N_TIERS = 4
TIER_BOUNDS = (1, 4, 10)  # last rank of tiers 0, 1, 2; beyond the last: tier 3


@dataclass(frozen=True)
class Definition:
    """What a measure is called on screen, its unit and its definition in one sentence.

    `sums` names the step quantities (STEP_QUANTITIES) whose ratio of sums it is, where it is one.
    """

    label: str
    unit: str
    sentence: str
    sums: tuple[str, ...] = ()


DEFINITIONS: dict[str, Definition] = {
    "tau": Definition(
        "τ",
        "tokens/step",
        "Acceptance length: committed tokens ÷ verifications, a ratio of sums over the walked steps, bonus included, "
        "position 0 (committed by prefill) excluded.",
        ("n_committed", "n_steps"),
    ),
    "tau_outside_loops": Definition(
        "τ outside loops", "tokens/step", "τ over the steps that do not start inside a loop (see loop share)."
    ),
    "position_average_tau": Definition(
        "position-average τ",
        "tokens/step",
        "Mean of what a step would commit over all positions of the text; real steps start only where the last one "
        "stopped, so this misleads and is shown for comparison only.",
    ),
    "accept_at_depth": Definition(
        "acceptance at depth",
        "",
        "P(accepted to depth d | accepted to depth d − 1), over the steps the cuts at stop ids and length left able to "
        "try depth d; empty at depths no tree reached.",
    ),
    "joint_accept_at_depth": Definition(
        "joint acceptance at depth",
        "",
        "P(accepted to depth d): the product of acceptance at depths 1 … d; without cut steps, the share of all steps "
        "that accepted at least d tokens.",
    ),
    "draft_efficiency": Definition(
        "draft efficiency",
        "",
        "Accepted drafted tokens ÷ verified nodes, root excluded.",
        ("n_accepted", "n_nodes"),
    ),
    "draft_share": Definition(
        "draft share",
        "",
        "Drafter milliseconds (growing the tree and refreshing its cache) ÷ step milliseconds.",
        ("drafter_ms", "step_ms"),
    ),
    "loop_share": Definition(
        "loop share",
        "",
        f"Share of steps that start inside a {LOOP_NGRAM}-gram repeated earlier in the same answer.",
        ("n_in_loop", "n_steps"),
    ),
    "tokens_per_s": Definition(
        "tokens/s",
        "1/s",
        "Committed tokens ÷ seconds of the steps; decode only, without prefill.",
        ("n_committed", "step_s"),
    ),
    "speedup": Definition(
        "speedup",
        "×",
        "Plain-decoding milliseconds per token ÷ milliseconds per committed token on the same prompts, decode only; "
        "modelled unless said measured.",
    ),
    "nodes_per_step": Definition(
        "nodes/step", "nodes", "Verified draft-tree nodes ÷ verifications, root excluded.", ("n_nodes", "n_steps")
    ),
    "forwards_per_step": Definition(
        "forwards/step", "forwards", "Drafter forwards ÷ verifications.", ("n_forwards", "n_steps")
    ),
    "tier_precision": Definition(
        "tier precision", "", "Of the slots predicted in a rank tier, the share whose true tier it was."
    ),
    "tier_recall": Definition("tier recall", "", "Of the slots truly in a rank tier, the share predicted so."),
    "tier_f1": Definition("tier F1", "", "Harmonic mean of a rank tier's precision and recall."),
}


def safe_divide(a: ArrayLike, b: ArrayLike) -> Floats:
    """a ÷ b element by element, NaN where b is 0 (or either is NaN)."""
    top, bottom = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom != 0)


def ratio(sums: Floats) -> Floats:
    """Column 0 ÷ column 1 of sums [R, 2]: tau and every other ratio of sums. NaN where undefined."""
    return safe_divide(sums[:, 0], sums[:, 1])


def ratio_difference(sums: Floats) -> Floats:
    """(column 0 ÷ 1) − (column 2 ÷ 3) of sums [R, 4]: one policy's ratio minus another's."""
    return ratio(sums[:, :2]) - ratio(sums[:, 2:])


def speedup(sums: Floats) -> Floats:
    """Speedup from sums [R, 4] of plain ms, plain tokens, ms, committed tokens."""
    return safe_divide(ratio(sums[:, :2]), ratio(sums[:, 2:]))


def tau(n_committed: ArrayLike) -> float:
    """Acceptance length of steps [R], one row a verification."""
    committed = np.asarray(n_committed, np.float64)
    return float(ratio(np.array([[committed.sum(), committed.size]]))[0])


def position_average_tau(n_committed_at: ArrayLike) -> float:
    """Mean over all positions [T] of what a step starting there would commit."""
    return tau(n_committed_at)


@dataclass(frozen=True)
class DepthAcceptance:
    """Acceptance by depth, entry d − 1 for depth d. A rate is NaN where its `n_tried` is 0."""

    conditional: Floats  # [D]
    joint: Floats  # [D]
    n_accepted: NDArray[np.int64]  # [D] steps that accepted at least d tokens
    n_tried: NDArray[np.int64]  # [D] steps that accepted d − 1 and could try depth d


def accept_at_depth(n_accepted: ArrayLike, has_bonus: ArrayLike, tree_depth: ArrayLike) -> DepthAcceptance:
    """Acceptance at depths 1 … D of steps [R]; D is the deepest node of any tree.

    A step without a bonus was cut right after its last accepted token: it says nothing about the next depth, so it
    leaves the denominator there. A depth no tree reached has no column; a depth nobody could try is NaN.
    """
    accepted, bonus = np.asarray(n_accepted, np.int64), np.asarray(has_bonus, bool)
    n_depths = max(0, int(np.max(tree_depth, initial=0)))
    at_least = _counts_at_least(accepted, n_depths)  # [D + 1], from depth 0 on
    n_cut = np.bincount(accepted[~bonus & (accepted < n_depths)], minlength=n_depths)[:n_depths]
    n_reached, n_tried = at_least[1:], at_least[:-1] - n_cut
    conditional = safe_divide(n_reached, n_tried)
    return DepthAcceptance(conditional, np.cumprod(conditional, dtype=np.float64), n_reached, n_tried)


def _counts_at_least(values: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """How many of the values (none negative) are at least 0, 1, ..., most: [most + 1]."""
    return np.bincount(np.minimum(values, most), minlength=most + 1)[::-1].cumsum()[::-1]


def loop_mask(tokens: ArrayLike, n: int = LOOP_NGRAM) -> NDArray[np.bool_]:
    """Which positions of one answer [L] lie inside an n-gram that occurred earlier in the same answer."""
    ids = np.asarray(tokens, np.int64)
    mask = np.zeros(len(ids), bool)
    if len(ids) <= n:
        return mask
    windows = np.lib.stride_tricks.sliding_window_view(ids, n)  # [L - n + 1, n]
    _, first, inverse = np.unique(windows, axis=0, return_index=True, return_inverse=True)
    is_repeat = first[inverse.reshape(-1)] < np.arange(len(windows))
    for offset in range(n):
        mask[offset : offset + len(windows)] |= is_repeat
    return mask


def tier_of_rank(rank: ArrayLike) -> NDArray[np.int64]:
    """Rank tier of ranks ≥ 1; rank 0 (none of the offered candidates) counts as beyond: tier 3."""
    ranks = np.asarray(rank, np.int64)
    return np.where(ranks == 0, N_TIERS - 1, np.searchsorted(TIER_BOUNDS, ranks, side="left"))


@dataclass(frozen=True)
class TierReading:
    """How well the rank head told tiers: `confusion[true, predicted]` counts and per-tier rates (NaN: never met)."""

    confusion: NDArray[np.int64]  # [4, 4]
    precision: Floats  # [4]
    recall: Floats  # [4]
    f1: Floats  # [4]


def tier_reading(tier: ArrayLike, rank: ArrayLike, n_offered: ArrayLike) -> TierReading:
    """Reading of the rank head over slots [Q] whose earlier slots all drafted the committed token.

    These are exactly the `slot_*` entries of the steps table. Slots without a predicted tier (-1) are left out, and so
    are all that offered fewer than ten candidates: rank 0 would not tell their tier, and the rest alone would flatter.
    """
    tiers, ranks = np.asarray(tier, np.int64), np.asarray(rank, np.int64)
    is_known = (tiers >= 0) & (np.asarray(n_offered) >= TIER_BOUNDS[-1])
    confusion = np.zeros((N_TIERS, N_TIERS), np.int64)
    np.add.at(confusion, (tier_of_rank(ranks[is_known]), tiers[is_known]), 1)
    return reading_of(confusion)


def reading_of(confusion: NDArray[np.int64]) -> TierReading:
    """Precision, recall and F1 per tier from `confusion[true, predicted]`."""
    hits = np.diag(confusion).astype(np.float64)
    precision = safe_divide(hits, confusion.sum(axis=0))
    recall = safe_divide(hits, confusion.sum(axis=1))
    f1 = safe_divide(2 * hits, confusion.sum(axis=0) + confusion.sum(axis=1))
    f1[np.isnan(precision) | np.isnan(recall)] = np.nan
    return TierReading(confusion, precision, recall, f1)
