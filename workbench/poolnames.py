"""Which candidates of a pool keep their token ids on disk, and the forest an envelope grows from a pool. No torch.

Most candidates behind level 0 are never looked at by a person. A candidate keeps its id at level 0, at rank 1, among
the `N_NAMED` best of its position (what a tree inspector is likely to show), where a sibling equals it, and where the
token committed at its depth equals it. The others become labels (see `pools.LABEL`): nothing they could be compared
with equals them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from workbench.errors import InputError
from workbench.pools import LABEL, DraftPools, PoolLevel, Text
from workbench.tree import Expansion, Forest, Starts, grow

N_NAMED = 256
N_BATCH = 256  # rows looked at together
ADDRESS = ("level", "start", "slot", "rank")


@dataclass
class Regrown:
    """What an envelope grows from R rows: the forest, and of every slot its depth and its parent's node (-1: root)."""

    forest: Forest
    depth: list[np.ndarray] = field(default_factory=list)  # int64 [R, S, K] a level; meaningless in the padding
    parent: list[np.ndarray] = field(default_factory=list)  # int64 [R, S, K]; below -1 where there is none


def regrow(pools: DraftPools) -> Regrown:
    """Grow the envelope from the pools; InputError where the recorded starts are not those it chooses."""
    assert pools.envelope is not None
    nodes: list[np.ndarray] = []

    def expand(level: int, starts: Starts, width: int) -> Expansion:
        if level >= len(pools.levels) or not _are_same(pools.levels[level].starts, starts):
            raise InputError(f"the {pools.kind} pools do not hold the starts their envelope chooses at level {level}")
        nodes.append(starts.node.astype(np.int64))
        return pools.levels[level].expansion

    out = Regrown(grow(pools.envelope, expand, pools.n_rows))
    if len(nodes) < sum(bool(level.starts.n.any()) for level in pools.levels):
        raise InputError(f"the {pools.kind} pools hold starts their envelope does not choose")
    out.depth = slot_depths(pools)
    for node, spine in zip(nodes, out.forest.spine):
        out.parent.append(np.concatenate([node[..., None], spine[..., :-1]], axis=-1))
    return out


def _are_same(recorded: Starts, chosen: Starts) -> bool:
    """Whether the same creators stand in the same columns."""
    n = chosen.node.shape[1]
    return np.array_equal(recorded.n, chosen.n) and all(
        np.array_equal(getattr(recorded, name)[:, :n], getattr(chosen, name)) for name in ADDRESS
    )


def slot_depths(pools: DraftPools) -> list[np.ndarray]:
    """Depth of the candidates of every slot, int64 [R, S, K] a level: behind the root 1."""
    depths: list[np.ndarray] = []
    rows = np.arange(pools.n_rows)[:, None]
    for level in pools.levels:
        starts, above = level.starts, np.zeros(level.starts.node.shape, np.int64)
        for i, depth in enumerate(depths):
            is_here = starts.level == i
            found = depth[rows, np.where(is_here, starts.start, 0), np.where(is_here, starts.slot, 0)]
            above = np.where(is_here, found, above)
        depths.append(above[..., None] + 1 + np.arange(level.expansion.token.shape[2]))
    return depths


def named(pools: DraftPools, text: Text) -> list[np.ndarray]:
    """Which candidates keep their ids, bool [R, S, K, W] a level; `pools` holds all ids, its rows are the text's."""
    masks = [level.expansion.token < 0 for level in pools.levels]
    masks[0][:] = True
    for mask in masks[1:]:
        mask[..., :1] = True
    if pools.envelope is not None:
        for begin in range(0, pools.n_rows, N_BATCH):
            rows = slice(begin, min(begin + N_BATCH, pools.n_rows))
            _name(pools.rows(rows), _wanted(text, rows), [mask[rows] for mask in masks])
    return masks


