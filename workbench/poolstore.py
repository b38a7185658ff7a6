"""Pools as table rows and back: a row a position, compact. The reader trusts nothing. No torch.

Log-probabilities fall along a slot, so they are written as steps down; token ids that matter to no one are left out
(`poolnames`) and read back as labels. What all rows share (slots, width, envelope) stands in run.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from workbench.errors import InputError
from workbench.poolnames import named
from workbench.pools import LABEL, NO_LOGP, DraftPools, PoolLevel, Text
from workbench.schema import arrow_schema
from workbench.tree import N_TIERS, Expansion, Plan, Starts, plan_from_dict, plan_to_dict

MAX_LEVELS = 64
MAX_STARTS = 4096  # of a level
MAX_SLOT = 1024  # slots of a block, candidates of a slot
MAX_CANDIDATES = 1 << 27  # of the rows read at once, padding counted
WRITING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 9,
    "row_group_size": 256,
    "use_dictionary": ["prompt", "turn", "n_starts.list.element", "token.list.element"],
    "column_encoding": {"logp.list.element": "BYTE_STREAM_SPLIT", "creator.list.element": "BYTE_STREAM_SPLIT"},
}


@dataclass(frozen=True)
class PoolShape:
    """What all rows of a drafter's pools share."""

    kind: str
    n_slots: int  # K
    width: int  # W
    has_tiers: bool
    envelope: Plan | None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        plan = None if self.envelope is None else plan_to_dict(self.envelope)
        return {"n_slots": self.n_slots, "width": self.width, "has_tiers": self.has_tiers, "envelope": plan}

    @classmethod
    def from_dict(cls, kind: str, values: Any, where: str) -> PoolShape:
        """What `to_dict` wrote; InputError on anything else."""
        if not isinstance(values, dict) or not {"n_slots", "width", "has_tiers", "envelope"} <= values.keys():
            raise InputError(f"{where}: what it says about the pools of {kind[:40]} is incomplete.")
        sizes = values["n_slots"], values["width"]
        if any(type(n) is not int or not 1 <= n <= MAX_SLOT for n in sizes) or type(values["has_tiers"]) is not bool:
            raise InputError(f"{where}: the pools of {kind[:40]} have absurd sizes {str(sizes)[:40]}.")
        plan = None if values["envelope"] is None else plan_from_dict(values["envelope"])
        if plan is not None and (plan.n_slots != sizes[0] or plan.width > sizes[1]):
            raise InputError(f"{where}: the envelope of {kind[:40]} does not fit its slots and candidates.")
        return cls(kind, *sizes, values["has_tiers"], plan)


def shape_of(pools: DraftPools) -> PoolShape:
    """What the pools' rows share."""
    return PoolShape(pools.kind, pools.n_slots, pools.width, pools.has_tiers, pools.envelope)


# ------------------------------------------------------------------------------------------------ writing


def pool_table(pools: DraftPools, text: Text) -> pa.Table:
    """The rows of the pools table for pools with all token ids, along their text."""
    is_slot = _valid(pools, pools.n_slots)
    is_candidate = _valid(pools, pools.n_slots * pools.width)
    logp = _joined([_steps_down(level.expansion) for level in pools.levels])[is_candidate]
    token = _joined([level.expansion.token for level in pools.levels])[is_candidate]
    is_named = _joined(named(pools, text))[is_candidate]
    tier = _joined([level.expansion.tier for level in pools.levels])[is_slot]
    n_starts = np.stack([level.starts.n for level in pools.levels], 1)  # [R, M]
    n_candidates = is_candidate.sum(1)
    creator, n_creators = _creators(pools)
    row = np.repeat(np.arange(pools.n_rows), n_candidates)
    n_named = np.bincount(row[is_named], minlength=pools.n_rows)
    episode = text.row_episode()
    columns = {
        "prompt": pa.array(np.asarray(text.prompt, np.int32)[episode]),
        "turn": pa.array(np.asarray(text.turn, np.int16)[episode]),
        "position": pa.array(text.row_position()),
        "n_starts": _lists(n_starts.ravel(), np.full(pools.n_rows, n_starts.shape[1]), np.int16),
        "creator": _lists(creator, n_creators, np.int32),
        "tier": _lists(tier if pools.has_tiers else tier[:0], is_slot.sum(1) * pools.has_tiers, np.int8),
        "logp": _lists(logp, n_candidates, np.int16),
        "is_named": _lists(is_named, n_candidates, np.bool_),
        "token": _lists(token[is_named], n_named, np.int32),
    }
    return pa.Table.from_arrays(list(columns.values()), schema=arrow_schema("pools"))


