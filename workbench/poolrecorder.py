"""Record pools: for every position of a committed text, what each drafter's widest plan would be offered there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from workbench.drafters.along import Expand
from workbench.pools import DraftPools, Envelope, PoolLevel, clean_level, root_starts, stack_levels
from workbench.tree import Expansion, Starts, grow

N_BATCH_CANDIDATES = 16_384  # candidates of a level drafted in one forward, roughly


def record_pools(
    drafter: Any, envelope: Envelope, prompt_ids: list[int], tokens: list[int], features: Tensor, final: Tensor
) -> DraftPools:
    """Pools at positions 1 .. L - 1 of a text of L tokens behind a prompt of S.

    features [>= S + L - 2, 3H], final [>= S + L - 2, H]: rows of the whole text's indices, from 0, as the drafter would
    be handed them live. One row a position, T = L - 1.
    """
    whole = [*prompt_ids, *tokens]
    n_pairs, n_rows = len(whole) - 2, len(tokens) - 1
    plan = envelope.plan(drafter.kind, drafter.n_slots)
    width = envelope.width_of(drafter.kind)
    parts: list[list[PoolLevel]] = []
    if n_rows:
        text = drafter.along(features[:n_pairs], final[:n_pairs], whole[1 : n_pairs + 1])
        first = len(prompt_ids) - 1
        for rows in batches(n_rows, envelope, drafter.kind, drafter.n_slots):
            last = first + np.arange(rows.start, rows.stop)
            parts.append(_grown(text.at(last), plan, width, len(last)))
    levels = stack_levels(parts, drafter.n_slots, width)
    return DraftPools(drafter.kind, drafter.n_slots, drafter.has_tiers, levels, plan)


def batches(n_rows: int, envelope: Envelope, kind: str, n_slots: int) -> Iterator[slice]:
    """Runs of positions that fill a forward."""
    n_starts = {"eagle3": envelope.top_k, "specblock": max(envelope.starts, default=1)}.get(kind, 1)
    n_batch = max(1, N_BATCH_CANDIDATES // (n_starts * n_slots * envelope.width_of(kind)))
    yield from (slice(begin, min(begin + n_batch, n_rows)) for begin in range(0, n_rows, n_batch))


def _grown(expand: Expand, plan: Any, width: int, n_rows: int) -> list[PoolLevel]:
    """Every level of T positions: what was expanded, and what came of it."""
    if plan is None:
        starts = root_starts(n_rows)
        return [clean_level(expand(0, starts, width), starts)]
    levels: list[PoolLevel] = []

    def kept(level: int, starts: Starts, width: int) -> Expansion:
        levels.append(clean_level(expand(level, starts, width), starts))
        return levels[-1].expansion

    grow(plan, kept, n_rows)
    return levels
