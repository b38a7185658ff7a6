"""Walked steps as rows of the steps table, every column but the keys and the times. No torch.

Live decoding writes the same columns (`steps.step_row`); that replay equals live is a comparison of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.forwards import step_forwards
from workbench.outcomes import Span
from workbench.policy import Arm
from workbench.pools import DraftPools, Text
from workbench.slots import FIELDS, SlotTable, slot_table
from workbench.walk import Menu, Steps


def step_rows(
    steps: Steps, arms: Sequence[Arm], menu: Menu, pools: Sequence[DraftPools], text: Text
) -> list[dict[str, Any]]:
    """One row a step, in the steps' order. `pools` holds each arm's."""
    rows, span = list[dict[str, Any]]([{}] * steps.n_steps), Span.of(text)
    for a, arm in enumerate(arms):
        chosen = np.flatnonzero(steps.arm == a)
        mine = steps.only(chosen)
        slots = slot_table(arm.plan, pools[a], span, mine.row.astype(np.int64)).up_to(mine.n_committed)
        for i, place in enumerate(chosen.tolist()):
            n_starts = menu.tables[a].n_starts[mine.row[i], : mine.n_blocks[i]].tolist()
            rows[place] = _row(mine, i, n_starts, text) | _forwards(arm.drafter, menu.n_slots[a], mine, i, n_starts)
            rows[place] |= _slots(slots, i)
    return rows


def _row(steps: Steps, i: int, n_starts: list[int], text: Text) -> dict[str, Any]:
    begin = int(text.offset[steps.episode[i]]) + int(steps.position[i])
    tokens = text.token[begin : begin + int(steps.n_committed[i])].tolist()
    whole = {
        name: int(getattr(steps, name)[i])
        for name in ("step", "position", "context_length", "n_blocks", "n_forwards", "n_nodes", "tree_depth")
        + ("n_accepted", "n_committed")
    }
    flags = {name: bool(getattr(steps, name)[i]) for name in ("has_bonus", "is_stopped", "is_truncated")}
    bonus = tokens[-1] if flags["has_bonus"] else None
    return {"drafter_version": 0, "n_starts": n_starts, "bonus": bonus, "tokens": tokens} | whole | flags


def _forwards(drafter: str, n_slots: int, steps: Steps, i: int, n_starts: list[int]) -> dict[str, Any]:
    forwards = step_forwards(drafter, n_slots, int(steps.n_refreshed[i]), n_starts)
    columns = {"kind": "forward_kind", "n_rows": "forward_rows", "n_starts": "forward_starts"}
    return {column: [getattr(f, name) for f in forwards] for name, column in columns.items()}


def _slots(slots: SlotTable, i: int) -> dict[str, Any]:
    values = slots.values[slots.offset[i] : slots.offset[i + 1]]
    return {f"slot_{name}": values[:, j].tolist() for j, name in enumerate(FIELDS)}