def _valid(pools: DraftPools, n_each: int) -> np.ndarray:
    """bool [R, (sum of S) * n_each]: what is no padding, every start standing for `n_each` values."""
    real = [np.arange(x.starts.node.shape[1]) < x.starts.n[:, None] for x in pools.levels]
    return np.repeat(np.concatenate(real, 1), n_each, axis=1)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays [R, ...] side by side: [R, all]."""
    return np.concatenate([x.reshape(len(x), int(np.prod(x.shape[1:]))) for x in arrays], axis=1)


def _steps_down(expansion: Expansion) -> np.ndarray:
    """int16, as the logp column holds it; 0 where there is no candidate."""
    logp = expansion.logp.astype(np.int32)
    down = -np.diff(logp, prepend=0, axis=-1)
    return np.where(expansion.token < 0, 0, down).astype(np.int16)


def _creators(pools: DraftPools) -> tuple[np.ndarray, np.ndarray]:
    """The creator column, flat, and how many entries each row has."""
    k, w = pools.n_slots, pools.width
    first = _first_starts(np.stack([level.starts.n for level in pools.levels], 1))  # [R, M]
    codes = [np.empty((pools.n_rows, 0), np.int64)]
    for level in pools.levels[1:]:
        s = level.starts
        start = np.take_along_axis(first, np.maximum(s.level, 0).astype(np.int64), 1) + s.start
        codes.append((start * k + s.slot) * w + s.rank - 1)
    is_start = _valid(pools, 1)[:, pools.levels[0].starts.node.shape[1] :]
    return np.concatenate(codes, 1)[is_start], is_start.sum(1)


def _first_starts(n_starts: np.ndarray) -> np.ndarray:
    """Number of each level's first start among a row's starts, int64 [R, M], from starts a level."""
    return np.cumsum(n_starts, axis=1, dtype=np.int64) - n_starts


def _lists(values: np.ndarray, lengths: np.ndarray, dtype: Any) -> pa.Array:
    """A list column of rows of these lengths."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    element = pa.from_numpy_dtype(dtype)
    values = pa.array(values.astype(dtype), type=element)
    return pa.ListArray.from_arrays(offsets, values, type=pa.list_(pa.field("element", element, nullable=False)))


# ------------------------------------------------------------------------------------------------ reading


def pools_from(table: pa.Table, shape: PoolShape, where: str) -> DraftPools:
    """The pools of a checked table's rows; InputError where its lists do not fit together."""
    n_rows, k, w = table.num_rows, shape.n_slots, shape.width
    n_starts = _n_starts(table, where)  # [R, M]
    most = n_starts.max(axis=0, initial=0)
    if n_rows * int(most.sum()) * k * w > MAX_CANDIDATES:
        raise InputError(f"{where}: its pools would unpack to more than {MAX_CANDIDATES} candidates at once.")
    total = n_starts.sum(1)
    logp = _flat(table, "logp", total * k * w, where)
    is_named = _flat(table, "is_named", total * k * w, where)
    tier = _flat(table, "tier", total * k * shape.has_tiers, where)
    creator = _flat(table, "creator", total - 1, where)
    token = _tokens(table, is_named, total * k * w, where)
    if tier.size and not (-1 <= int(tier.min()) and int(tier.max()) < N_TIERS):
        raise InputError(f"{where}: a rank tier lies outside -1..{N_TIERS - 1}.")
    is_start = np.concatenate([np.arange(n) < n_starts[:, [i]] for i, n in enumerate(most)], 1)  # [R, sum of S]
    logp = _filled(_logps(logp.reshape(-1, w), token.reshape(-1, w), where).ravel(), is_start, k * w, NO_LOGP)
    token = _filled(token, is_start, k * w, -1)
    tiers = _filled(tier, is_start, k, -1) if shape.has_tiers else np.full((n_rows, is_start.shape[1] * k), -1, np.int8)
    whole = _filled(np.insert(creator, np.cumsum(total - 1) - (total - 1), -1), is_start, 1, -1)
    levels, first = [], 0
    for i, n in enumerate(most):
        cut = slice(first, first + int(n))
        first += int(n)
        e = Expansion(
            token=token[:, cut.start * k * w : cut.stop * k * w].reshape(n_rows, n, k, w),
            logp=logp[:, cut.start * k * w : cut.stop * k * w].reshape(n_rows, n, k, w),
            tier=tiers[:, cut.start * k : cut.stop * k].reshape(n_rows, n, k),
        )
        levels.append(PoolLevel(e, _starts(whole[:, cut], i, n_starts, token, k, w, where)))
    return DraftPools(shape.kind, k, shape.has_tiers, levels, shape.envelope)