def labelled(pools: DraftPools, masks: list[np.ndarray]) -> DraftPools:
    """The pools with labels in place of unnamed ids, as they are read back: a candidate's place in its row."""
    n_real = np.cumsum([np.zeros(pools.n_rows, np.int64), *(level.starts.n for level in pools.levels)], axis=0)
    tokens: list[np.ndarray] = []
    levels: list[PoolLevel] = []
    for level, mask, first in zip(pools.levels, masks, n_real):
        e, s = level.expansion, level.starts
        place = np.arange(e.token[0].size if len(e.token) else 0).reshape(e.token.shape[1:])
        label = LABEL + first[:, None, None, None] * (pools.n_slots * pools.width) + place
        tokens.append(np.where(mask, e.token, label).astype(np.int32))
        token = s.token.copy()
        for i in range(len(levels)):
            row, column = np.nonzero(s.level == i)
            at = row, s.start[row, column], s.slot[row, column], s.rank[row, column] - 1
            token[row, column] = tokens[i][at]
        starts = Starts(s.node, token, s.level, s.start, s.slot, s.rank, s.n)
        levels.append(PoolLevel(Expansion(tokens[-1], e.logp, e.tier), starts))
    return DraftPools(pools.kind, pools.n_slots, pools.has_tiers, levels, pools.envelope)


def _name(pools: DraftPools, wanted: np.ndarray, masks: list[np.ndarray]) -> None:
    """Mark what equals the text, a sibling, or stands among the best of a few rows."""
    grown = regrow(pools)
    for level, depth, mask in zip(pools.levels, grown.depth, masks):
        n_rows, last = len(depth), wanted.shape[1] - 1
        text = wanted[np.arange(n_rows)[:, None, None], np.minimum(depth, last)]  # [R, S, K]
        mask |= level.expansion.token == text[..., None]
    _name_equals(pools, grown, masks)
    _name_best(grown.forest, masks)


def _wanted(text: Text, rows: slice) -> np.ndarray:
    """int32 [R, D + 1]: the token committed at each depth behind a row's root; -2 past the end and at depth 0."""
    episode, n_deep = text.row_episode()[rows], 256
    begin = np.arange(rows.start, rows.stop) + episode  # index of each row's root
    index = begin[:, None] + np.arange(n_deep)
    is_there = (index < text.offset[episode + 1][:, None]) & (np.arange(n_deep) > 0)
    padded = np.append(text.token, np.int32(-2))
    return padded[np.where(is_there, index, len(text.token))]


def _name_equals(pools: DraftPools, grown: Regrown, masks: list[np.ndarray]) -> None:
    """Mark candidates that hang under one parent with equal ids."""
    keys, flat = [], []
    for level, parent in zip(pools.levels, grown.parent):
        token = level.expansion.token
        row = np.arange(len(token))[:, None, None, None]
        has_any = (token >= 0) & (parent[..., None] >= -1)
        code = (row * (grown.forest.nodes.shape[1] + 1) + parent[..., None] + 1) << 32 | np.maximum(token, 0)
        keys.append(code[has_any])
        flat.append(has_any)
    _, inverse, count = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
    is_equal, begin = count[inverse] > 1, 0
    for mask, has_any in zip(masks, flat):
        n = int(has_any.sum())
        mask[has_any] |= is_equal[begin : begin + n]
        begin += n


def _name_best(forest: Forest, masks: list[np.ndarray]) -> None:
    """Mark the creators of the `N_NAMED` best nodes of each row, in prune order."""
    n_nodes = forest.nodes.shape[1]
    key = -forest.cum.astype(np.int64) << 32 | forest.depth.astype(np.int64) << 20 | np.arange(n_nodes)
    key[np.arange(n_nodes) >= forest.n[:, None]] = np.iinfo(np.int64).max
    n_best = min(N_NAMED, n_nodes)
    best = np.argpartition(key, n_best - 1, axis=1)[:, :n_best] if n_nodes else np.zeros((len(key), 0), np.int64)
    row = np.broadcast_to(np.arange(len(key))[:, None], best.shape)
    is_node = np.take_along_axis(key, best, 1) < np.iinfo(np.int64).max
    node = forest.nodes[row[is_node], best[is_node]]
    for i, mask in enumerate(masks):
        here = node["level"] == i
        mask[row[is_node][here], node["start"][here], node["slot"][here], node["rank"][here] - 1] = True
