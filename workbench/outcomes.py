"""What a step would do, for one plan at every position of a text: the outcome table. Numpy and numba, no torch.

Trees are grown by the plan itself (`tree.grow`), many rows at once; the only difference from live decoding is the
source of candidates, which looks them up (`source.TraceSource`). A start that was not recorded offers nothing. If it
survives the plan's own budget cut the row is *missed*: blocks under it might have brought accepted tokens into the
tree, and their nodes might have pushed others out.

Bounds of a missed row. What an unrecorded start leads to stands behind it in prune order (no node outranks its
ancestors), and so does whatever those nodes displace. So the nodes up to the best missing start are sure to be in the
true tree: the deepest of them on the text is the low bound, which is what a walk uses. The high bound is the deepest
node that the plan can reach, or the end of the text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from workbench.errors import InputError
from workbench.pools import DraftPools, Text
from workbench.source import Creators, TraceSource, kernel
from workbench.tree import Forest, Plan, Trees, check_plan, grow

CHUNK_ROWS = 512  # rows grown at once: their nodes then stay in the processor's cache
NO_LIMIT = np.iinfo(np.int64).max


@dataclass(frozen=True)
class OutcomeTable:
    """What a step of one plan would do at each of R rows, before the cuts at stop ids and length."""

    n_accepted: NDArray[np.int32]  # [R], drafted tokens on the text; the low bound where missed
    n_accepted_high: NDArray[np.int32]  # [R], equal to n_accepted unless missed
    is_missed: NDArray[np.bool_]  # [R]
    n_nodes: NDArray[np.int32]  # [R], without what was not recorded
    tree_depth: NDArray[np.int16]  # [R]
    n_starts: NDArray[np.int16]  # [R, M], starts at each of the plan's levels

    @property
    def n_rows(self) -> int:
        """R."""
        return len(self.n_accepted)

    @property
    def n_blocks(self) -> NDArray[np.int64]:
        """[R], levels that were expanded."""
        return np.count_nonzero(self.n_starts, axis=1)


def joined(tables: Sequence[OutcomeTable]) -> OutcomeTable:
    """Tables of one plan over consecutive rows as one."""
    return OutcomeTable(*(np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(OutcomeTable)))


@dataclass(frozen=True)
class Span:
    """Where the text goes on behind each of T rows: token[begin : begin + n]."""

    token: NDArray[np.int32]
    begin: NDArray[np.int64]  # [T]
    n: NDArray[np.int32]  # [T], tokens up to the end of the episode

    @classmethod
    def of(cls, text: Text) -> Span:
        """All rows of a text."""
        episode = text.row_episode()
        begin = np.arange(len(episode)) + episode + 1
        return cls(text.token, begin, (text.offset[1:][episode] - begin).astype(np.int32))

    def rows(self, rows: slice | NDArray[np.int64]) -> Span:
        """Some rows alone."""
        return Span(self.token, self.begin[rows], self.n[rows])


@kernel
def _accept_rows(
    nodes: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    n: np.ndarray,
    text: np.ndarray,
    begin: np.ndarray,
    n_wanted: np.ndarray,
    limit: np.ndarray,
    is_on: np.ndarray,
    n_accepted: np.ndarray,
    tree_depth: np.ndarray,
) -> None:
    """Depth of the deepest node on the text up to prune key `limit`, and of the deepest node at all, of every row.

    nodes: token, parent, depth, cum [T, N], parents first. is_on is scratch [N + 1]: whether a node's path is the text;
    the root's stands last, where index -1 finds it.
    """
    token, parent, depth, cum = nodes
    is_on[-1] = True
    for t in range(token.shape[0]):
        best, deepest = 0, 0
        for i in range(n[t]):
            d = depth[t, i]
            deepest = max(deepest, d)
            is_on[i] = is_on[parent[t, i]] and d <= n_wanted[t] and token[t, i] == text[begin[t] + d - 1]
            if is_on[i] and d > best and _prune_key(cum[t, i], d, i) <= limit[t]:
                best = d
        n_accepted[t], tree_depth[t] = best, deepest


@kernel
def _prune_key(cum: int, depth: int, i: int) -> int:
    """Prune order of tree nodes as one number, smaller is better; i is the index in the tree."""
    return -np.int64(cum) << 32 | np.int64(depth) << 20 | i  # type: ignore[return-value]


def outcome_table(plan: Plan, pools: DraftPools, span: Span, creators: Creators | None = None) -> OutcomeTable:
    """The outcomes of a plan at every row of the pools; `span` is where the text goes on behind each.

    Raises InputError where the pools cannot answer the plan at all: other rows, fewer slots or candidates a slot.
    """
    check_covered(plan, pools, span)
    whole = creators or Creators.of(pools)
    parts = [
        _chunk(plan, TraceSource(pools.rows(rows), whole.rows(rows)), span.rows(rows))
        for rows in row_chunks(pools.n_rows)
    ]
    return joined(parts) if parts else _empty(plan)


def row_chunks(n_rows: int) -> Iterator[slice]:
    """Slices of CHUNK_ROWS rows."""
    return (slice(first, min(first + CHUNK_ROWS, n_rows)) for first in range(0, n_rows, CHUNK_ROWS))


def check_covered(plan: Plan, pools: DraftPools, span: Span) -> None:
    """InputError unless the pools lie along the text and offer the plan's slots and candidates."""
    if pools.n_rows != len(span.n):
        raise InputError(f"the {pools.kind} pools have {pools.n_rows} rows, the text {len(span.n)}")
    check_plan(plan, pools.kind, pools.levels[0].expansion.token.shape[2])
    if plan.width > pools.width:
        raise InputError(
            f"the {plan.kind} plan looks at {plan.width} candidates a slot, the trace's {pools.kind} pools hold"
            f" {pools.width}"
        )


