"""The slots a step tried along the text, for chosen rows of the pools: what the rank head and the ranks are read from.

The same slots as live decoding writes (`steps.path_slots`): those whose parent is the root or an accepted node, in
order of (depth, level, start, slot). The rows' trees are grown once more, so this is asked for rows that were walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.outcomes import Span, check_covered, grown, row_chunks
from workbench.pools import DraftPools
from workbench.source import Creators, TraceSource, kernel
from workbench.steps import PARALLEL_KINDS
from workbench.tree import Forest, Plan, Trees

FIELDS = ("depth", "level", "start", "slot", "tier", "rank", "offered", "width")
_DEPTH, _LEVEL, _START, _SLOT, _TIER, _RANK, _OFFERED, _WIDTH = range(len(FIELDS))


@dataclass(frozen=True)
class SlotTable:
    """Slots of R rows, one after another: row r has those from offset[r] to offset[r + 1]."""

    offset: NDArray[np.int64]  # [R + 1]
    values: NDArray[np.int16]  # [Q, 8], in order of FIELDS

    def column(self, name: str) -> NDArray[np.int16]:
        """One field of all slots, [Q]."""
        return self.values[:, FIELDS.index(name)]

    def row_of(self) -> NDArray[np.int64]:
        """Row of every slot, [Q]."""
        return np.repeat(np.arange(len(self.offset) - 1), np.diff(self.offset))

    def up_to(self, n_committed: NDArray[np.int32]) -> SlotTable:
        """The slots whose wanted token the step committed: depth at most n_committed [R] of their row."""
        is_kept = self.column("depth") <= n_committed[self.row_of()]
        n_kept = np.bincount(self.row_of()[is_kept], minlength=len(self.offset) - 1)
        return SlotTable(np.concatenate([[0], np.cumsum(n_kept)]), self.values[is_kept])


def joined_slots(tables: Sequence[SlotTable]) -> SlotTable:
    """Tables of consecutive rows as one."""
    counts = [np.diff(table.offset) for table in tables]
    return SlotTable(np.cumsum(np.concatenate([[0], *counts])), np.concatenate([table.values for table in tables]))


def slot_table(plan: Plan, pools: DraftPools, span: Span, rows: NDArray[np.int64]) -> SlotTable:
    """Slots of the steps that start at `rows` [R] of the pools, in that order, as far as the text goes."""
    check_covered(plan, pools, span)
    creators = Creators.of(pools)
    counts, parts = [np.zeros(1, np.int64)], [np.empty((0, len(FIELDS)), np.int16)]
    for chunk in row_chunks(len(rows)):
        chosen = rows[chunk]
        n, values = _chunk(plan, TraceSource(pools.rows(chosen), creators.rows(chosen)), span.rows(chosen))
        counts.append(n)
        parts.append(values)
    return SlotTable(np.cumsum(np.concatenate(counts)), np.concatenate(parts))


def _chunk(plan: Plan, source: TraceSource, span: Span) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
    """Slots of every row [T], and their values row by row."""
    forest, trees = grown(plan, source)
    n_rows, n_most = len(trees.n), trees.token.shape[1]
    path, n_path = np.empty((n_rows, n_most), np.int32), np.empty(n_rows, np.int32)
    scratch = np.empty((2, n_most), np.int32)
    _paths(trees.token, trees.parent, trees.n, span.token, span.begin, span.n, path, n_path, scratch)
    n_levels = 1 if plan.kind in PARALLEL_KINDS else len(source.levels)
    n_most = sum(starts.node.shape[1] for starts, _ in source.levels[:n_levels]) * plan.n_slots
    values, count = np.empty((n_rows, n_most, len(FIELDS)), np.int16), np.zeros(n_rows, np.int64)
    tree = trees.level, trees.start, trees.slot, trees.parent
    if plan.kind in PARALLEL_KINDS:
        _parallel_places(path, n_path, span.n, plan.n_slots, values, count)
    else:
        depth_of = _depths_on_path(forest, trees, path, n_path)
        for level in range(n_levels):
            starts = source.levels[level][0]
            _block_places(level, starts.node, starts.n, forest.spine[level], depth_of, span.n, values, count)
    _sort(values, count)
    for level in range(n_levels):
        e = source.levels[level][1]
        width = min(plan.width, e.token.shape[3])
        _read(level, e.token, e.tier, width, tree, trees.n, path, span.token, span.begin, values, count)
    return count, values[np.arange(n_most) < count[:, None]]


@kernel
def _paths(
    token: np.ndarray,
    parent: np.ndarray,
    n: np.ndarray,
    text: np.ndarray,
    begin: np.ndarray,
    n_wanted: np.ndarray,
    path: np.ndarray,
    n_path: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """The accepted path of every row, as `tree.accept` chooses it: of equal siblings all are followed."""
    for t in range(token.shape[0]):
        here, deeper = scratch[0], scratch[1]
        here[0], n_here, depth = -1, 1, 0
        tip = -1
        while n_here > 0 and depth < n_wanted[t]:
            n_deeper = 0
            for q in range(n_here):
                for i in range(here[q] + 1, n[t]):
                    if parent[t, i] == here[q] and token[t, i] == text[begin[t] + depth]:
                        deeper[n_deeper] = i
                        n_deeper += 1
            here, deeper, n_here = deeper, here, n_deeper
            if n_here > 0:
                tip = here[0]
                depth += 1
        n_path[t] = depth
        for d in range(depth - 1, -1, -1):
            path[t, d] = tip
            tip = parent[t, tip]


def _depths_on_path(forest: Forest, trees: Trees, path: np.ndarray, n_path: np.ndarray) -> NDArray[np.int16]:
    """Depth of every forest node on the accepted path, -1 for the others; int16 [T, P]."""
    depth_of = np.full(forest.nodes.shape, -1, np.int16)
    _mark_path(forest.nodes, forest.n, (trees.level, trees.start, trees.slot, trees.rank), path, n_path, depth_of)
    return depth_of


@kernel
def _mark_path(
    nodes: np.ndarray,
    n: np.ndarray,
    address: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    path: np.ndarray,
    n_path: np.ndarray,
    depth_of: np.ndarray,
) -> None:
    """Find the forest node of each path node by the candidate that created it."""
    level, start, slot, rank = address
    for t in range(nodes.shape[0]):
        for d in range(n_path[t]):
            j = path[t, d]
            for i in range(n[t]):
                node = nodes[t, i]
                is_level = node.level == level[t, j] and node.start == start[t, j]
                if is_level and node.slot == slot[t, j] and node.rank == rank[t, j]:
                    depth_of[t, i] = d + 1
                    break


@kernel
def _put(values: np.ndarray, count: np.ndarray, t: int, depth: int, level: int, start: int, slot: int) -> None:
    entry = values[t, count[t]]
    entry[_DEPTH], entry[_LEVEL], entry[_START], entry[_SLOT] = depth, level, start, slot
    entry[_TIER], entry[_RANK], entry[_OFFERED], entry[_WIDTH] = -1, 0, 0, 0
    count[t] += 1


@kernel
def _parallel_places(
    path: np.ndarray, n_path: np.ndarray, n_wanted: np.ndarray, n_slots: int, values: np.ndarray, count: np.ndarray
) -> None:
    """One level: slot k hangs under every node of depth k, as far as the path and the text go."""
    for t in range(path.shape[0]):
        for k in range(min(n_slots, n_path[t] + 1, n_wanted[t])):
            _put(values, count, t, k + 1, 0, 0, k)


@kernel
def _block_places(
    level: int,
    node: np.ndarray,
    n_starts: np.ndarray,
    spine: np.ndarray,
    depth_of: np.ndarray,
    n_wanted: np.ndarray,
    values: np.ndarray,
    count: np.ndarray,
) -> None:
    """Slot 0 hangs under its block's start, slot k under the rank-1 candidate of slot k - 1, after merging."""
    for t in range(node.shape[0]):
        for s in range(n_starts[t]):
            for k in range(spine.shape[2]):
                parent = node[t, s] if k == 0 else spine[t, s, k - 1]
                if parent < -1:
                    continue
                depth = 0 if parent == -1 else depth_of[t, parent]
                if 0 <= depth < n_wanted[t]:
                    _put(values, count, t, depth + 1, level, s, k)


