"""Outcome tables against the tree module one position at a time; misses flagged, bounded, and nothing else."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import pools, text_along

from workbench import outcomes
from workbench.errors import InputError
from workbench.outcomes import OutcomeCache, OutcomeTable, Span, joined, outcome_table
from workbench.pools import DraftPools, PoolLevel, Text, expansion_rows, starts_rows
from workbench.tree import (
    PRESETS,
    BeamPlan,
    BlockPlan,
    Expansion,
    Plan,
    ProductPlan,
    Starts,
    StaticPlan,
    accept,
    grow,
    parse_plan,
    tree_of,
)

N_ROWS, N_EPISODES = 120, 6
PLANS: dict[str, tuple[str, Plan]] = {name: (parse_plan(name)[0], plan) for name, plan in PRESETS.items()} | {
    "one block": ("specblock", BlockPlan(n_blocks=1, budget=30)),
    "three blocks": ("specblock", BlockPlan(n_blocks=3, budget=40, root_width=5)),
    "eager": ("specblock", BlockPlan(is_lazy=False, budget=25)),
    "unmerged": ("specblock", BlockPlan(is_merging=False, budget=40, tier_widths=(3, 3, 3, 3))),
    "narrow beam": ("eagle3", BeamPlan(depth=3, top_k=4, budget=12)),
    "product": ("medusa", ProductPlan(budget=20)),
    "static": ("parallelspec", StaticPlan(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))),
}
del PLANS["lookup"]  # ten slots of one candidate; the others have four of ten


@pytest.fixture(scope="module")
def rig() -> dict[str, tuple[DraftPools, Text]]:
    found = {kind: pools(kind, N_ROWS) for kind in ("specblock", "eagle3", "medusa", "parallelspec")}
    return {kind: (p, text_along(p, N_EPISODES)) for kind, p in found.items()}


class SlowSource:
    """One row of the pools, looked up by whole chains of creators in a dictionary."""

    def __init__(self, found: DraftPools, row: int) -> None:
        self.found, self.row, self.is_missed = found, row, False
        self.block: dict[tuple, tuple[int, int]] = {(): (0, 0)}  # chain of (slot, rank) from the root -> level, column
        chains: list[list[tuple]] = [[()]]
        for level in range(1, len(found.levels)):
            s = found.levels[level].starts
            chains.append([])
            for column in range(int(s.n[row])):
                creator = chains[int(s.level[row, column])][int(s.start[row, column])]
                chain = (*creator, (int(s.slot[row, column]), int(s.rank[row, column])))
                chains[level].append(chain)
                self.block[chain] = level, column
        self.mine: list[list[tuple]] = []
        self.missing: list[int] = []

    def expand(self, level: int, starts: Starts, width: int) -> Expansion:
        self.mine.append([])
        parts = []
        for s in range(int(starts.n[0])):
            creator = self.mine[int(starts.level[0, s])][int(starts.start[0, s])] if level else None
            chain = () if creator is None else (*creator, (int(starts.slot[0, s]), int(starts.rank[0, s])))
            self.mine[level].append(chain)
            place = self.block.get(chain)
            if place is None:
                self.missing.append(int(starts.node[0, s]))
            e = self.found.levels[place[0] if place else 0].expansion
            block = expansion_rows(e, np.array([self.row]))
            column = place[1] if place else 0
            token = block.token[:, column : column + 1] if place else np.full_like(block.token[:, :1], -1)
            parts.append((token, block.logp[:, column : column + 1], block.tier[:, column : column + 1]))
        return Expansion(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts)))


def slow_row(plan: Plan, found: DraftPools, text: Text, row: int) -> dict[str, Any]:
    source = SlowSource(found, row)
    forest = grow(plan, source.expand)
    tree = tree_of(plan.finish(forest))
    episode = int(text.row_episode()[row])
    wanted = text.token[row + episode + 1 : text.offset[episode + 1]].tolist()

    def token_at(i: int) -> int:
        depth = 0 if i < 0 else int(tree.depth[i])
        return wanted[depth] if depth < len(wanted) else -9

    path, _ = accept(tree, token_at)
    address = [tuple(int(getattr(forest, a)[0, i]) for a in ("level", "start", "slot", "rank")) for i in source.missing]
    in_tree = set(zip(tree.level.tolist(), tree.start.tolist(), tree.slot.tolist(), tree.rank.tolist()))
    n_starts = [len(level) for level in source.mine]
    return {
        "n_accepted": len(path),
        "n_nodes": len(tree.token),
        "tree_depth": int(tree.depth.max(initial=0)),
        "n_starts": n_starts + [0] * (plan.n_levels - len(n_starts)),
        "is_missed": any(a in in_tree for a in address),
    }


@pytest.mark.parametrize("name", PLANS)
def test_every_row_is_what_the_tree_module_says_of_it_alone(rig: Any, name: str) -> None:
    kind, plan = PLANS[name]
    found, text = rig[kind]
    table = outcome_table(plan, found, Span.of(text))
    for row in range(N_ROWS):
        slow = slow_row(plan, found, text, row)
        fast = {key: getattr(table, key)[row].tolist() for key in slow}
        if slow["is_missed"]:
            assert fast.pop("n_accepted") <= slow.pop("n_accepted") <= table.n_accepted_high[row]
        else:
            assert table.n_accepted_high[row] == table.n_accepted[row]
        assert fast == slow, row


def test_the_trial_is_not_idle(rig: Any) -> None:
    found, text = rig["specblock"]
    table = outcome_table(PRESETS["specblock"], found, Span.of(text))
    assert {0, 1} <= set(table.n_accepted.tolist())
    assert 1 < table.n_starts[:, 1].mean() < 25
    assert not table.is_missed.all()


def same(a: OutcomeTable, b: OutcomeTable) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(OutcomeTable))


def test_chunks_and_parts_do_not_matter(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, text = rig["specblock"]
    whole = outcome_table(BlockPlan(), found, Span.of(text))
    halves = [
        outcome_table(
            BlockPlan(),
            found.rows(slice(*text.row_offset[[a, b]])),
            Span.of(text).rows(slice(*text.row_offset[[a, b]])),
        )
        for a, b in ((0, 2), (2, 6))
    ]
    assert same(joined(halves), whole)
    monkeypatch.setattr(outcomes, "CHUNK_ROWS", 7)
    assert same(outcome_table(BlockPlan(), found, Span.of(text)), whole)


def dropped(found: DraftPools, rng: np.random.Generator, share: float) -> DraftPools:
    """The pools without some of their starts, and without what was grown from those."""
    n_rows = found.n_rows
    kept = [np.zeros((n_rows, 1), np.int64)]  # new column of every old one, -1 = dropped
    levels = [found.levels[0]]
    for old in found.levels[1:]:
        s, e = old.starts, old.expansion
        width = s.node.shape[1]
        is_kept = (np.arange(width) < s.n[:, None]) & (rng.random((n_rows, width)) >= share)
        column = np.full((n_rows, width), -1, np.int64)
        start = np.full((n_rows, width), -1, np.int16)
        order = np.zeros((n_rows, width), np.int64)
        n = np.zeros(n_rows, np.int32)
        for t in range(n_rows):
            for c in np.flatnonzero(is_kept[t]).tolist():
                creator = kept[int(s.level[t, c])][t, int(s.start[t, c])]
                if creator >= 0:
                    column[t, c], start[t, n[t]], order[t, n[t]] = n[t], creator, c
                    n[t] += 1
        rows = np.arange(n_rows)[:, None]
        moved = [getattr(s, name)[rows, order] for name in ("node", "token", "level")]
        starts = Starts(*moved, start, s.slot[rows, order], s.rank[rows, order], n)
        levels.append(PoolLevel(Expansion(e.token[rows, order], e.logp[rows, order], e.tier[rows, order]), starts))
        kept.append(column)
    return replace(found, levels=levels)


@pytest.mark.parametrize("name", [name for name, (_, plan) in PLANS.items() if plan.n_levels > 1])
@pytest.mark.parametrize("share", [0.2, 0.7, 1.0])
def test_every_difference_of_a_smaller_envelope_is_a_flagged_miss(rig: Any, name: str, share: float) -> None:
    kind, plan = PLANS[name]
    found, text = rig[kind]
    wide = outcome_table(plan, found, Span.of(text))
    small = outcome_table(plan, dropped(found, np.random.default_rng(1), share), Span.of(text))
    assert not (wide.is_missed & ~small.is_missed).any()
    whole = ~small.is_missed
    assert (small.n_accepted[whole] == wide.n_accepted[whole]).all()
    assert (small.n_nodes[whole] == wide.n_nodes[whole]).all()
    assert (small.n_accepted <= wide.n_accepted_high).all() and (wide.n_accepted <= small.n_accepted_high).all()
    sure = ~wide.is_missed
    assert (small.n_accepted[sure] <= wide.n_accepted[sure]).all()
    if share == 1.0:
        assert small.is_missed.any()


def test_a_start_that_the_cut_prunes_is_no_miss(rig: Any) -> None:
    """With a budget of one node no start of the second level can matter, recorded or not."""
    found, text = rig["specblock"]
    bare = replace(found, levels=found.levels[:1])
    table = outcome_table(BlockPlan(budget=1), bare, Span.of(text))
    best_is_spine_end = table.is_missed  # the one node left may itself be a start
    assert (table.n_nodes == 1).all()
    assert best_is_spine_end.all()  # its own block is the only thing not known
    assert (table.n_accepted_high >= table.n_accepted).all()
    assert not outcome_table(BlockPlan(budget=1, n_blocks=1), bare, Span.of(text)).is_missed.any()


@settings(max_examples=25, deadline=None)
@given(
    budget=st.integers(1, 50), more=st.integers(1, 40), blocks=st.integers(1, 3), root=st.integers(1, 10),
    tiers=st.tuples(*[st.integers(0, 10)] * 4),
)  # fmt: skip
def test_over_one_grown_set_a_larger_budget_never_accepts_less(
    rig: Any, budget: int, more: int, blocks: int, root: int, tiers: tuple[int, int, int, int]
) -> None:
    """Dominance: grown without the lazy cut and without caps, two budgets prune the same set."""
    found, text = rig["specblock"]
    plan = BlockPlan(
        budget=budget, n_blocks=blocks, root_width=root, tier_widths=tiers, is_lazy=False, start_cap=None
    )  # fmt: skip
    small, large = (outcome_table(p, found, Span.of(text)) for p in (plan, replace(plan, budget=budget + more)))
    is_known = ~(small.is_missed | large.is_missed)
    assert (large.n_accepted[is_known] >= small.n_accepted[is_known]).all()
    assert (large.n_nodes >= small.n_nodes).all()


def test_no_peeking(rig: Any) -> None:
    """Pools and text after a row do not touch the rows whose steps end before."""
    found, text = rig["specblock"]
    table = outcome_table(BlockPlan(), found, Span.of(text))
    cut = 70
    order = np.concatenate([np.arange(cut), np.random.default_rng(0).permutation(np.arange(cut, N_ROWS))])
    changed = replace(
        found,
        levels=[PoolLevel(expansion_rows(x.expansion, order), starts_rows(x.starts, order)) for x in found.levels],
    )
    episode = int(text.row_episode()[cut])
    token = text.token.copy()
    token[cut + episode + 1 :] = 77
    other = outcome_table(BlockPlan(), changed, Span.of(replace(text, token=token)))
    reach = np.arange(N_ROWS) + np.maximum(table.n_accepted, other.n_accepted) < cut
    reach &= text.row_episode() < episode
    assert reach.sum() > 30
    for name in ("n_accepted", "n_nodes", "n_starts", "is_missed"):
        assert (getattr(table, name)[reach] == getattr(other, name)[reach]).all()


def test_what_the_pools_cannot_answer_is_an_error(rig: Any) -> None:
    found, text = rig["specblock"]
    with pytest.raises(InputError, match="looks at 11 candidates a slot, the trace's specblock pools hold 10"):
        outcome_table(BlockPlan(root_width=11), found, Span.of(text))
    with pytest.raises(InputError, match="needs 5 slots"):
        outcome_table(BlockPlan(n_slots=5), found, Span.of(text))
    with pytest.raises(InputError, match="does not fit the drafter"):
        outcome_table(BeamPlan(), found, Span.of(text))
    with pytest.raises(InputError, match="have 120 rows, the text 100"):
        outcome_table(BlockPlan(), found, Span.of(text.episodes(range(5))))


def test_no_rows_are_no_outcomes(rig: Any) -> None:
    found, text = rig["specblock"]
    table = outcome_table(BlockPlan(), found.rows(slice(0, 0)), Span.of(text.episodes([])))
    assert table.n_rows == 0 and table.n_starts.shape == (0, 2)


def test_the_cache_computes_a_table_once_and_drops_the_oldest(rig: Any) -> None:
    found, text = rig["medusa"]
    cache = OutcomeCache(n_most=2)
    plans = [ProductPlan(budget=b) for b in (5, 6, 7)]
    first = cache.table("a", plans[0], found, Span.of(text))
    assert cache.table("a", plans[0], found, Span.of(text)) is first
    assert cache.table("b", plans[0], found, Span.of(text)) is not first
    assert cache.table("a", plans[0], found, Span.of(text)) is first  # now the newest
    cache.table("a", plans[1], found, Span.of(text))
    assert cache.table("a", plans[0], found, Span.of(text)) is first
    cache.table("a", plans[2], found, Span.of(text))
    assert len(cache._tables) == 2


def test_cost_grows_no_faster_than_rows() -> None:
    """Twice the rows take about twice the time: at most three times, on a busy machine, best of three."""
    found = pools("specblock", 4000)
    text = text_along(found, 4)

    def seconds(n: int) -> float:
        part = found.rows(slice(0, n * 1000)), Span.of(text.episodes(range(n)))
        times = []
        for _ in range(3):
            began = time.process_time()
            outcome_table(BlockPlan(), *part)
            times.append(time.process_time() - began)
        return min(times)

    seconds(1)
    assert seconds(4) < 3 * seconds(2)
