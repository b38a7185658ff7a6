"""Pools recorded the slow way: the drafter runs live at every position of a recorded text, along an envelope plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.decode import Drafting
from workbench.pools import DraftPools, PoolLevel, Text
from workbench.recorded import Recording
from workbench.target import Prefill
from workbench.tree import BeamPlan, BlockPlan, Expansion, Plan, ProductPlan, Starts, grow

BLOCK_ENVELOPE = BlockPlan(
    root_width=10, tier_widths=(10, 10, 10, 10), plain_width=10, n_blocks=3, budget=9999, first_start_cap=24,
    start_cap=10, has_give_up=False, is_lazy=False,
)  # fmt: skip


def envelope(kind: str, n_slots: int = 4, width: int = 10) -> Plan:
    """A plan as wide as the default envelope."""
    if kind == "specblock":
        return BLOCK_ENVELOPE
    if kind == "eagle3":
        return BeamPlan(budget=9999)
    return ProductPlan(budget=1, max_depth=n_slots, width=width)


def text_of(recordings: Sequence[Recording], stop_ids: Sequence[int], room: int) -> Text:
    """The text of recorded answers, all of one task."""
    n = len(recordings)
    return Text(
        token=np.concatenate([np.array(r.tokens, np.int32) for r in recordings]),
        offset=np.cumsum([0, *(len(r.tokens) for r in recordings)], dtype=np.int64),
        prompt=list(range(n)),
        prompt_id=[f"p{i}" for i in range(n)],
        task=["chat"] * n,
        turn=[0] * n,
        prompt_tokens=[np.array(r.prompt_ids, np.int32) for r in recordings],
        room=np.full(n, room, np.int32),
        stop_ids=tuple(stop_ids),
    )


def live_pools(drafter: Any, recordings: Sequence[Recording], plan: Plan) -> DraftPools:
    """Every position's pool, the drafter run one position at a time."""
    rows = [levels for r in recordings for levels in _rows(drafter, r, plan)]
    n_levels = max(map(len, rows))
    levels = [_stacked([row[i] if i < len(row) else None for row in rows]) for i in range(n_levels)]
    return DraftPools(drafter.kind, drafter.n_slots, drafter.has_tiers, levels, plan)


def _rows(drafter: Any, r: Recording, plan: Plan) -> list[list[tuple[Starts, Expansion]]]:
    n = len(r.prompt_ids)
    prefill = Prefill(r.tokens[0], r.features[:n], r.final[:n])
    drafting = Drafting(drafter, plan, r.prompt_ids, prefill, n + len(r.tokens))
    rows = []
    for t in range(1, len(r.tokens)):
        if t > 1:
            pair = slice(n + t - 2, n + t - 1)
            drafter.observe(drafting.state, r.features[pair], r.final[pair], [r.tokens[t - 1]])
        levels: list[tuple[Starts, Expansion]] = []

        def expand(level: int, starts: Starts, width: int, levels: Any = levels) -> Expansion:
            levels.append((starts, drafter.expand(drafting.state, level, starts, width)))
            return levels[-1][1]

        grow(plan, expand)
        rows.append(levels)
    return rows


def _stacked(parts: Sequence[tuple[Starts, Expansion] | None]) -> PoolLevel:
    """One level of rows of one position each, padded to the fullest."""
    n_most = max(part[0].node.shape[1] for part in parts if part)
    like = next(part for part in parts if part)[1]

    def stack(arrays: list[np.ndarray | None], shape: tuple[int, ...], fill: int, dtype: Any) -> np.ndarray:
        out = np.full((len(parts), n_most, *shape), fill, dtype)
        for t, a in enumerate(arrays):
            if a is not None:
                out[t, : a.shape[1]] = a[0]
        return out

    def of_starts(name: str, fill: int, dtype: Any) -> np.ndarray:
        return stack([getattr(part[0], name) if part else None for part in parts], (), fill, dtype)

    def of_expansion(name: str, fill: int) -> np.ndarray:
        a = getattr(like, name)
        return stack([getattr(part[1], name) if part else None for part in parts], a.shape[2:], fill, a.dtype)

    names = {"node": (-2, np.int32), "token": (-1, np.int32)} | dict.fromkeys(
        ("level", "start", "slot", "rank"), (-1, np.int16)
    )
    n = np.array([part[0].n[0] if part else 0 for part in parts], np.int32)
    starts = Starts(*(of_starts(name, *how) for name, how in names.items()), n)
    return PoolLevel(Expansion(of_expansion("token", -1), of_expansion("logp", 0), of_expansion("tier", -1)), starts)