@kernel
def _sort(values: np.ndarray, count: np.ndarray) -> None:
    """Order each row's slots by depth; they come in order of (level, start, slot)."""
    for t in range(values.shape[0]):
        for i in range(1, count[t]):
            j = i
            while j > 0 and values[t, j - 1, _DEPTH] > values[t, j, _DEPTH]:
                for f in range(values.shape[2]):
                    values[t, j - 1, f], values[t, j, f] = values[t, j, f], values[t, j - 1, f]
                j -= 1


@kernel
def _read(
    level: int,
    token: np.ndarray,
    tier: np.ndarray,
    width: int,
    tree: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    n: np.ndarray,
    path: np.ndarray,
    text: np.ndarray,
    begin: np.ndarray,
    values: np.ndarray,
    count: np.ndarray,
) -> None:
    """Tier, rank of the wanted token, candidates offered and candidates in the tree, of the slots of one level."""
    in_level, in_start, in_slot, parent = tree
    for t in range(values.shape[0]):
        for q in range(count[t]):
            entry = values[t, q]
            if entry[_LEVEL] != level:
                continue
            s, k, depth = entry[_START], entry[_SLOT], entry[_DEPTH]
            wanted, node = text[begin[t] + depth - 1], -1
            if depth > 1:
                node = path[t, depth - 2]
            entry[_TIER] = tier[t, s, k]
            for w in range(width):
                entry[_OFFERED] += token[t, s, k, w] >= 0
                if token[t, s, k, w] == wanted and entry[_RANK] == 0:
                    entry[_RANK] = w + 1
            for i in range(n[t]):
                is_here = parent[t, i] == node and in_level[t, i] == level
                entry[_WIDTH] += is_here and in_start[t, i] == s and in_slot[t, i] == k
