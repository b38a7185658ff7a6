"""Pools: the fast recorder against the live drafter, integer for integer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from tiny_drafters import KINDS, random_drafter

from workbench.poolrecorder import record_pools
from workbench.pools import DraftPools, Envelope, PoolLevel, clean_level, root_starts
from workbench.recorded import Recording, record_answer
from workbench.sampling import Sampling
from workbench.target import Target
from workbench.tree import Expansion, Starts, grow

TINY = Envelope(width=5, starts=(6, 3), depth=3, top_k=4)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    return make_target(feature_dtype="float16")


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def recording(request: Any, target: Target) -> Recording:
    sampling = Sampling(temperature=request.param, seed=3)
    return record_answer(target, [3, 1, 4, 1, 5, 9, 2, 6], sampling, 0, 14, set())


def live_pool(drafter: Any, envelope: Envelope, r: Recording, position: int) -> list[PoolLevel]:
    """What the live drafter offers at one position, in a request of its own."""
    n_pairs = len(r.prompt_ids) + position - 1
    tokens = [*r.prompt_ids, *r.tokens][1 : n_pairs + 1]
    state = drafter.open(r.prompt_ids, n_pairs + 1)
    drafter.observe(state, r.features[:n_pairs], r.final[:n_pairs], tokens)
    levels: list[PoolLevel] = []

    def expand(level: int, starts: Starts, width: int) -> Expansion:
        found = drafter.expand(state, level, starts, width)
        levels.append(clean_level(found, starts))
        return found

    plan = envelope.plan(drafter.kind, drafter.n_slots)
    if plan is None:
        expand(0, root_starts(1), envelope.width)
    else:
        grow(plan, expand)
    return levels


def assert_same_row(pools: DraftPools, row: int, levels: list[PoolLevel]) -> None:
    assert len(pools.levels) == len(levels)
    for mine, other in zip(pools.rows(slice(row, row + 1)).levels, levels):
        n = int(other.starts.n[0])
        assert int(mine.starts.n[0]) == n
        for a, b in ((mine.expansion, other.expansion), (mine.starts, other.starts)):
            for f in fields(a):
                x, y = getattr(a, f.name), getattr(b, f.name)
                np.testing.assert_array_equal(x if x.ndim < 2 else x[:, :n], y if y.ndim < 2 else y[:, :n], f.name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_recorder_equals_the_live_drafter(kind: str, target: Target, recording: Recording) -> None:
    drafter = random_drafter(kind, target)
    pools = record_pools(drafter, TINY, recording.prompt_ids, recording.tokens, recording.features, recording.final)
    assert pools.n_rows == len(recording.tokens) - 1
    for row in range(pools.n_rows):
        assert_same_row(pools, row, live_pool(drafter, TINY, recording, row + 1))
