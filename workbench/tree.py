"""Draft trees: the plans that grow them, the walk that accepts a path, the cut that commits it.

A plan is data. Growing is level-synchronous over T positions at once: `plan.starts` says what to expand next, a source
(a drafter when live, a trace in replay) answers with an `Expansion`, `plan.attach` hangs its candidates into the
`Forest`, and `plan.finish` prunes to the budget. Live decoding calls all of this with T = 1.

Letters: T positions, S starts, K slots, W candidates a slot, P forest nodes, N tree nodes.

Prune order, everywhere: (-cumulative log-probability, depth, creation index). A child's cumulative log-probability is
never above its parent's and its depth is one more, so the first `budget` nodes in that order are closed under parents,
exact ties included. Budgets exclude the root.
Sources: SpecBlock arXiv:2605.07243, EAGLE-2 arXiv:2406.16858, Medusa arXiv:2401.10774.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from math import log
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numba import njit

from workbench.errors import InputError

_Function = TypeVar("_Function", bound=Callable[..., Any])

LOGP_STEPS_PER_NAT = 1024
ROOT = -1  # as a parent or a start: the root; in the address of a start: the root has no creator
PADDING = -2  # as a start or a spine node: none
N_TIERS = 4
GIVE_UP = 3  # the tier beyond rank 10


def logp_steps(prob: float) -> int:
    """A probability as steps of 1/1024 nat, rounded to nearest: 0.9 -> -108."""
    return round(log(prob) * LOGP_STEPS_PER_NAT)


# ------------------------------------------------------------------------------------------------ values


@dataclass(frozen=True)
class Expansion:
    """What a drafter offers at one level: for each start, K slots of at most W candidates, best first."""

    token: np.ndarray  # int32 [T, S, K, W], target-vocabulary ids; -1 = no candidate (then none after it either)
    logp: np.ndarray  # int16 [T, S, K, W], steps of 1/1024 nat, <= 0, falling along W
    tier: np.ndarray  # int8 [T, S, K], predicted rank tier 0..3; -1 = the drafter has no rank head


@dataclass(frozen=True)
class Starts:
    """What to expand next: T rows of S columns, the real starts first, then padding."""

    node: np.ndarray  # int32 [T, S], forest node the block hangs under; -1 = the root; -2 = padding
    token: np.ndarray  # int32 [T, S], that node's token; -1 for the root and padding
    level: np.ndarray  # int16 [T, S], with start, slot, rank: the candidate that created the node; -1 for root, padding
    start: np.ndarray  # int16 [T, S], column of that level's starts
    slot: np.ndarray  # int16 [T, S], 0-based
    rank: np.ndarray  # int16 [T, S], 1-based
    n: np.ndarray  # int32 [T], real starts of each row


@dataclass
class Forest:
    """Everything grown so far that can still survive the prune, T rows of P nodes in creation order.

    `spine[level]` is int32 [T, S, K]: the node of the rank-1 candidate at each slot, after merging; -2 = none.
    """

    nodes: np.ndarray  # _NODE [T, P]
    n: np.ndarray  # int32 [T], real nodes of each row
    pending: np.ndarray  # int32 [T, Q], nodes that start a block at the next level
    n_pending: np.ndarray  # int32 [T]
    spine: list[np.ndarray] = field(default_factory=list)
    last: np.ndarray | None = None  # int64 [T], prune key of the last node to keep; None = not known yet

    @property
    def token(self) -> np.ndarray:
        """int32 [T, P]."""
        return self.nodes["token"]

    @property
    def parent(self) -> np.ndarray:
        """int32 [T, P], -1 = the root."""
        return self.nodes["parent"]

    @property
    def depth(self) -> np.ndarray:
        """int16 [T, P], first drafted token 1."""
        return self.nodes["depth"]

    @property
    def cum(self) -> np.ndarray:
        """int32 [T, P], cumulative log-probability in steps of 1/1024 nat."""
        return self.nodes["cum"]

    @property
    def level(self) -> np.ndarray:
        """int16 [T, P], the level whose expansion created the node."""
        return self.nodes["level"]

    @property
    def start(self) -> np.ndarray:
        """int16 [T, P], the column of that level's starts."""
        return self.nodes["start"]

    @property
    def slot(self) -> np.ndarray:
        """int16 [T, P], 0-based."""
        return self.nodes["slot"]

    @property
    def rank(self) -> np.ndarray:
        """int16 [T, P], 1-based."""
        return self.nodes["rank"]


@dataclass(frozen=True)
class Trees:
    """Finished trees of T positions, parents before children, rows padded to N (token -1, parent -2, the rest 0)."""

    token: np.ndarray  # int32 [T, N]
    parent: np.ndarray  # int32 [T, N], -1 = the root
    depth: np.ndarray  # int32 [T, N]
    cum: np.ndarray  # int32 [T, N]
    level: np.ndarray  # int16 [T, N]
    start: np.ndarray  # int16 [T, N]
    slot: np.ndarray  # int16 [T, N]
    rank: np.ndarray  # int16 [T, N]
    n: np.ndarray  # int32 [T]


@dataclass(frozen=True)
class Tree:
    """The finished tree of one position, root excluded. No nodes at all is plain decoding."""

    token: np.ndarray  # int32 [N]
    parent: np.ndarray  # int32 [N], -1 = the root
    depth: np.ndarray  # int32 [N]
    cum: np.ndarray  # int32 [N]
    level: np.ndarray  # int16 [N]
    start: np.ndarray  # int16 [N]
    slot: np.ndarray  # int16 [N]
    rank: np.ndarray  # int16 [N]


@dataclass(frozen=True)
class Commit:
    """What one step adds to the text."""

    tokens: list[int]
    n_accepted: int  # accepted tokens kept, bonus excluded
    has_bonus: bool
    is_stopped: bool  # the last token is a stop id
    is_truncated: bool  # the room ran out before a stop id, and tokens were dropped