def _n_starts(table: pa.Table, where: str) -> np.ndarray:
    """Starts of every row at every level, int64 [R, M]; level 0 has one."""
    lengths = np.diff(table.column("n_starts").combine_chunks().offsets.to_numpy())
    n_levels = int(lengths[0]) if len(lengths) else 1
    if not 1 <= n_levels <= MAX_LEVELS or (lengths != n_levels).any():
        raise InputError(f"{where}: its rows have no levels, differ in them, or have more than {MAX_LEVELS}.")
    flat = table.column("n_starts").combine_chunks().flatten().to_numpy()
    n_starts = flat.reshape(-1, n_levels).astype(np.int64)
    if (n_starts[:, :1] != 1).any() or n_starts.min(initial=0) < 0 or n_starts.max(initial=0) > MAX_STARTS:
        raise InputError(f"{where}: a row has other than one start at level 0, or an absurd number of starts.")
    return n_starts


def _flat(table: pa.Table, name: str, lengths: np.ndarray, where: str) -> np.ndarray:
    """All entries of a list column, whose rows must have these lengths."""
    column = table.column(name).combine_chunks()
    if not np.array_equal(np.diff(column.offsets.to_numpy()), lengths):
        raise InputError(f"{where}: the lists of column {name!r} do not have the lengths its other columns call for.")
    return column.flatten().to_numpy(zero_copy_only=False)


def _tokens(table: pa.Table, is_named: np.ndarray, lengths: np.ndarray, where: str) -> np.ndarray:
    """Token ids and labels of all candidates, int32, flat."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    ids = _flat(table, "token", np.bincount(row[is_named], minlength=len(lengths)), where)
    if ids.size and not (-1 <= int(ids.min()) and int(ids.max()) < LABEL):
        raise InputError(f"{where}: a token id lies outside -1..{LABEL - 1}.")
    begin = np.cumsum(lengths) - lengths
    token = (LABEL + np.arange(len(row)) - begin[row]).astype(np.int32)
    token[is_named] = ids
    return token


def _logps(down: np.ndarray, token: np.ndarray, where: str) -> np.ndarray:
    """Log-probabilities int16 [slots, W] from steps down; candidates must come before gaps."""
    is_none = token < 0
    if (is_none[:, :-1] & ~is_none[:, 1:]).any():
        raise InputError(f"{where}: a slot has a candidate behind a gap.")
    logp = -np.cumsum(down, axis=1, dtype=np.int32)
    if down.size and (int(down.min()) < 0 or int(logp.min()) < NO_LOGP):
        raise InputError(f"{where}: the log-probabilities of a slot do not fall, or fall too far.")
    return np.where(is_none, NO_LOGP, logp).astype(np.int16)


def _filled(values: np.ndarray, is_start: np.ndarray, n_each: int, padding: int) -> np.ndarray:
    """Values of real starts, `n_each` a start, among padding: [R, (sum of S) * n_each]."""
    out = np.full((*is_start.shape, n_each), padding, values.dtype)
    out[is_start] = values.reshape(-1, n_each)
    return out.reshape(len(is_start), is_start.shape[1] * n_each)


def _starts(
    creator: np.ndarray, level: int, n_starts: np.ndarray, token: np.ndarray, k: int, w: int, where: str
) -> Starts:
    """Starts of one level from their creators' numbers [R, S]; -1 at level 0 and in the padding."""
    n = n_starts[:, level].astype(np.int32)
    is_start = creator >= 0
    begin = _first_starts(n_starts)  # [R, M]
    if ((creator >= begin[:, [level]] * (k * w)) & is_start).any() or (creator < -1).any():
        raise InputError(f"{where}: a start is created by a candidate of its own level or a later one.")
    if level and not np.array_equal(is_start.sum(1), n):
        raise InputError(f"{where}: a start behind level 0 has no creator.")
    start = np.where(is_start, creator, 0) // (k * w)  # among the row's starts
    at = (start[..., None] >= begin[:, None, :level]).sum(-1) - 1 if level else np.zeros_like(start)
    column = start - np.take_along_axis(begin, at, 1)
    most = n_starts.max(axis=0, initial=0)
    padded = (np.concatenate([[0], np.cumsum(most)])[at] + column) * (k * w) + np.where(is_start, creator, 0) % (k * w)

    def small(x: np.ndarray) -> np.ndarray:
        return np.where(is_start, x, -1).astype(np.int16)

    node = np.where(is_start, 0, -2 if level else -1).astype(np.int32)
    found = np.where(is_start, np.take_along_axis(token, padded, 1), -1).astype(np.int32)
    slot, rank = creator // w % k, creator % w + 1
    return Starts(node, found, small(at), small(column), small(slot), small(rank), n)