def grown(plan: Plan, source: TraceSource) -> tuple[Forest, Trees]:
    """Forests and finished trees of the source's rows."""
    forest = grow(plan, source.expand, source.pools.n_rows)
    return forest, plan.finish(forest)


def _chunk(plan: Plan, source: TraceSource, span: Span) -> OutcomeTable:
    forest, trees = grown(plan, source)
    n_rows = len(trees.n)
    limit = missing_limit(source, forest, trees)
    n_accepted, tree_depth = np.empty(n_rows, np.int32), np.empty(n_rows, np.int16)
    nodes = trees.token, trees.parent, trees.depth, trees.cum
    is_on = np.empty(trees.token.shape[1] + 1, np.bool_)
    _accept_rows(nodes, trees.n, span.token, span.begin, span.n, limit, is_on, n_accepted, tree_depth)
    is_missed = limit != NO_LIMIT
    high = np.where(is_missed, np.minimum(plan.n_levels * plan.n_slots, span.n), n_accepted).astype(np.int32)
    n_starts = np.zeros((n_rows, plan.n_levels), np.int16)
    for level, (starts, _) in enumerate(source.levels):
        n_starts[:, level] = starts.n
    return OutcomeTable(n_accepted, high, is_missed, trees.n, tree_depth, n_starts)


def missing_limit(source: TraceSource, forest: Forest, trees: Trees) -> NDArray[np.int64]:
    """Prune key [T] of each row's best unrecorded start that stands in its tree; NO_LIMIT where there is none."""
    limit = np.full(len(trees.n), NO_LIMIT)
    if source.missing:
        row, node = (np.concatenate(found) for found in zip(*source.missing))
        address = trees.level, trees.start, trees.slot, trees.rank
        assert forest.last is not None  # since the trees are finished
        survives = np.empty(len(row), np.bool_)
        _survivors(row, node, forest.nodes, forest.last, survives)
        row, node = row[survives], node[survives]
        _limit_rows(row, forest.nodes[row, node], address, trees.n, trees.cum, trees.depth, limit)
    return limit


@kernel
def _survivors(row: np.ndarray, node: np.ndarray, nodes: np.ndarray, last: np.ndarray, survives: np.ndarray) -> None:
    """Whether each forest node (row[q], node[q]) stands among those its plan keeps, up to prune key `last`."""
    for q in range(row.shape[0]):
        found = nodes[row[q], node[q]]
        survives[q] = _prune_key(found.cum, found.depth, node[q]) <= last[row[q]]


@kernel
def _limit_rows(
    row: np.ndarray,
    creator: np.ndarray,
    address: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    n: np.ndarray,
    cum: np.ndarray,
    depth: np.ndarray,
    limit: np.ndarray,
) -> None:
    """Lower limit[row[q]] to the prune key of the tree node made by creator[q], if there is one."""
    level, start, slot, rank = address
    for q in range(row.shape[0]):
        t, c = row[q], creator[q]
        for i in range(n[t]):
            is_level = level[t, i] == c.level and start[t, i] == c.start
            if is_level and slot[t, i] == c.slot and rank[t, i] == c.rank:
                limit[t] = min(limit[t], _prune_key(cum[t, i], depth[t, i], i))


def _empty(plan: Plan) -> OutcomeTable:
    none = np.zeros(0, np.int32)
    starts = np.zeros((0, plan.n_levels), np.int16)
    return OutcomeTable(none, none, none.astype(bool), none, none.astype(np.int16), starts)


@dataclass
class OutcomeCache:
    """Tables by (trace, drafter, plan), the oldest dropped beyond `n_most`."""

    n_most: int = 256
    _tables: dict[Hashable, OutcomeTable] = field(default_factory=dict)

    def table(self, trace_hash: str, plan: Plan, pools: DraftPools, span: Span) -> OutcomeTable:
        """The table, computed unless it is there."""
        key = trace_hash, pools.kind, plan
        found = self._tables.pop(key, None) or outcome_table(plan, pools, span)
        self._tables[key] = found  # the newest stands last
        while len(self._tables) > self.n_most:
            del self._tables[next(iter(self._tables))]
        return found