class Plan(Protocol):
    """How to grow a tree. Plans are frozen dataclasses: BlockPlan, BeamPlan, StaticPlan, ProductPlan."""

    @property
    def kind(self) -> str: ...
    @property
    def budget(self) -> int: ...
    @property
    def n_levels(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def n_slots(self) -> int: ...
    def seed(self, n_positions: int) -> Forest: ...
    def starts(self, forest: Forest, level: int) -> Starts: ...
    def attach(self, forest: Forest, starts: Starts, expansion: Expansion, level: int) -> None: ...
    def finish(self, forest: Forest) -> Trees: ...


def grow(plan: Plan, expand: Callable[[int, Starts, int], Expansion], n_positions: int = 1) -> Forest:
    """Grow T forests with `expand(level, starts, width)`, level by level, until no start is left."""
    forest = plan.seed(n_positions)
    for level in range(plan.n_levels):
        starts = plan.starts(forest, level)
        if not starts.n.any():
            break
        plan.attach(forest, starts, expand(level, starts, plan.width), level)
    return forest


# ------------------------------------------------------------------------------------------------ kernels: nodes

# One record a node, so that growing a position touches few cache lines. `head` and `next` link a node's children,
# newest first; `mark` holds _STARTED and _ASKED.
_NODE = np.dtype(
    [(name, np.int32) for name in ("token", "parent", "cum", "head", "next")]
    + [(name, np.int16) for name in ("depth", "level", "start", "slot", "rank", "mark")]
)
_WORDS = _NODE.itemsize // 8
_STARTED, _ASKED = 1, 2
_NEVER = np.iinfo(np.int64).max
_MOST_NODES, _MOST_DEPTH = 1 << 20, (1 << 12) - 1  # what a prune key can hold

# A tally counts nodes by bucket of cumulative log-probability (1/32 nat each, the last one open). Nodes in bucket
# tally[_CUT] or beyond are dead: at least `budget` nodes are strictly better. tally[_LIVE] counts the others.
_N_BUCKETS, _BUCKET_SHIFT = 512, 5
_CUT, _LIVE = _N_BUCKETS, _N_BUCKETS + 1


# Kernels allocate nothing, so they run without numba's reference counts (which cost more than the growing itself).
_kernel: Callable[[_Function], _Function] = njit(cache=True, _nrt=False)  # type: ignore[call-overload]
# Bodies that a call, passing dozens of words, would cost more than.
_inlined: Callable[[_Function], _Function] = njit(cache=True, _nrt=False, forceinline=True)  # type: ignore[call-overload]


class _Rows(NamedTuple):
    """The arrays of a forest that growing writes, and scratch."""

    nodes: np.ndarray  # _NODE [T, P]
    n: np.ndarray  # int32 [T]
    pending: np.ndarray  # int32 [T, Q]
    n_pending: np.ndarray  # int32 [T]
    last: np.ndarray  # int64 [T], prune key of the last node to keep
    tally: np.ndarray  # int32 [_N_BUCKETS + 2]
    keys: np.ndarray  # int64 [P]


@_inlined
def _bucket(cum: int) -> int:
    return min(max(-cum, 0) >> _BUCKET_SHIFT, _N_BUCKETS - 1)


@_inlined
def _key(row: np.ndarray, i: int) -> int:
    """Prune order as one integer, smaller is better."""
    return -np.int64(row[i].cum) << 32 | np.int64(row[i].depth) << 20 | i  # type: ignore[return-value]


@_kernel
def _clear(tally: np.ndarray) -> None:
    tally[:] = 0
    tally[_CUT] = _N_BUCKETS


@_inlined
def _count(tally: np.ndarray, cum: int, budget: int) -> None:
    """Count one more node; then lower the cut while `budget` nodes stay above it."""
    bucket = _bucket(cum)
    tally[bucket] += 1
    if bucket < tally[_CUT]:
        tally[_LIVE] += 1
        while tally[_LIVE] - tally[tally[_CUT] - 1] >= budget:
            tally[_CUT] -= 1
            tally[_LIVE] -= tally[tally[_CUT]]


@_kernel
def _kth_smallest(keys: np.ndarray, n: int, k: int) -> int:
    """The k-th smallest (1-based) of keys[:n], which it reorders (Hoare's selection)."""
    low, high = 0, n - 1
    while low < high:
        pivot = keys[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while keys[i] < pivot:
                i += 1
            while keys[j] > pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if k - 1 <= j:
            high = j
        elif k - 1 >= i:
            low = i
        else:
            break
    return keys[k - 1]


@_kernel
def _last_kept(row: np.ndarray, n: int, tally: np.ndarray, budget: int, keys: np.ndarray) -> int:
    """Prune key of the budget-th best of row[:n], all tallied; everything is kept where there are fewer."""
    if tally[_LIVE] < budget:
        return _NEVER
    edge = tally[_CUT] - 1
    m = 0
    for i in range(n):
        if _bucket(row[i].cum) == edge:
            keys[m] = _key(row, i)
            m += 1
    return _kth_smallest(keys, m, budget - (tally[_LIVE] - tally[edge]))


@_kernel
def _find_last(rows: _Rows, budget: int) -> None:
    """Prune key of the budget-th best node of every row."""
    for t in range(rows.nodes.shape[0]):
        _clear(rows.tally)
        for i in range(rows.n[t]):
            _count(rows.tally, rows.nodes[t, i].cum, budget)
        rows.last[t] = _last_kept(rows.nodes[t], rows.n[t], rows.tally, budget, rows.keys)


@_inlined
def _insert(
    row: np.ndarray, i: int, token: int, parent: int, cum: int, depth: int, level: int, start: int, slot: int, rank: int
) -> None:
    node = row[i]
    node.token, node.parent, node.cum, node.depth = token, parent, cum, depth
    node.level, node.start, node.slot, node.rank = level, start, slot, rank
    node.head, node.next, node.mark = -1, -1, 0
    if parent >= 0:
        node.next = row[parent].head
        row[parent].head = i


@_inlined
def _find(row: np.ndarray, i: int, token: int) -> int:
    """The node with this token in the list of siblings that begins at node i; -1 = none."""
    while i >= 0 and row[i].token != token:
        i = row[i].next
    return i


@_kernel
def _fill_starts(rows: _Rows, whole: np.ndarray, address: np.ndarray) -> None:
    """Node and token into whole [2, T, S]; level, start, slot, rank into address [4, T, S]."""
    for t in range(rows.nodes.shape[0]):
        for s in range(rows.n_pending[t]):
            i = rows.pending[t, s]
            node = rows.nodes[t, i]
            whole[0, t, s], whole[1, t, s] = i, node.token
            address[0, t, s], address[1, t, s] = node.level, node.start
            address[2, t, s], address[3, t, s] = node.slot, node.rank


@_kernel
def _prune(rows: _Rows, whole: np.ndarray, address: np.ndarray, n_kept: np.ndarray, place: np.ndarray) -> bool:
    """Keep the nodes up to prune key `last`, listed in creation order; True if they are closed under parents.

    Token, parent, depth, cum go into whole [4, T, N]; level, start, slot, rank into address [4, T, N]. `place` is
    scratch [P + 1]: the tree index of each forest node; the root's stands last, where index -1 finds it.
    """
    place[-1] = ROOT
    is_closed = True
    for t in range(rows.nodes.shape[0]):
        row, last, m = rows.nodes[t], rows.last[t], 0
        for i in range(rows.n[t]):
            if _key(row, i) > last:
                place[i] = PADDING
                continue
            node, up = row[i], place[row[i].parent]
            is_closed &= up != PADDING
            whole[0, t, m], whole[1, t, m], whole[2, t, m], whole[3, t, m] = node.token, up, node.depth, node.cum
            address[0, t, m], address[1, t, m] = node.level, node.start
            address[2, t, m], address[3, t, m] = node.slot, node.rank
            place[i] = m
            m += 1
        n_kept[t] = m
    return is_closed


# ------------------------------------------------------------------------------------------------ forest upkeep


def _seed(n_positions: int) -> Forest:
    def zeros() -> np.ndarray:
        return np.zeros(n_positions, np.int32)

    return Forest(np.empty((n_positions, 0), _NODE), zeros(), np.empty((n_positions, 0), np.int32), zeros())


def _reserve(forest: Forest, n_more: int) -> None:
    """Room for `n_more` nodes beyond the fullest row."""
    most = int(forest.n.max(initial=0))
    if most + n_more >= _MOST_NODES:
        raise InputError(f"the plan grows {most + n_more} nodes at one position; the most is {_MOST_NODES - 1}")
    nodes = np.empty((len(forest.n), most + n_more), _NODE)
    nodes.view(np.int64)[:, : most * _WORDS] = forest.nodes.view(np.int64)[:, : most * _WORDS]
    forest.nodes = nodes


def _rows(forest: Forest) -> _Rows:
    """What kernels take of a forest; `last` is allocated where it is not known."""
    last = np.empty(len(forest.n), np.int64) if forest.last is None else forest.last
    tally, keys = np.empty(_N_BUCKETS + 2, np.int32), np.empty(forest.nodes.shape[1], np.int64)
    return _Rows(forest.nodes, forest.n, forest.pending, forest.n_pending, last, tally, keys)


def _starts_of(forest: Forest, level: int) -> Starts:
    """The root at level 0, the pending nodes later."""
    n_rows = len(forest.n)
    n_starts = np.ones(n_rows, np.int32) if level == 0 else forest.n_pending.copy()
    shape = n_rows, int(n_starts.max(initial=0))
    whole, address = np.full((2, *shape), -1, np.int32), np.full((4, *shape), -1, np.int16)
    if level > 0:
        whole[0] = PADDING
        _fill_starts(_rows(forest), whole, address)
    return Starts(whole[0], whole[1], address[0], address[1], address[2], address[3], n_starts)


def _finish(forest: Forest, budget: int) -> Trees:
    """Prune every row to its first `budget` nodes in prune order (see the module docstring)."""
    shape = 4, len(forest.n), budget
    whole, address = np.zeros(shape, np.int32), np.zeros(shape, np.int16)
    whole[0], whole[1] = -1, PADDING
    n_kept, place = np.zeros(len(forest.n), np.int32), np.empty(forest.nodes.shape[1] + 1, np.int32)
    rows = _rows(forest)
    if forest.last is None:
        _find_last(rows, budget)
        forest.last = rows.last
    is_closed = _prune(rows, whole, address, n_kept, place)
    assert is_closed, "a pruned tree lost a parent: log-probabilities above 0 in an expansion"
    return Trees(whole[0], whole[1], whole[2], whole[3], address[0], address[1], address[2], address[3], n_kept)


def _checked(expansion: Expansion, starts: Starts, n_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The expansion's arrays, contiguous and of their types, after checks of shape."""
    token = np.ascontiguousarray(expansion.token, np.int32)
    logp = np.ascontiguousarray(expansion.logp, np.int16)
    tier = np.ascontiguousarray(expansion.tier, np.int8)
    shape = token.shape
    if logp.shape != shape or tier.shape != shape[:3] or starts.node.shape != shape[:2] or not token.size:
        raise InputError(f"an expansion of {starts.node.shape} starts has shapes {shape}, {logp.shape}, {tier.shape}")
    if token.shape[2] < n_slots:
        raise InputError(f"the plan uses {n_slots} slots, the drafter offers {token.shape[2]}")
    if not -1 <= int(tier.min()) <= int(tier.max()) < N_TIERS:
        raise InputError(f"a rank tier lies outside -1..{N_TIERS - 1}")
    if int(logp[..., :1].max(initial=0)) > 0:
        raise InputError("a log-probability lies above 0")
    return token, logp, tier


def _new_spine(starts: Starts, n_slots: int) -> np.ndarray:
    return np.full((*starts.node.shape, n_slots), PADDING, np.int32)


class _Growth:
    """What every plan does alike."""

    def seed(self, n_positions: int) -> Forest:
        """Empty forests of T positions."""
        return _seed(n_positions)

    def starts(self, forest: Forest, level: int) -> Starts:
        """The root at level 0, then what the level before left pending."""
        return _starts_of(forest, level)

    def finish(self: Plan, forest: Forest) -> Trees:
        """Prune to the budget."""
        return _finish(forest, self.budget)


def _need_int(owner: str, name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InputError(f"{owner}: {name} must be a whole number from {least} to {most}, not {value!r}")


def _need_bool(owner: str, name: str, value: object) -> None:
    if type(value) is not bool:
        raise InputError(f"{owner}: {name} must be true or false, not {value!r}")


_MOST = 10_000  # largest budget, cap or beam; far beyond use, it only catches slips
_MOST_WIDTH = 1_000


# ------------------------------------------------------------------------------------------------ block plan

_ROOT_TRIMS = ((logp_steps(0.9), 3), (logp_steps(0.8), 5), (logp_steps(0.6), 8))
_SLOT_TRIMS = ((logp_steps(0.95), 2), (logp_steps(0.85), 3))
_PLAIN = N_TIERS  # index of the plain width in the table of widths


class _Offers(NamedTuple):
    """One level's candidates, flat: block b = t * S + s of the T rows of S starts, slot j = b * K + k."""

    token: np.ndarray  # int32 [T * S * K, W]
    logp: np.ndarray  # int16 [T * S * K, W]
    tier: np.ndarray  # int8 [T * S * K]
    width: np.ndarray  # int16 [T * S * K], candidates to keep
    is_flagged: np.ndarray  # bool [T * S], give-up: the spine end does not hitch-hike


class _Rules(NamedTuple):
    """What the block kernels need of a plan at one level."""

    level: int
    n_slots: int
    n_drafted: int  # slots that the drafter offers, K
    budget: int
    root_width: int  # 0 beyond the first level
    cap: int  # most starts of the next level
    is_last: bool
    is_merging: bool
    is_lazy: bool
    is_simple: bool  # the last of at most two levels, see _grow_block
    has_trims: bool
    has_give_up: bool


@_kernel
def _trimmed(width: int, top: int, trims: tuple[tuple[int, int], ...]) -> int:
    """The width after the first trim whose threshold the top candidate's log-probability reaches."""
    for threshold, most in trims:
        if top >= threshold:
            return min(width, most)
    return width


@_inlined
def _block_widths(offers: _Offers, b: int, table: np.ndarray, rules: _Rules) -> int:
    """Fill in the widths and the flag of block b; returns the most nodes it can add."""
    is_sure, is_branching, gain = True, True, 0
    offers.is_flagged[b] = False
    for k in range(rules.n_slots):
        j = b * rules.n_drafted + k
        tier, top = offers.tier[j], offers.logp[j, 0]
        if is_sure and tier != 0:
            is_sure = False
            offers.is_flagged[b] = rules.has_give_up and tier == GIVE_UP
        if k == 0 and rules.root_width > 0:
            width = _trimmed(rules.root_width, top, _ROOT_TRIMS) if rules.has_trims else rules.root_width
        else:
            is_branching &= not (rules.has_give_up and tier == GIVE_UP and table[GIVE_UP] == 0)
            width = max(table[_PLAIN if tier < 0 else tier], 1) if is_branching else 1
            width = _trimmed(width, top, _SLOT_TRIMS) if rules.has_trims else width
        offers.width[j] = width
        gain += width
    return gain


@_kernel
def _level_widths(offers: _Offers, n_columns: int, n_starts: np.ndarray, table: np.ndarray, rules: _Rules) -> int:
    """Widths and flags of one level; returns the most nodes that a row can gain."""
    most = 0
    for t in range(n_starts.shape[0]):
        gain = 0
        for s in range(n_starts[t]):
            gain += _block_widths(offers, t * n_columns + s, table, rules)
        most = max(most, gain)
    return most


class _Row(NamedTuple):
    """One row of _Rows."""

    nodes: np.ndarray  # _NODE [P]
    pending: np.ndarray  # int32 [Q]
    tally: np.ndarray  # int32 [_N_BUCKETS + 2]


@_inlined
def _ask(row: _Row, i: int, n_pending: int) -> int:
    """List node i as a start of the next level, unless it is listed or has started a block."""
    if row.nodes[i].mark == 0:
        row.nodes[i].mark = _ASKED
        row.pending[n_pending] = i
        n_pending += 1
    return n_pending


@_inlined
def _is_dead(row: _Row, cum: int, rules: _Rules) -> bool:
    """Whether a node of this cumulative log-probability is sure to be pruned."""
    return rules.is_lazy and _bucket(cum) >= row.tally[_CUT]


@_inlined
def _grow_slot(
    row: _Row,
    n: int,
    n_pending: int,
    parent: int,
    start: int,
    k: int,
    offers: _Offers,
    rules: _Rules,
    keeps_dead: bool,
    j: int,
) -> tuple[int, int, int]:
    """Hang the candidates of slot j under `parent`; returns n, n_pending and the rank-1 node (-2 = none).

    A dead candidate is dropped, unless `keeps_dead`: a later equal candidate may have to merge into it.
    """
    base, depth, siblings = 0, 1, -1
    if parent >= 0:
        base, depth = row.nodes[parent].cum, row.nodes[parent].depth + 1
        siblings = row.nodes[parent].head if rules.is_merging else -1
    top, width = PADDING, offers.width[j]
    for r in range(min(width, offers.token.shape[1])):
        token, cum = offers.token[j, r], base + offers.logp[j, r]
        if token < 0:
            break
        node = _find(row.nodes, siblings, token)
        if node < 0:
            if not keeps_dead and _is_dead(row, cum, rules):
                break
            node = n
            n += 1
            _insert(row.nodes, node, token, parent, cum, depth, rules.level, start, k, r + 1)
            _count(row.tally, cum, rules.budget)
        if r == 0:
            top = node
        if width > 1 and not rules.is_last:
            n_pending = _ask(row, node, n_pending)
    return n, n_pending, top


@_inlined
def _grow_block(
    row: _Row,
    n: int,
    n_pending: int,
    parent: int,
    start: int,
    offers: _Offers,
    rules: _Rules,
    b: int,
    spine: np.ndarray,
) -> tuple[int, int]:
    """Block b under `parent`, slot by slot along its spine, up to a dead or missing spine node.

    Dead candidates are kept where a later block can meet them. With two levels at most, starts come ancestors first,
    so a later block reaches children of this one only where this spine has merged into a node of the first level.
    """
    n_before = n
    keeps_dead = rules.is_merging and not rules.is_simple
    for k in range(rules.n_slots):
        if parent >= 0:
            if _is_dead(row, row.nodes[parent].cum, rules):
                return n, n_pending
            keeps_dead |= rules.is_merging and 0 < k and parent < n_before
        j = b * rules.n_drafted + k
        n, n_pending, parent = _grow_slot(row, n, n_pending, parent, start, k, offers, rules, keeps_dead, j)
        spine[j] = parent
        if parent < 0:
            return n, n_pending
    if not offers.is_flagged[b] and not rules.is_last:
        n_pending = _ask(row, parent, n_pending)
    return n, n_pending


@_kernel
def _keep_pending(row: np.ndarray, pending: np.ndarray, n_pending: int, last: int, cap: int, keys: np.ndarray) -> int:
    """Drop starts beyond prune key `last`, then all but the `cap` best; the order stays. Returns how many are kept."""
    m = 0
    for q in range(n_pending):
        i = pending[q]
        row[i].mark = 0
        if _key(row, i) <= last:
            pending[m] = i
            m += 1
    if m <= cap:
        return m
    for q in range(m):
        keys[q] = _key(row, pending[q])
    last = _kth_smallest(keys, m, cap)
    kept = 0
    for q in range(m):
        if _key(row, pending[q]) <= last:
            pending[kept] = pending[q]
            kept += 1
    return kept


@_kernel
def _grow_blocks(
    rows: _Rows, starts: np.ndarray, n_starts: np.ndarray, offers: _Offers, rules: _Rules, spine: np.ndarray
) -> None:
    """Every block of one level at every position, then the prune key of the last kept node, and the next starts."""
    for t in range(starts.shape[0]):
        row, m, p = _Row(rows.nodes[t], rows.pending[t], rows.tally), rows.n[t], 0
        _clear(row.tally)
        for i in range(m):
            _count(row.tally, row.nodes[i].cum, rules.budget)
        for s in range(n_starts[t]):
            if starts[t, s] >= 0:
                row.nodes[starts[t, s]].mark = _STARTED
        for s in range(n_starts[t]):
            m, p = _grow_block(row, m, p, starts[t, s], s, offers, rules, t * starts.shape[1] + s, spine)
        last = _last_kept(row.nodes, m, row.tally, rules.budget, rows.keys)
        rows.n[t], rows.last[t] = m, last
        if not rules.is_last:
            last = last if rules.is_lazy else _NEVER
            rows.n_pending[t] = _keep_pending(row.nodes, row.pending, p, last, rules.cap, rows.keys)


@dataclass(frozen=True)
class BlockPlan(_Growth):
    """SpecBlock's tree (arXiv:2605.07243): blocks of K dependent slots, each hung under a node of an earlier block.

    A block inserts its spine (rank-1 chain) and, at each slot, siblings up to the slot's width (the top one counts).
    Slot 0 of the first block has `root_width`, any other slot `tier_widths[tier]`, or `plain_width` where the drafter
    has no rank head. A tier-3 slot with tier_widths[3] = 0 gives up: no siblings there or later in the block.
    Starts of the next level: the spine node and the siblings of every slot wider than 1, and the spine end (the hitch-
    hike) unless the block is flagged give-up (its first slot of a tier other than 0 is tier 3), in order (start of the
    parent block, slot, rank). `first_start_cap` keeps only that many best for level 1, `start_cap` for levels 2 on.

    Merging: equal (parent, token) is one node with its first creator's log-probability, level, start, slot and rank; a
    later candidate still makes it a start if its own slot asks for that. A node starts at most one block.

    The lazy cut changes no tree. A node's prune key never changes once it exists, and growth only adds nodes. So a node
    with `budget` nodes before it in prune order keeps them before it and is pruned; its descendants come after it, and
    are pruned too. A block under it adds descendants of it only, merges only into descendants of it, and so can neither
    add to nor start a block under a node that survives. Hence such a node is not started, and (unless a later candidate
    may have to merge into it) not even stored. Nor does it change which starts a cap keeps: the cut ones come last.
    With is_lazy off everything is grown, as a check; drafting then costs more starts for the same trees.
    """

    kind: ClassVar[str] = "block"
    n_slots: int = 4
    root_width: int = 10
    tier_widths: tuple[int, int, int, int] = (2, 4, 10, 0)
    n_blocks: int = 2
    budget: int = 60
    plain_width: int = 2
    has_trims: bool = False  # the release's probability trims: root .9/.8/.6 -> 3/5/8, other slots .95/.85 -> 2/3
    is_merging: bool = True
    has_give_up: bool = True  # off in chains: tier 3 then neither ends branching nor forbids the hitch-hike
    start_cap: int | None = 10
    first_start_cap: int | None = None
    is_lazy: bool = True

    def __post_init__(self) -> None:
        _need_int("block plan", "n_slots", self.n_slots, 1, 127)
        _need_int("block plan", "root_width", self.root_width, 1, _MOST_WIDTH)
        _need_int("block plan", "n_blocks", self.n_blocks, 1, _MOST_DEPTH // self.n_slots)
        _need_int("block plan", "budget", self.budget, 1, _MOST)
        _need_int("block plan", "plain_width", self.plain_width, 0, _MOST_WIDTH)
        if type(self.tier_widths) is not tuple or len(self.tier_widths) != N_TIERS:
            raise InputError(f"block plan: tier_widths must be {N_TIERS} widths, not {self.tier_widths!r}")
        for width in self.tier_widths:
            _need_int("block plan", "tier_widths", width, 0, _MOST_WIDTH)
        for name in ("has_trims", "is_merging", "has_give_up", "is_lazy"):
            _need_bool("block plan", name, getattr(self, name))
        for name in ("start_cap", "first_start_cap"):
            if getattr(self, name) is not None:
                _need_int("block plan", name, getattr(self, name), 1, _MOST)

    @property
    def n_levels(self) -> int:
        """Drafter forwards at most: one a block level."""
        return self.n_blocks

    @property
    def width(self) -> int:
        """Most candidates asked of a slot."""
        return max(1, self.root_width, self.plain_width, *self.tier_widths)

    def _rules(self, level: int, n_drafted: int) -> _Rules:
        cap = self.first_start_cap if level == 0 else self.start_cap
        return _Rules(
            level=level,
            n_slots=self.n_slots,
            n_drafted=n_drafted,
            budget=self.budget,
            root_width=self.root_width if level == 0 else 0,
            cap=_MOST_NODES if cap is None else cap,
            is_last=level == self.n_levels - 1,
            is_merging=self.is_merging,
            is_lazy=self.is_lazy,
            is_simple=level == self.n_levels - 1 <= 1,
            has_trims=self.has_trims,
            has_give_up=self.has_give_up,
        )

    def attach(self, forest: Forest, starts: Starts, expansion: Expansion, level: int) -> None:
        """Hang one level of blocks; raises InputError where the expansion does not fit."""
        token, logp, tier = _checked(expansion, starts, self.n_slots)
        n_rows, n_columns, n_drafted, n_offered = token.shape
        rules, shape = self._rules(level, n_drafted), (tier.size, n_offered)
        width, is_flagged = np.empty(tier.size, np.int16), np.empty(n_rows * n_columns, np.bool_)
        offers = _Offers(token.reshape(shape), logp.reshape(shape), tier.reshape(-1), width, is_flagged)
        table = np.array([*self.tier_widths, self.plain_width], np.int32)
        n_more = _level_widths(offers, n_columns, starts.n, table, rules)
        _reserve(forest, n_more)
        forest.pending = np.empty((n_rows, 0 if rules.is_last else n_more), np.int32)
        forest.n_pending = np.zeros(n_rows, np.int32)
        forest.last = np.empty(n_rows, np.int64)
        spine = np.full(tier.size, PADDING, np.int32)
        _grow_blocks(_rows(forest), starts.node, starts.n, offers, rules, spine)
        forest.spine.append(spine.reshape(tier.shape)[:, :, : self.n_slots])


# ------------------------------------------------------------------------------------------------ beam plan


@_kernel
def _grow_beams(
    rows: _Rows,
    starts: np.ndarray,
    n_starts: np.ndarray,
    token: np.ndarray,
    logp: np.ndarray,
    level: int,
    top_k: int,
    spine: np.ndarray,
) -> None:
    """Hang top_k children under every start, then make the top_k best of them (ties: the older) the next starts."""
    keys = rows.keys[:top_k]
    for t in range(starts.shape[0]):
        row, m, n_best = rows.nodes[t], rows.n[t], 0
        for s in range(n_starts[t]):
            parent = starts[t, s]
            base, depth = 0, 1
            if parent >= 0:
                base, depth = row[parent].cum, row[parent].depth + 1
            for r in range(min(top_k, token.shape[3])):
                if token[t, s, 0, r] < 0:
                    break
                _insert(row, m, token[t, s, 0, r], parent, base + logp[t, s, 0, r], depth, level, s, 0, r + 1)
                if r == 0:
                    spine[t, s, 0] = m
                n_best = _place(keys, rows.pending[t], n_best, _key(row, m), m)
                m += 1
        rows.n[t], rows.n_pending[t] = m, n_best


@_kernel
def _place(keys: np.ndarray, pending: np.ndarray, n_best: int, key: int, i: int) -> int:
    """Put node i at its place among the best so far, in ascending order of keys; returns how many there are."""
    if n_best == keys.shape[0]:
        if key > keys[n_best - 1]:
            return n_best
        n_best -= 1
    q = n_best
    while q > 0 and keys[q - 1] > key:
        keys[q], pending[q] = keys[q - 1], pending[q - 1]
        q -= 1
    keys[q], pending[q] = key, i
    return n_best + 1


@dataclass(frozen=True)
class BeamPlan(_Growth):
    """EAGLE-2/3's dynamic tree (arXiv:2406.16858): a beam of top_k, then the best `budget` of the whole pool.

    Level 0 gives top_k children of the root; `depth` further levels each expand the top_k best candidates of the level
    before (best first; ties: the older first) by top_k children. Pool: top_k + depth * top_k^2; deepest node depth + 1.
    """

    kind: ClassVar[str] = "beam"
    depth: int = 7
    top_k: int = 10
    budget: int = 60

    def __post_init__(self) -> None:
        _need_int("beam plan", "depth", self.depth, 0, _MOST_DEPTH - 1)
        _need_int("beam plan", "top_k", self.top_k, 1, _MOST_WIDTH)
        _need_int("beam plan", "budget", self.budget, 1, _MOST)

    @property
    def n_levels(self) -> int:
        """Drafter forwards at most: depth + 1."""
        return self.depth + 1

    @property
    def width(self) -> int:
        """Most candidates asked of a slot."""
        return self.top_k

    @property
    def n_slots(self) -> int:
        """One slot an expansion."""
        return 1

    def attach(self, forest: Forest, starts: Starts, expansion: Expansion, level: int) -> None:
        """Hang one level of children; raises InputError where the expansion does not fit."""
        token, logp, _ = _checked(expansion, starts, 1)
        _reserve(forest, starts.node.shape[1] * self.top_k)
        forest.pending = np.empty((len(forest.n), self.top_k), np.int32)
        forest.spine.append(_new_spine(starts, 1))
        _grow_beams(_rows(forest), starts.node, starts.n, token, logp, level, self.top_k, forest.spine[-1])


# ------------------------------------------------------------------------------------------------ one-level plans


@_kernel
def _grow_static(
    nodes: np.ndarray,
    n: np.ndarray,
    token: np.ndarray,
    logp: np.ndarray,
    parents: np.ndarray,
    slots: np.ndarray,
    ranks: np.ndarray,
    spine: np.ndarray,
    place: np.ndarray,
) -> None:
    """The listed nodes of every position whose candidates exist. `place` is scratch: the forest node of each path."""
    place[-1] = ROOT
    for t in range(nodes.shape[0]):
        row = nodes[t]
        for j in range(parents.shape[0]):
            k, r, parent = slots[j], ranks[j], place[parents[j]]
            place[j] = PADDING
            if parent == PADDING or r >= token.shape[3] or token[t, 0, k, r] < 0:
                continue
            i = n[t]
            n[t] += 1
            place[j] = i
            base = row[parent].cum if parent >= 0 else 0
            _insert(row, i, token[t, 0, k, r], parent, base + logp[t, 0, k, r], k + 1, 0, 0, k, r + 1)
            if r == 0 and (k == 0 or spine[t, 0, k - 1] == parent):
                spine[t, 0, k] = i


@dataclass(frozen=True)
class StaticPlan(_Growth):
    """Medusa's tree (arXiv:2401.10774): fixed paths of 0-based ranks on the K slots of one level.

    Path (a, b, c) is the a-th best of slot 0, the b-th of slot 1, the c-th of slot 2. The set must hold every prefix of
    its paths (InputError); it is kept sorted by (length, path), which is the creation order. A node whose candidate is
    missing is absent, with its descendants.
    """

    kind: ClassVar[str] = "static"
    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        paths = tuple(sorted((tuple(path) for path in self.paths), key=lambda path: (len(path), path)))
        object.__setattr__(self, "paths", paths)
        known = set(paths) | {()}
        _need_int("static plan", "number of paths", len(paths), 1, _MOST)
        if len(known) != len(paths) + 1:
            raise InputError("static plan: a path is empty or stands twice")
        for path in paths:
            for rank in path:
                _need_int("static plan", f"rank in path {path}", rank, 0, _MOST_WIDTH - 1)
            if path[:-1] not in known:
                raise InputError(f"static plan: path {path} is listed without its prefix {path[:-1]}")
        _need_int("static plan", "longest path", self.n_slots, 1, _MOST_DEPTH)

    @property
    def budget(self) -> int:
        """One node a path."""
        return len(self.paths)

    @property
    def n_levels(self) -> int:
        """One drafter forward."""
        return 1

    @property
    def width(self) -> int:
        """Highest rank used, counted from 1."""
        return 1 + max(max(path) for path in self.paths)

    @property
    def n_slots(self) -> int:
        """Length of the longest path."""
        return max(len(path) for path in self.paths)

    def attach(self, forest: Forest, starts: Starts, expansion: Expansion, level: int) -> None:
        """Place the paths; raises InputError where the expansion does not fit."""
        token, logp, _ = _checked(expansion, starts, self.n_slots)
        index = {path: j for j, path in enumerate(self.paths)} | {(): ROOT}
        parents = np.array([index[path[:-1]] for path in self.paths], np.int32)
        slots = np.array([len(path) - 1 for path in self.paths], np.int32)
        ranks = np.array([path[-1] for path in self.paths], np.int32)
        _reserve(forest, len(self.paths))
        forest.spine.append(_new_spine(starts, self.n_slots))
        place = np.empty(len(self.paths) + 1, np.int32)
        _grow_static(forest.nodes, forest.n, token, logp, parents, slots, ranks, forest.spine[-1], place)


_OPEN = np.dtype(
    [("cum", np.int64), ("code", np.int64), ("parent", np.int32), ("slot", np.int32), ("rank", np.int32)], align=True
)


@_kernel
def _grow_product(
    nodes: np.ndarray,
    n: np.ndarray,
    token: np.ndarray,
    logp: np.ndarray,
    n_slots: int,
    width: int,
    spine: np.ndarray,
    line: np.ndarray,
) -> None:
    """Best first: take the best open node, then open its next sibling (in its place) and its first child.

    Both come after it in the order. `line` is scratch _OPEN [budget + 1], the open nodes; `code` reads a node's path of
    ranks as a number, so that equal cumulative and depth fall by path.
    """
    for t in range(nodes.shape[0]):
        row, n_open = nodes[t], 0
        if token[t, 0, 0, 0] >= 0:
            n_open = _open(line, 0, logp[t, 0, 0, 0], 0, ROOT, 0, 0)
        while n_open > 0 and n[t] < line.shape[0] - 1:
            q, i = _best_open(line, n_open), n[t]
            cum, code, k, r = line[q].cum, line[q].code, line[q].slot, line[q].rank
            n[t] += 1
            _insert(row, i, token[t, 0, k, r], line[q].parent, cum, k + 1, 0, 0, k, r + 1)
            if code == 0:
                spine[t, 0, k] = i
            if r + 1 < width and token[t, 0, k, r + 1] >= 0:
                line[q].cum, line[q].code, line[q].rank = cum - logp[t, 0, k, r] + logp[t, 0, k, r + 1], code + 1, r + 1
            else:
                n_open -= 1
                line[q] = line[n_open]
            if k + 1 < n_slots and token[t, 0, k + 1, 0] >= 0:
                n_open = _open(line, n_open, cum + logp[t, 0, k + 1, 0], code * width, i, k + 1, 0)


@_kernel
def _open(line: np.ndarray, q: int, cum: int, code: int, parent: int, slot: int, rank: int) -> int:
    """Put an open node at q; returns q + 1."""
    node = line[q]
    node.cum, node.code, node.parent, node.slot, node.rank = cum, code, parent, slot, rank
    return q + 1


@_kernel
def _best_open(line: np.ndarray, n_open: int) -> int:
    """Index of the first of the open nodes in the order (-cumulative, depth, path)."""
    best = 0
    for q in range(1, n_open):
        a, b = line[q], line[best]
        if a.cum != b.cum:
            is_better = a.cum > b.cum
        elif a.slot != b.slot:
            is_better = a.slot < b.slot
        else:
            is_better = a.code < b.code
        if is_better:
            best = q
    return best


@dataclass(frozen=True)
class ProductPlan(_Growth):
    """The best `budget` nodes of the product of the slots' marginals, one level of `max_depth` slots.

    A node is a path of ranks below `width`; its value is the sum of its candidates' log-probabilities. The order is
    the prune order with path order (within a depth) for creation index. `width` 1 is a chain.
    """

    kind: ClassVar[str] = "product"
    budget: int = 60
    max_depth: int = 4
    width: int = 10

    def __post_init__(self) -> None:
        _need_int("product plan", "budget", self.budget, 1, _MOST)
        _need_int("product plan", "max_depth", self.max_depth, 1, _MOST_DEPTH)
        _need_int("product plan", "width", self.width, 1, _MOST_WIDTH)
        if self.width**self.max_depth > 1 << 62:
            raise InputError(f"product plan: {self.width} candidates to depth {self.max_depth} are too many paths")

    @property
    def n_levels(self) -> int:
        """One drafter forward."""
        return 1

    @property
    def n_slots(self) -> int:
        """One slot a depth."""
        return self.max_depth

    def attach(self, forest: Forest, starts: Starts, expansion: Expansion, level: int) -> None:
        """Place the best nodes; raises InputError where the expansion does not fit."""
        token, logp, _ = _checked(expansion, starts, self.max_depth)
        _reserve(forest, self.budget)
        forest.spine.append(_new_spine(starts, self.max_depth))
        line, width = np.empty(self.budget + 1, _OPEN), min(self.width, token.shape[3])
        _grow_product(forest.nodes, forest.n, token, logp, self.max_depth, width, forest.spine[-1], line)


# ------------------------------------------------------------------------------------------------ one tree


def tree_of(trees: Trees, t: int = 0) -> Tree:
    """The tree of row t, without padding."""
    n = int(trees.n[t])
    return Tree(*(getattr(trees, f.name)[t, :n] for f in fields(Tree)))


def chain_tree(tokens: Sequence[int]) -> Tree:
    """A chain of given tokens, log-probability 0; no tokens = plain decoding."""
    n = len(tokens)
    order, zero = np.arange(n, dtype=np.int32), np.zeros(n, np.int16)
    return Tree(
        np.array(tokens, np.int32).reshape(n), order - 1, order + 1, np.zeros(n, np.int32),
        zero, zero.copy(), order.astype(np.int16), np.ones(n, np.int16),
    )  # fmt: skip


def _parents_first(parent: Iterable[int]) -> np.ndarray:
    parents = np.asarray(parent, np.int64)
    if ((parents < ROOT) | (parents >= np.arange(len(parents)))).any():
        raise InputError("a tree must list parents before children, with -1 for the root")
    return parents


def depths(parent: np.ndarray) -> np.ndarray:
    """Depth of every node, int32 [N]: children of the root 1. Raises InputError unless parents come first."""
    parents = _parents_first(parent)
    out = np.zeros(len(parents) + 1, np.int32)  # the root's stands last, where index -1 finds it
    for i, up in enumerate(parents):
        out[i] = out[up] + 1
    return out[:-1]


def ancestor_mask(parent: np.ndarray) -> np.ndarray:
    """Who sees whom: bool [N+1, N+1], row and column 0 the root; a node sees itself, its ancestors and the root."""
    parents = _parents_first(parent)
    mask = np.eye(len(parents) + 1, dtype=bool)
    mask[:, 0] = True
    for i, up in enumerate(parents):
        mask[i + 1] |= mask[up + 1]
    return mask


def accept(tree: Tree, token_at: Callable[[int], int]) -> tuple[list[int], int]:
    """Walk down while the wanted token is a child; returns (indices of the accepted path, bonus token).

    `token_at(-1)` is what the target wants after the root, `token_at(i)` after node i; it is asked once a depth.
    Unmerged trees may hold equal siblings: all of them are followed, and the first that reaches deepest is the path.
    """
    children: dict[tuple[int, int], list[int]] = {}
    parents = tree.parent.tolist()
    for i, (up, token) in enumerate(zip(parents, tree.token.tolist())):
        children.setdefault((up, token), []).append(i)
    here, wanted = [ROOT], int(token_at(ROOT))
    while deeper := [i for up in here for i in children.get((up, wanted), ())]:
        here, wanted = deeper, int(token_at(deeper[0]))
    path, i = [], here[0]
    while i != ROOT:
        path.append(i)
        i = parents[i]
    return path[::-1], wanted


def commit(path_tokens: Sequence[int], bonus: int, stop_ids: Iterable[int], room: int) -> Commit:
    """Cut accepted tokens + bonus at the first stop id (which is kept) and at `room` tokens (at least 1).

    A stop on an accepted token means no bonus; a stop beyond the room does not happen.
    """
    if room < 1:
        raise InputError(f"a step needs room for at least 1 token, not {room}")
    stops = set(stop_ids)
    offered = [*path_tokens, bonus]
    n_wanted = next((i + 1 for i, token in enumerate(offered) if token in stops), len(offered))
    tokens = [int(token) for token in offered[: min(n_wanted, room)]]
    return Commit(
        tokens=tokens,
        n_accepted=min(len(tokens), len(path_tokens)),
        has_bonus=len(tokens) > len(path_tokens),
        is_stopped=tokens[-1] in stops,
        is_truncated=n_wanted > room,
    )


# ------------------------------------------------------------------------------------------------ catalogue


def _named_trees() -> dict[str, StaticPlan]:
    text = resources.files("workbench").joinpath("medusa_trees.json").read_text(encoding="utf-8")
    return {name: StaticPlan(tuple(tuple(path) for path in paths)) for name, paths in json.loads(text).items()}


STATIC_TREES: dict[str, StaticPlan] = _named_trees()  # Medusa's published trees, 63 nodes each
TREE_ALIASES = {"mc63": "mc_sim_7b_63"}


def block_chain(length: int, n_slots: int = 4) -> BlockPlan:
    """A chain of `length` nodes in blocks of `n_slots`."""
    _need_int("chain", "length", length, 1, _MOST)
    return BlockPlan(
        n_slots=n_slots, root_width=1, tier_widths=(1, 1, 1, 1), plain_width=1, n_blocks=-(-length // n_slots),
        budget=length, has_give_up=False,
    )  # fmt: skip


def beam_chain(length: int) -> BeamPlan:
    """A chain of `length` nodes, one drafter forward each."""
    _need_int("chain", "length", length, 1, _MOST_DEPTH)
    return BeamPlan(depth=length - 1, top_k=1, budget=length)


def product_chain(length: int) -> ProductPlan:
    """A chain of `length` nodes from one forward."""
    _need_int("chain", "length", length, 1, _MOST_DEPTH)
    return ProductPlan(budget=length, max_depth=length, width=1)


PRESETS: dict[str, Plan] = {
    "specblock": BlockPlan(),
    "specblock-release": BlockPlan(tier_widths=(2, 4, 6, 4), budget=90, has_trims=True, is_merging=False),
    # The article gives uncertain positions more candidates, where the released table gives up.
    "specblock-article": BlockPlan(tier_widths=(1, 4, 8, 10)),
    "specblock-chain": block_chain(8),
    "eagle3": BeamPlan(),
    "eagle3-published": BeamPlan(budget=59),
    "eagle3-chain": beam_chain(8),
    "medusa": STATIC_TREES["mc_sim_7b_63"],
    "medusa-chain": product_chain(4),
    "parallelspec": ProductPlan(),
    "parallelspec-chain": product_chain(4),
    "lookup": product_chain(10),
}

# Rank paths need slots that do not depend on one another; any other drafter is judged by its numbers alone.
DRAFTER_PLAN_KINDS: dict[str, tuple[str, ...]] = {
    "specblock": ("block",),
    "eagle3": ("beam",),
    "medusa": ("static", "product"),
    "parallelspec": ("static", "product"),
    "lookup": ("static", "product"),
}


def check_plan(
    plan: Plan, drafter: str, n_slots: int, max_width: int | None = None, n_levels: int | None = None
) -> None:
    """Raise InputError unless a drafter with these slots a forward, candidates a slot and levels can serve the plan."""
    kinds = DRAFTER_PLAN_KINDS.get(drafter)
    if kinds is not None and plan.kind not in kinds:
        raise InputError(f"a {plan.kind} plan does not fit the drafter {drafter}; it takes {' or '.join(kinds)} plans")
    for what, needed, offered in (
        ("slots", plan.n_slots, n_slots),
        ("candidates a slot", plan.width, max_width),
        ("levels", plan.n_levels, n_levels),
    ):
        if offered is not None and needed > offered:
            raise InputError(f"the {plan.kind} plan needs {needed} {what}, the drafter {drafter} offers {offered}")


# ------------------------------------------------------------------------------------------------ words to plans


def _int(text: str) -> int:
    return int(text)


def _bool(text: str) -> bool:
    return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[text.lower()]


def _cap(text: str) -> int | None:
    return None if text == "none" else int(text)


def _tiers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("-"))


def _tree(text: str) -> StaticPlan:
    return STATIC_TREES[TREE_ALIASES.get(text, text)]


_Reader = Callable[[str], Any]
_CHAIN_WORDS: dict[str, tuple[str, _Reader]] = {"length": ("length", _int)}
_BLOCK_WORDS: dict[str, tuple[str, _Reader]] = {
    "slots": ("n_slots", _int), "root": ("root_width", _int), "tiers": ("tier_widths", _tiers),
    "blocks": ("n_blocks", _int), "budget": ("budget", _int), "plain": ("plain_width", _int),
    "trims": ("has_trims", _bool), "merging": ("is_merging", _bool), "give_up": ("has_give_up", _bool),
    "start_cap": ("start_cap", _cap), "first_start_cap": ("first_start_cap", _cap), "lazy": ("is_lazy", _bool),
}  # fmt: skip
_BEAM_WORDS: dict[str, tuple[str, _Reader]] = {
    "depth": ("depth", _int), "top_k": ("top_k", _int), "budget": ("budget", _int),
}  # fmt: skip
_PRODUCT_WORDS: dict[str, tuple[str, _Reader]] = {
    "budget": ("budget", _int), "depth": ("max_depth", _int), "width": ("width", _int),
}  # fmt: skip
_TREE_WORDS: dict[str, tuple[str, _Reader]] = {"tree": ("tree", _tree)}


def _words(name: str) -> dict[str, tuple[str, _Reader]]:
    """The options a preset's name takes: word -> (field, reader)."""
    if name.endswith("-chain"):
        return _CHAIN_WORDS
    by_drafter = {
        "specblock": _BLOCK_WORDS,
        "eagle3": _BEAM_WORDS,
        "medusa": _PRODUCT_WORDS | _TREE_WORDS,
        "parallelspec": _PRODUCT_WORDS | _TREE_WORDS,
        "lookup": _PRODUCT_WORDS | _TREE_WORDS | _CHAIN_WORDS,
    }
    return by_drafter[name.split("-")[0]]


def _options(name: str, text: str) -> dict[str, Any]:
    """'budget=60,root=10' -> fields and values; InputError names what is not understood."""
    words, out = _words(name), {}
    for part in text.split(","):
        key, mark, value = (piece.strip() for piece in part.partition("="))
        if not mark or key not in words:
            raise InputError(f"plan {name}: no option {key!r}; there are {', '.join(words)}")
        field_name, reader = words[key]
        if field_name in out:
            raise InputError(f"plan {name}: the option {key!r} stands twice")
        try:
            out[field_name] = reader(value)
        except (ValueError, KeyError):
            raise InputError(f"plan {name}: {key}={value!r} is not a value it can take") from None
    return out


def _rebuilt(name: str, options: dict[str, Any]) -> Plan:
    """The preset with options applied."""
    preset = PRESETS[name]
    alone = next((word for word in ("tree", "length") if word in options), None)
    if alone and len(options) > 1:
        raise InputError(f"plan {name}: {alone} goes with no other option")
    if alone == "tree":
        return options["tree"]
    if alone == "length":
        length = options["length"]
        if isinstance(preset, BlockPlan):
            return block_chain(length, preset.n_slots)
        return beam_chain(length) if isinstance(preset, BeamPlan) else product_chain(length)
    if isinstance(preset, StaticPlan):
        preset = ProductPlan(budget=preset.budget, max_depth=preset.n_slots, width=preset.width)
    assert isinstance(preset, BlockPlan | BeamPlan | ProductPlan)
    return replace(preset, **options)


def parse_plan(spec: str) -> tuple[str, Plan]:
    """'specblock:blocks=2,budget=60,tiers=2-4-10-0,root=10' -> (drafter, plan).

    The part before the colon is a preset, whose drafter is the word before its first dash; the options override its
    fields. `medusa:tree=NAME` picks a published tree, `medusa:budget=60` a product plan, `…-chain:length=4` a chain.
    Raises InputError naming what it does not know.
    """
    name, mark, text = (piece.strip() for piece in spec.partition(":"))
    if name not in PRESETS:
        raise InputError(f"no plan {name!r}; there are {', '.join(PRESETS)}")
    drafter = name.split("-")[0]
    return drafter, _rebuilt(name, _options(name, text)) if mark else PRESETS[name]


_PLAN_TYPES: dict[str, type[Any]] = {cls.kind: cls for cls in (BlockPlan, BeamPlan, StaticPlan, ProductPlan)}


def _jsonable(value: Any) -> Any:
    return [_jsonable(item) for item in value] if isinstance(value, tuple) else value


def _from_json(value: Any) -> Any:
    return tuple(_from_json(item) for item in value) if isinstance(value, list) else value


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON values: its kind and every field."""
    cls = _PLAN_TYPES[plan.kind]
    return {"kind": plan.kind} | {f.name: _jsonable(getattr(plan, f.name)) for f in fields(cls)}


def plan_from_dict(values: dict[str, Any]) -> Plan:
    """The plan that `plan_to_dict` wrote; InputError on an unknown kind, a missing or unknown field, a bad value."""
    if not isinstance(values, dict) or values.get("kind") not in _PLAN_TYPES:
        raise InputError(f"not a plan: kind must be one of {', '.join(_PLAN_TYPES)}")
    cls = _PLAN_TYPES[values["kind"]]
    given = {name: _from_json(value) for name, value in values.items() if name != "kind"}
    names = {f.name for f in fields(cls)}
    if odd := sorted(names ^ set(given)):
        raise InputError(f"{values['kind']} plan: missing or unknown field {', '.join(odd)}")
    if cls is StaticPlan and not (
        isinstance(given["paths"], tuple) and all(isinstance(path, tuple) for path in given["paths"])
    ):
        raise InputError("static plan: paths must be a list of lists of ranks")
    return cls(**given)


# ------------------------------------------------------------------------------------------------ others' budgets


def plan_from_eagle(total_token: int, depth: int, top_k: int) -> BeamPlan:
    """EAGLE's own words: total_token counts the root; depth counts the forwards after the first."""
    return BeamPlan(depth=depth, top_k=top_k, budget=total_token - 1)


def plan_to_eagle(plan: BeamPlan) -> dict[str, int]:
    """Inverse of plan_from_eagle."""
    return {"total_token": plan.budget + 1, "depth": plan.depth, "top_k": plan.top_k}


def plan_from_sglang(
    speculative_num_steps: int, speculative_eagle_topk: int, speculative_num_draft_tokens: int
) -> BeamPlan:
    """SGLang's words: num_draft_tokens counts the root; num_steps counts every drafted depth, the first included."""
    return BeamPlan(
        depth=speculative_num_steps - 1, top_k=speculative_eagle_topk, budget=speculative_num_draft_tokens - 1
    )


def plan_to_sglang(plan: BeamPlan) -> dict[str, int]:
    """Inverse of plan_from_sglang."""
    return {
        "speculative_num_steps": plan.depth + 1,
        "speculative_eagle_topk": plan.top_k,
        "speculative_num_draft_tokens": plan.budget + 1,
    }


def plan_from_vllm(num_speculative_tokens: int) -> BeamPlan:
    """vLLM's word: a chain of k drafted tokens, the root not counted."""
    return beam_chain(num_speculative_tokens)


def plan_to_vllm(plan: BeamPlan) -> dict[str, int]:
    """Inverse of plan_from_vllm. Raises InputError for a tree, which vLLM cannot express."""
    if plan != beam_chain(plan.budget):
        raise InputError("only a chain can be expressed as num_speculative_tokens")
    return {"num_speculative_tokens": plan.budget}
