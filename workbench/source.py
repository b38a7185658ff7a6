"""Recorded pools as a source of candidates: what `tree.grow` asks of a drafter, looked up. Numpy and numba, no torch.

A start is found by the candidate that created it. The plan numbers starts by its own columns, the pools by theirs, so
the source keeps, for every start it has served, the pool's column; a start whose creator stands there is looked up
among all recorded levels (what a drafter offers depends on the path, not on the level it is asked at).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

from workbench.pools import DraftPools
from workbench.tree import Expansion, Starts

_Function = TypeVar("_Function", bound=Callable[..., Any])
kernel: Callable[[_Function], _Function] = njit(cache=True, _nrt=False)  # type: ignore[call-overload]

_NOTHING, _NOT_RECORDED = -1, -2  # instead of a pool column
_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@kernel
def _locate(
    address: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    n_starts: np.ndarray,
    first_column: np.ndarray,
    column: np.ndarray,
    key: np.ndarray,
    n_slots: int,
    n_ranks: int,
    found: np.ndarray,
) -> int:
    """The pool column of every start into found [T, S]; returns how many were not recorded.

    address: level, start, slot, rank of the starts' creators. column [T, C'] holds the pool columns of the plan's
    starts so far, those of level l from first_column[l] on. key [T, C] names the creators of the recorded starts: pool
    column c + 1 stands at c; column 0 is the root's block.
    """
    level, start, slot, rank = address
    n_missing, n_columns = 0, key.shape[1]
    for t in range(found.shape[0]):
        c = 0
        for s in range(n_starts[t]):
            creator = column[t, first_column[level[t, s]] + start[t, s]]
            wanted = (creator * n_slots + slot[t, s]) * n_ranks + rank[t, s]
            found[t, s] = _NOT_RECORDED
            for _ in range(n_columns):  # starts mostly stand in the recorded order: go on behind the last one found
                if c == n_columns:
                    c = 0
                c += 1
                if key[t, c - 1] == wanted:
                    found[t, s] = c
                    break
            n_missing += found[t, s] == _NOT_RECORDED
        for s in range(n_starts[t], found.shape[1]):
            found[t, s] = _NOTHING
    return n_missing


@kernel
def _gather(found: np.ndarray, first: int, source: _Arrays, out: _Arrays) -> None:
    """Copy the blocks of one pool level, whose columns begin at `first`, to the starts that asked for them."""
    token, logp, tier = source
    n_columns, n_slots, width = token.shape[1], out[0].shape[2], out[0].shape[3]
    for t in range(found.shape[0]):
        for s in range(found.shape[1]):
            c = found[t, s] - first
            if 0 <= c < n_columns:
                for k in range(n_slots):
                    out[2][t, s, k] = tier[t, c, k]
                    for w in range(width):
                        out[0][t, s, k, w] = token[t, c, k, w]
                    for w in range(width):
                        out[1][t, s, k, w] = logp[t, c, k, w]


@kernel
def _offer_nothing(found: np.ndarray, out: _Arrays) -> None:
    """No candidates where nothing was recorded and in the padding."""
    for t in range(found.shape[0]):
        for s in range(found.shape[1]):
            if found[t, s] < 0:
                out[2][t, s] = -1
                out[0][t, s, :, 0] = -1
                out[1][t, s, :, 0] = 0


@dataclass(frozen=True)
class Creators:
    """Who created each recorded start of R rows, as one number each; read off the pools once for all plans."""

    key: NDArray[np.int32]  # [R, C], columns of all levels but the first; -1 = padding
    first: list[int]  # pool column at which each level begins, then the end
    n_slots: int
    n_ranks: int

    @classmethod
    def of(cls, pools: DraftPools) -> Creators:
        """Number the recorded starts."""
        n_slots, n_ranks = pools.levels[0].expansion.token.shape[2], pools.width + 1
        n_columns = [1] + [level.starts.node.shape[1] for level in pools.levels[1:]]
        first = np.cumsum([0, *n_columns])
        keys = [np.empty((pools.n_rows, 0), np.int32)]
        for level in pools.levels[1:]:
            s = level.starts
            key = ((first[s.level] + s.start) * n_slots + s.slot) * n_ranks + s.rank
            keys.append(np.where(np.arange(key.shape[1]) < s.n[:, None], key, _NOTHING).astype(np.int32))
        return cls(np.concatenate(keys, axis=1), first.tolist(), n_slots, n_ranks)

    def rows(self, rows: slice | NDArray[np.int64]) -> Creators:
        """Those of some rows alone."""
        return Creators(self.key[rows], self.first, self.n_slots, self.n_ranks)


@dataclass
class TraceSource:
    """What was recorded at T rows. `expand` serves `tree.grow`.

    `levels` keeps the plan's starts and what was offered; `missing` the starts that were not recorded, as (rows, forest
    nodes).
    """

    pools: DraftPools
    creators: Creators
    levels: list[tuple[Starts, Expansion]] = field(default_factory=list)
    missing: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = field(default_factory=list)
    _column: NDArray[np.int32] = field(init=False)
    _first: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._column, self._first = np.zeros((self.pools.n_rows, 1), np.int32), [0, 1]

    def expand(self, level: int, starts: Starts, width: int) -> Expansion:
        """Candidates [T, S, K, W] of the starts of one level."""
        expansion = self.pools.levels[0].expansion if level == 0 else self._looked_up(starts, width)
        self.levels.append((starts, expansion))
        return expansion

    def _looked_up(self, starts: Starts, width: int) -> Expansion:
        c, found = self.creators, np.empty(starts.node.shape, np.int32)
        address = starts.level, starts.start, starts.slot, starts.rank
        first = np.array(self._first, np.int64)
        if _locate(address, starts.n, first, self._column, c.key, c.n_slots, c.n_ranks, found):
            row, column = np.nonzero(found == _NOT_RECORDED)
            self.missing.append((row, starts.node[row, column]))
        self._column = np.concatenate([self._column, found], axis=1)
        self._first.append(self._column.shape[1])
        return self._gathered(found, min(width, self.pools.width))

    def _gathered(self, found: NDArray[np.int32], width: int) -> Expansion:
        shape = (*found.shape, self.creators.n_slots, width)
        out = np.empty(shape, np.int32), np.empty(shape, np.int16), np.empty(shape[:3], np.int8)
        _offer_nothing(found, out)
        for first, level in zip(self.creators.first[1:], self.pools.levels[1:]):
            e = level.expansion
            _gather(found, first, (e.token, e.logp, e.tier), out)
        return Expansion(*out)
