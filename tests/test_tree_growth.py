"""Growing against a slow reference: dicts, lists and full sorts, written from the rules alone.

Offers are a function of the token path of a start, so that cut and uncut growth meet the same candidates.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.tree import (
    PRESETS,
    BeamPlan,
    BlockPlan,
    Expansion,
    Forest,
    Plan,
    ProductPlan,
    Starts,
    StaticPlan,
    Tree,
    Trees,
    accept,
    chain_tree,
    grow,
    tree_of,
)

Path = tuple[int, ...]
Slot = tuple[list[tuple[int, int]], int]  # (token, logp) best first, and the tier
Offer = Callable[[Path], list[Slot]]
Node = dict[str, Any]
COLUMNS = ("token", "parent", "depth", "cum", "level", "start", "slot", "rank")
LOGPS = {  # how the log-probabilities of a slot are drawn
    "ties": lambda rng: rng.choice((0, -100)),
    "zero": lambda rng: 0,
    "spread": lambda rng: -rng.randrange(3000),
    "wide": lambda rng: -rng.randrange(32768),
    "sharp": lambda rng: -rng.choice((rng.randrange(60), rng.randrange(300), rng.randrange(8000))),
}


def random_offer(
    seed: int, style: str, n_slots: int, width: int, n_vocab: int, has_tiers: bool, path: Path
) -> list[Slot]:
    """K slots of candidates that depend on the path alone; some slots offer fewer than `width` or none."""
    rng = random.Random(f"{seed}/{path}")
    slots = []
    for _ in range(n_slots):
        n = min(n_vocab, rng.choice((width, width, width, rng.randrange(width + 1))))
        logps = sorted((LOGPS[style](rng) for _ in range(n)), reverse=True)
        tokens = rng.sample(range(n_vocab), n)
        slots.append((list(zip(tokens, logps)), rng.randrange(4) if has_tiers else -1))
    return slots


# ------------------------------------------------------------------------------------------------ reference


def prune_order(nodes: list[Node], ids: Any = None) -> list[int]:
    ids = range(len(nodes)) if ids is None else ids
    return sorted(ids, key=lambda i: (-nodes[i]["cum"], nodes[i]["depth"], i))


def path_of(nodes: list[Node], i: int) -> Path:
    return () if i < 0 else (*path_of(nodes, nodes[i]["parent"]), nodes[i]["token"])


def new_node(nodes: list[Node], parent: int, token: int, logp: int, **address: int) -> int:
    up = nodes[parent] if parent >= 0 else {"cum": 0, "depth": 0}
    nodes.append({"token": token, "parent": parent, "cum": up["cum"] + logp, "depth": up["depth"] + 1, **address})
    return len(nodes) - 1


def reference_width(plan: BlockPlan, level: int, k: int, top: int, tier: int) -> int:
    if level == 0 and k == 0:  # ln .9, .8, .6 in steps of 1/1024: -107.9, -228.499, -523.1
        trim = 3 if top >= -108 else 5 if top >= -228 else 8 if top >= -523 else 10**6
        return min(plan.root_width, trim) if plan.has_trims else plan.root_width
    width = max(1, plan.plain_width if tier == -1 else plan.tier_widths[tier])
    trim = 2 if top >= -53 else 3 if top >= -166 else 10**6  # ln .95, .85: -52.5, -166.4
    return min(width, trim) if plan.has_trims else width


def reference_blocks(plan: BlockPlan, offer: Offer, is_lazy: bool) -> tuple[list[Node], list[list[int]]]:
    """All nodes in creation order, and the starts of every level."""
    nodes: list[Node] = []
    merged: dict[tuple[int, int], int] = {}
    has_started: set[int] = set()
    starts, history = [-1], []
    for level in range(plan.n_blocks):
        history.append(starts)
        has_started |= set(starts)
        asked: list[int] = []
        for column, start in enumerate(starts):
            slots = offer(path_of(nodes, start))[: plan.n_slots]
            odd = [tier for _, tier in slots if tier != 0]
            is_flagged = plan.has_give_up and bool(odd) and odd[0] == 3
            has_given_up, parent = False, start
            wanted: list[int] = []
            for k, (candidates, tier) in enumerate(slots):
                if not candidates:
                    parent = -2
                    break
                is_root_slot = level == 0 and k == 0
                if plan.has_give_up and tier == 3 and plan.tier_widths[3] == 0 and not is_root_slot:
                    has_given_up = True
                width = 1 if has_given_up else reference_width(plan, level, k, candidates[0][1], tier)
                ids = []
                for rank, (token, logp) in enumerate(candidates[:width], start=1):
                    i = merged.get((parent, token)) if plan.is_merging else None
                    if i is None:
                        i = new_node(nodes, parent, token, logp, level=level, start=column, slot=k, rank=rank)
                        merged[parent, token] = i
                    ids.append(i)
                if width > 1:
                    wanted += ids
                parent = ids[0]
            if parent >= 0 and not is_flagged:
                wanted.append(parent)
            asked += [i for i in dict.fromkeys(wanted) if i not in has_started and i not in asked]
        if is_lazy:
            best = set(prune_order(nodes)[: plan.budget])
            asked = [i for i in asked if i in best]
        cap = plan.first_start_cap if level == 0 else plan.start_cap
        if cap is not None:
            best = set(prune_order(nodes, asked)[:cap])
            asked = [i for i in asked if i in best]
        starts = asked
        if not starts:
            break
    return nodes, history


def reference_beams(plan: BeamPlan, offer: Offer) -> tuple[list[Node], list[list[int]]]:
    nodes: list[Node] = []
    starts, history = [-1], []
    for level in range(plan.depth + 1):
        history.append(starts)
        born = []
        for column, start in enumerate(starts):
            for rank, (token, logp) in enumerate(offer(path_of(nodes, start))[0][0][: plan.top_k], start=1):
                born.append(new_node(nodes, start, token, logp, level=level, start=column, slot=0, rank=rank))
        starts = sorted(born, key=lambda i: (-nodes[i]["cum"], i))[: plan.top_k]
        if not starts:
            break
    return nodes, history


def reference_paths(slots: list[Slot], paths: list[Path]) -> list[Node]:
    """The nodes of these rank paths (prefixes first) where their candidates exist."""
    nodes: list[Node] = []
    ids: dict[Path, int] = {(): -1}
    for path in paths:
        k, candidates = len(path) - 1, slots[len(path) - 1][0]
        if path[:-1] in ids and path[-1] < len(candidates):
            token, logp = candidates[path[-1]]
            ids[path] = new_node(nodes, ids[path[:-1]], token, logp, level=0, start=0, slot=k, rank=path[-1] + 1)
    return nodes


def reference_product(plan: ProductPlan, slots: list[Slot]) -> list[Node]:
    """Every path of the product by (-cumulative, depth, path), cut to the budget."""
    whole = []
    for depth in range(1, plan.max_depth + 1):
        for path in product(*(range(min(plan.width, len(slots[k][0]))) for k in range(depth))):
            whole.append((-sum(slots[k][0][rank][1] for k, rank in enumerate(path)), depth, path))
    return reference_paths(slots, [path for _, _, path in sorted(whole)[: plan.budget]])


def reference_tree(nodes: list[Node], budget: int) -> list[Node]:
    kept = sorted(prune_order(nodes)[:budget])
    place = {i: j for j, i in enumerate(kept)} | {-1: -1}
    return [{**nodes[i], "parent": place[nodes[i]["parent"]]} for i in kept]


# ------------------------------------------------------------------------------------------------ the real thing


def expansion_of(slots: list[list[list[Slot]]], width: int) -> Expansion:
    """[T][S] offers of K slots as arrays; a start of padding is an empty list."""
    n_rows, n_starts = len(slots), max(len(row) for row in slots)
    n_slots = max(len(offer) for row in slots for offer in row)
    token = np.full((n_rows, n_starts, n_slots, width), -1, np.int32)
    logp = np.full(token.shape, -7, np.int16)
    tier = np.full(token.shape[:3], -1, np.int8)
    for t, s in product(range(n_rows), range(n_starts)):
        for k, (candidates, c) in enumerate(slots[t][s]):
            tier[t, s, k] = c
            for r, (x, value) in enumerate(candidates[:width]):
                token[t, s, k, r], logp[t, s, k, r] = x, value
    return Expansion(token, logp, tier)


def forest_path(forest: Forest, t: int, i: int) -> Path:
    return () if i < 0 else (*forest_path(forest, t, int(forest.parent[t, i])), int(forest.token[t, i]))


def grown(plan: Plan, offers: list[Offer]) -> tuple[Forest, list[Starts], list[list[list[Path]]]]:
    """The forest of T positions, with the starts of every level and their paths."""
    forest, history, paths = plan.seed(len(offers)), [], []
    for level in range(plan.n_levels):
        starts = plan.starts(forest, level)
        if not starts.n.any():
            break
        history.append(starts)
        paths.append(
            [[forest_path(forest, t, i) for i in row[:n]] for t, (row, n) in enumerate(zip(starts.node, starts.n))]
        )
        most = starts.node.shape[1]
        slots = [
            [offers[t](path) for path in row] + [[] for _ in range(most - len(row))] for t, row in enumerate(paths[-1])
        ]
        plan.attach(forest, starts, expansion_of(slots, plan.width), level)
    return forest, history, paths


def rows(nodes: list[Node], columns: tuple[str, ...] = COLUMNS) -> list[tuple[int, ...]]:
    return [tuple(node[name] for name in columns) for node in nodes]


def tree_rows(tree: Tree | Forest, t: int | None = None, columns: tuple[str, ...] = COLUMNS) -> list[tuple[int, ...]]:
    arrays = [getattr(tree, name) if t is None else getattr(tree, name)[t, : tree.n[t]] for name in columns]
    return [tuple(int(x) for x in row) for row in zip(*arrays)]


def check_tree(tree: Tree, budget: int) -> None:
    """Budget, parents first, closure, depth and falling log-probability."""
    assert len(tree.token) <= budget
    for i, up in enumerate(tree.parent.tolist()):
        assert -1 <= up < i
        assert tree.depth[i] == (1 if up < 0 else tree.depth[up] + 1)
        assert tree.cum[i] <= (0 if up < 0 else tree.cum[up])


seeds = st.integers(0, 10**9)
styles = st.sampled_from(sorted(LOGPS))
vocabularies = st.sampled_from((2, 3, 5, 40))
block_plans = st.builds(
    BlockPlan,
    n_slots=st.integers(1, 4),
    root_width=st.integers(1, 6),
    tier_widths=st.tuples(*[st.integers(0, 4)] * 4),
    n_blocks=st.integers(1, 4),
    budget=st.integers(1, 40),
    plain_width=st.integers(0, 3),
    has_trims=st.booleans(),
    is_merging=st.booleans(),
    has_give_up=st.booleans(),
    start_cap=st.sampled_from((None, 1, 2, 5)),
    first_start_cap=st.sampled_from((None, None, 1, 3)),
)


def small(plan: BlockPlan) -> BlockPlan:
    """The plan with caps that keep uncut growth of many blocks within reach of the slow reference."""
    return plan if plan.n_blocks < 3 else replace(plan, start_cap=plan.start_cap or 8, first_start_cap=6)


@settings(max_examples=150, deadline=None)
@given(block_plans, seeds, styles, vocabularies, st.booleans())
def test_uncut_blocks_equal_the_reference_node_for_node(
    plan: BlockPlan, seed: int, style: str, n_vocab: int, has_tiers: bool
) -> None:
    plan = replace(small(plan), is_lazy=False)
    offer = partial(random_offer, seed, style, plan.n_slots, plan.width, n_vocab, has_tiers)
    nodes, history = reference_blocks(plan, offer, is_lazy=False)
    forest, starts, _ = grown(plan, [offer])
    assert tree_rows(forest, 0) == rows(nodes)
    assert [s.node[0, : s.n[0]].tolist() for s in starts] == history
    assert tree_rows(tree_of(plan.finish(forest))) == rows(reference_tree(nodes, plan.budget))


@settings(max_examples=150, deadline=None)
@given(block_plans, seeds, styles, vocabularies, st.booleans())
def test_lazy_blocks_equal_the_reference_and_uncut_growth(
    plan: BlockPlan, seed: int, style: str, n_vocab: int, has_tiers: bool
) -> None:
    plan = small(plan)
    offer = partial(random_offer, seed, style, plan.n_slots, plan.width, n_vocab, has_tiers)
    nodes, history = reference_blocks(plan, offer, is_lazy=True)
    forest, starts, paths = grown(plan, [offer])
    assert [row for (row,) in paths] == [[path_of(nodes, i) for i in level] for level in history]
    for s, level in zip(starts[1:], history[1:]):
        assert tree_rows(s, 0, ("token", "level", "start", "slot", "rank")) == rows(
            [nodes[i] for i in level], ("token", "level", "start", "slot", "rank")
        )
    tree = tree_of(plan.finish(forest))
    check_tree(tree, plan.budget)
    assert tree_rows(tree) == rows(reference_tree(nodes, plan.budget))
    # Uncut growth expands more starts, so the columns of starts differ; nothing else does.
    uncut, _ = reference_blocks(plan, offer, is_lazy=False)
    columns = tuple(name for name in COLUMNS if name != "start")
    assert tree_rows(tree, columns=columns) == rows(reference_tree(uncut, plan.budget), columns)


def mixed(x: np.ndarray) -> np.ndarray:
    """A hash of uint64 numbers (splitmix64)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed_trees(plan: BlockPlan, n_positions: int, steps: int) -> Trees:
    """Trees of many positions over two tokens, whose offers are hashes of the path, at most `steps` apart."""
    forest, roots = plan.seed(n_positions), mixed(np.arange(n_positions, dtype=np.uint64))
    rows = np.arange(n_positions)[:, None]
    for level in range(plan.n_levels):
        starts = plan.starts(forest, level)
        if not starts.n.any():
            break
        paths = np.empty((n_positions, forest.nodes.shape[1] + 1), np.uint64)
        paths[:, -1] = roots  # where index -1 finds it
        for i in range(forest.nodes.shape[1]):
            is_node = i < forest.n
            up, token = np.where(is_node, forest.parent[:, i], -1), np.where(is_node, forest.token[:, i], 0)
            paths[:, i] = mixed(paths[rows[:, 0], up] * np.uint64(3) + token.astype(np.uint64))
        at = paths[rows, np.maximum(starts.node, -1)]
        draws = [mixed(at[..., None] + np.arange(plan.n_slots, dtype=np.uint64) + np.uint64(99 * j)) for j in range(4)]
        first = (draws[0] % np.uint64(2)).astype(np.int32)
        values = np.sort(np.stack([draws[1] % np.uint64(steps), draws[2] % np.uint64(steps)], -1).astype(np.int16), -1)
        tier = (draws[3] % np.uint64(4)).astype(np.int8)
        plan.attach(forest, starts, Expansion(np.stack([first, 1 - first], -1), -values, tier), level)
    return plan.finish(forest)


@pytest.mark.parametrize(
    ("steps", "plan"),
    [
        (8000, BlockPlan(root_width=2, tier_widths=(2, 1, 2, 1), n_blocks=3, budget=20, start_cap=20)),
        (3000, BlockPlan(root_width=1, tier_widths=(2, 0, 2, 2), n_blocks=3, budget=20, start_cap=None)),
        (300, BlockPlan(n_slots=3, root_width=2, tier_widths=(1, 2, 2, 0), n_blocks=2, budget=9)),
        (3000, BlockPlan(n_slots=2, root_width=2, tier_widths=(1, 2, 2, 2), n_blocks=4, budget=15, start_cap=5)),
    ],
)
def test_what_is_dropped_could_not_have_mattered(steps: int, plan: BlockPlan) -> None:
    """Two tokens make nearly every block merge; a dropped node that a later candidate should have met shows here."""
    lazy, uncut = hashed_trees(plan, 4000, steps), hashed_trees(replace(plan, is_lazy=False), 4000, steps)
    for name in ("n", *COLUMNS):
        if name != "start":
            assert (getattr(lazy, name) == getattr(uncut, name)).all()


@settings(max_examples=60, deadline=None)
@given(block_plans, seeds, styles, vocabularies)
def test_spine_names_the_rank_1_node_of_every_slot(plan: BlockPlan, seed: int, style: str, n_vocab: int) -> None:
    plan = replace(small(plan), is_lazy=False)
    offer = partial(random_offer, seed, style, plan.n_slots, plan.width, n_vocab, True)
    forest, _, paths = grown(plan, [offer])
    for spine, ((*starts,),) in zip(forest.spine, paths):
        for chain, path in zip(spine[0], starts):
            want = []
            for candidates, _tier in offer(path):
                if not candidates:
                    break
                want.append(candidates[0][0])
            got = [forest_path(forest, 0, i) for i in chain if i >= 0]
            if plan.is_merging:
                assert got == [path + tuple(want[: k + 1]) for k in range(len(want))]
            assert len(got) == len(want) and (chain[len(want) :] == -2).all()


@settings(max_examples=100, deadline=None)
@given(
    st.builds(BeamPlan, depth=st.integers(0, 4), top_k=st.integers(1, 4), budget=st.integers(1, 60)),
    seeds, styles, vocabularies,
)  # fmt: skip
def test_beams_equal_the_reference_node_for_node(plan: BeamPlan, seed: int, style: str, n_vocab: int) -> None:
    offer = partial(random_offer, seed, style, 1, plan.top_k, n_vocab, False)
    nodes, history = reference_beams(plan, offer)
    forest, starts, _ = grown(plan, [offer])
    assert tree_rows(forest, 0) == rows(nodes)
    assert [s.node[0, : s.n[0]].tolist() for s in starts] == history
    tree = tree_of(plan.finish(forest))
    check_tree(tree, plan.budget)
    assert tree_rows(tree) == rows(reference_tree(nodes, plan.budget))


@settings(max_examples=100, deadline=None)
@given(st.sets(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1), seeds, styles, vocabularies)
def test_static_trees_equal_the_reference(leaves: set[Path], seed: int, style: str, n_vocab: int) -> None:
    paths = {leaf[: k + 1] for leaf in leaves for k in range(len(leaf))}
    plan = StaticPlan(tuple(paths))
    slots = random_offer(seed, style, 4, 5, n_vocab, False, ())
    forest, _, _ = grown(plan, [lambda path: slots])
    nodes = reference_paths(slots, sorted(paths, key=lambda path: (len(path), path)))
    assert tree_rows(tree_of(plan.finish(forest))) == rows(nodes)


@settings(max_examples=100, deadline=None)
@given(
    st.builds(ProductPlan, budget=st.integers(1, 40), max_depth=st.integers(1, 4), width=st.integers(1, 5)),
    seeds, styles, vocabularies,
)  # fmt: skip
def test_product_trees_are_the_exact_best(plan: ProductPlan, seed: int, style: str, n_vocab: int) -> None:
    slots = random_offer(seed, style, 4, 5, n_vocab, False, ())
    forest, _, _ = grown(plan, [lambda path: slots])
    tree = tree_of(plan.finish(forest))
    check_tree(tree, plan.budget)
    assert tree_rows(tree) == rows(reference_product(plan, slots))


def any_plan(name: str) -> tuple[Plan, int]:
    """A preset with a vocabulary that makes merges (blocks) or missing candidates (the others) common."""
    return PRESETS[name], 14 if name.startswith("specblock") else 8


@pytest.mark.parametrize("name", PRESETS)
def test_rows_of_many_positions_equal_single_runs(name: str) -> None:
    plan, n_vocab = any_plan(name)
    offers = [
        partial(random_offer, seed, style, plan.n_slots, plan.width, n_vocab, True)
        for seed, style in enumerate(sorted(LOGPS) * 2)
    ]
    forest, history, _ = grown(plan, offers)
    trees = plan.finish(forest)
    for t, offer in enumerate(offers):
        alone, own_history, _ = grown(plan, [offer])
        assert tree_rows(forest, t) == tree_rows(alone, 0)
        assert tree_rows(tree_of(trees, t)) == tree_rows(tree_of(plan.finish(alone)))
        for level, starts in enumerate(own_history):
            n = int(starts.n[0])
            assert history[level].n[t] == n
            for column in ("node", "token", "level", "start", "slot", "rank"):
                assert getattr(history[level], column)[t, :n].tolist() == getattr(starts, column)[0, :n].tolist()
        check_padding(trees, t)
    for starts in history:
        is_padding = np.arange(starts.node.shape[1]) >= starts.n[:, None]
        assert ((starts.node == -2) == is_padding).all() and (starts.rank[is_padding] == -1).all()


def check_padding(trees: Trees, t: int) -> None:
    n = int(trees.n[t])
    assert (trees.token[t, n:] == -1).all() and (trees.parent[t, n:] == -2).all()
    assert not any(getattr(trees, name)[t, n:].any() for name in ("depth", "cum", "level", "start", "slot", "rank"))


@pytest.mark.parametrize("name", PRESETS)
def test_grow_drives_a_source_level_by_level(name: str) -> None:
    plan, _ = any_plan(name)
    calls = []

    def expand(level: int, starts: Starts, width: int) -> Expansion:
        calls.append((level, width, starts.node.shape[1]))
        shape = (*starts.node.shape, plan.n_slots, width)
        token = np.broadcast_to(np.arange(width, dtype=np.int32), shape)
        return Expansion(token, np.full(shape, -1000, np.int16), np.zeros(shape[:3], np.int8))

    forest = grow(plan, expand, 3)
    trees = plan.finish(forest)
    assert [level for level, _, _ in calls] == list(range(plan.n_levels)) == list(range(len(forest.spine)))
    assert {width for _, width, _ in calls} == {plan.width}
    assert len(set(trees.n.tolist())) == 1 and 0 < trees.n[0] <= plan.budget
    assert trees.token.shape == (3, plan.budget)


def test_eagle_pool_and_depth() -> None:
    plan = PRESETS["eagle3"]
    offer = partial(random_offer, 3, "spread", 1, 10, 500, False)
    full = lambda path: [([(x, -50 * r - len(path)) for r, (x, _) in enumerate(offer((*path, 1))[0][0])], -1)]  # noqa: E731
    ten = lambda path: full(path) if len(full(path)[0][0]) == 10 else [([(r, -50 * r) for r in range(10)], -1)]  # noqa: E731
    forest, history, _ = grown(plan, [ten])
    assert forest.n.tolist() == [710] and len(history) == 8
    assert [int(s.n[0]) for s in history] == [1] + [10] * 7
    assert forest.depth[0, :710].max() == 8


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("logp", [0, -1, -32767])
def test_equal_probabilities_keep_the_budget_and_parents(name: str, logp: int) -> None:
    """All candidates tie (0: every path has probability 1), so only depth and creation order decide."""
    plan, _ = any_plan(name)
    forest, _, _ = grown(plan, [lambda path: [([(r, logp) for r in range(plan.width)], 2)] * plan.n_slots])
    tree = tree_of(plan.finish(forest))
    check_tree(tree, plan.budget)
    assert len(tree.token) == min(plan.budget, int(forest.n[0]))
    if isinstance(plan, BlockPlan | BeamPlan):  # shallow first: a level is cut only where no deeper node is kept
        kept, grown_at = (
            np.bincount(tree.depth, minlength=20),
            np.bincount(forest.depth[0, : forest.n[0]], minlength=20),
        )
        deepest = int(tree.depth.max())
        assert (kept[:deepest] == grown_at[:deepest]).all()


@pytest.mark.parametrize("name", PRESETS)
def test_certain_chain_survives_whole(name: str) -> None:
    """p = 1 along the chain and nearly 0 beside it: every plan keeps the chain to its full depth."""
    plan, _ = any_plan(name)
    forest, _, _ = grown(plan, [lambda path: [([(r, -20000 * (r > 0)) for r in range(plan.width)], 0)] * plan.n_slots])
    tree = tree_of(plan.finish(forest))
    check_tree(tree, plan.budget)
    path, bonus = accept(tree, lambda i: 0)
    assert len(path) == plan.n_levels * plan.n_slots and bonus == 0
    assert tree.cum[path].tolist() == [0] * len(path)


def accepted(tree: Tree, target: Callable[[Path], int]) -> int:
    paths: dict[int, Path] = {-1: ()}
    for i, up in enumerate(tree.parent.tolist()):
        paths[i] = (*paths[up], int(tree.token[i]))
    return len(accept(tree, lambda i: target(paths[i]))[0])


@settings(max_examples=100, deadline=None)
@given(block_plans | st.builds(BeamPlan, depth=st.integers(0, 3), top_k=st.integers(1, 4)), seeds, styles, seeds)
def test_a_larger_budget_never_accepts_less(plan: BlockPlan | BeamPlan, seed: int, style: str, other: int) -> None:
    plan = small(plan) if isinstance(plan, BlockPlan) else plan
    offer = partial(random_offer, seed, style, plan.n_slots, plan.width, 3, True)
    counts, previous = [], None
    for budget in (1, 2, 5, 13, 60, 200):
        sized = replace(plan, budget=budget)
        tree = tree_of(sized.finish(grown(sized, [offer])[0]))
        counts.append(accepted(tree, lambda path: random.Random(f"{other}/{path}").randrange(3)))
        assert 0 <= counts[-1] <= tree.depth.max(initial=0)
        paths = {tuple(row) for row in tree_rows(tree, columns=("token", "depth", "cum"))}
        assert previous is None or previous <= paths
        previous = paths
    assert counts == sorted(counts)


@settings(max_examples=100, deadline=None)
@given(block_plans, seeds, styles, seeds)
def test_a_tree_accepts_no_less_than_any_of_its_chains(plan: BlockPlan, seed: int, style: str, other: int) -> None:
    plan = small(plan)
    offer = partial(random_offer, seed, style, plan.n_slots, plan.width, 3, True)
    tree = tree_of(plan.finish(grown(plan, [offer])[0]))
    target = lambda path: random.Random(f"{other}/{path}").randrange(3)  # noqa: E731
    for i in range(len(tree.token)):
        chain = []
        while i >= 0:
            chain.append(int(tree.token[i]))
            i = int(tree.parent[i])
        assert accepted(chain_tree(chain[::-1]), target) <= accepted(tree, target)


# ------------------------------------------------------------------------------------------------ by hand

A = BlockPlan(n_slots=2, root_width=2, tier_widths=(1, 2, 3, 0), n_blocks=2, budget=60)
OFFERS_A: dict[Path, list[Slot]] = {
    (): [([(10, -100), (11, -200), (12, -300)], 0), ([(20, -50), (21, -70), (22, -90)], 1)],
    (10,): [([(20, -10), (23, -20), (24, -90)], 1), ([(30, -5), (31, -6)], 0)],
    (11,): [([(20, -30), (21, -40), (22, -50)], 3), ([(31, -1), (32, -2)], 1)],
    (10, 20): [([(30, -7), (33, -9), (34, -11)], 1), ([(40, -3), (41, -4)], 0)],
    (10, 21): [([(20, -60), (21, -61)], 0), ([(30, -40), (31, -41)], 0)],
}
# token, parent, depth, cum, level, start, slot, rank
NODES_A = [
    (10, -1, 1, -100, 0, 0, 0, 1),
    (11, -1, 1, -200, 0, 0, 0, 2),
    (20, 0, 2, -150, 0, 0, 1, 1),
    (21, 0, 2, -170, 0, 0, 1, 2),
    (23, 0, 2, -120, 1, 0, 0, 2),  # the rank 1 of this slot, token 20 at -110, merged into node 2, which keeps -150
    (30, 2, 3, -155, 1, 0, 1, 1),
    (20, 1, 2, -230, 1, 1, 0, 1),  # gives up: no siblings here or at the next slot
    (31, 6, 3, -231, 1, 1, 1, 1),
    (33, 2, 3, -159, 1, 2, 0, 2),  # the rank 1, token 30 at -157, merged into node 5
    (40, 5, 4, -158, 1, 2, 1, 1),
    (20, 3, 3, -230, 1, 3, 0, 1),
    (30, 10, 4, -270, 1, 3, 1, 1),
]


def test_two_merging_blocks_by_hand() -> None:
    forest, history, paths = grown(A, [OFFERS_A.__getitem__])
    assert tree_rows(forest, 0) == NODES_A
    assert paths == [[[()]], [[(10,), (11,), (10, 20), (10, 21)]]]
    assert history[1].node.tolist() == [[0, 1, 2, 3]]
    assert tree_rows(history[1], 0, ("level", "start", "slot", "rank")) == [
        (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 1), (0, 0, 1, 2),
    ]  # fmt: skip
    assert forest.spine[0].tolist() == [[[0, 2]]]
    assert forest.spine[1].tolist() == [[[2, 5], [6, 7], [5, 9], [10, 11]]]


def test_two_merging_blocks_pruned_by_hand() -> None:
    """Best six of the twelve: -100, -120, -150, -155, -158, -159."""
    plan = replace(A, budget=6)
    tree = tree_of(plan.finish(grown(plan, [OFFERS_A.__getitem__])[0]))
    assert tree.token.tolist() == [10, 20, 23, 30, 33, 40]
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 3]
    assert tree.cum.tolist() == [-100, -150, -120, -155, -159, -158]
    assert tree.depth.tolist() == [1, 2, 2, 3, 3, 4]
    assert accept(tree, {-1: 10, 0: 20, 1: 30, 3: 41}.__getitem__) == ([0, 1, 3], 41)


def test_without_merging_duplicates_stand_side_by_side() -> None:
    """Nodes 2 and 4 are both token 20 under node 0; acceptance follows both and finds the deeper path, under node 2."""
    plan = replace(A, is_merging=False, is_lazy=False, budget=8)
    forest = grown(plan, [OFFERS_A.__getitem__])[0]
    assert tree_rows(forest, 0) == NODES_A[:4] + [
        (20, 0, 2, -110, 1, 0, 0, 1),
        (23, 0, 2, -120, 1, 0, 0, 2),
        (30, 4, 3, -115, 1, 0, 1, 1),
        (20, 1, 2, -230, 1, 1, 0, 1),
        (31, 7, 3, -231, 1, 1, 1, 1),
        (30, 2, 3, -157, 1, 2, 0, 1),
        (33, 2, 3, -159, 1, 2, 0, 2),
        (40, 9, 4, -160, 1, 2, 1, 1),
        (20, 3, 3, -230, 1, 3, 0, 1),
        (30, 12, 4, -270, 1, 3, 1, 1),
    ]
    tree = tree_of(plan.finish(forest))
    assert tree.cum.tolist() == [-100, -150, -110, -120, -115, -157, -159, -160]
    assert tree.parent.tolist() == [-1, 0, 0, 0, 2, 1, 1, 5]
    asked: list[int] = []

    def token_at(i: int) -> int:
        asked.append(i)
        return {-1: 10, 0: 20, 1: 30}.get(i, 40)

    assert accept(tree, token_at) == ([0, 1, 5, 7], 40)
    assert asked == [-1, 0, 1, 5, 7]


HITCH = BlockPlan(n_slots=3, root_width=1, tier_widths=(1, 2, 3, 0), n_blocks=2)


@pytest.mark.parametrize(
    ("tiers", "starts"),
    [
        ((0, 0, 0), [(1, 2, 3)]),  # nothing branches: the spine end hitch-hikes
        ((3, 0, 0), []),  # flagged by slot 0, whose width is the root's all the same
        ((0, 3, 0), []),  # flagged
        ((1, 3, 0), [(1, 2, 3)]),  # gives up at slot 1, but its first odd tier is 1: not flagged
        ((1, 1, 0), [(1, 2), (1, 9), (1, 2, 3)]),  # the branching slot's two, then the spine end
        ((1, 0, 1), [(1, 2, 3), (1, 2, 9)]),  # the spine end starts already
        ((1, 3, 1), [(1, 2, 3)]),  # no siblings after the give-up
        ((-1, -1, -1), [(1, 2), (1, 9), (1, 2, 3), (1, 2, 9)]),  # no rank head: plain width 2
    ],
)
def test_give_up_and_hitch_hike_by_hand(tiers: tuple[int, ...], starts: list[Path]) -> None:
    offer = lambda path: [([(k + 1, -10), (9, -20), (8, -30)], c) for k, c in enumerate(tiers)]  # noqa: E731
    forest, _, paths = grown(HITCH, [lambda path: offer(path)])
    assert [row[0] for row in paths[1:]] == ([starts] if starts else [])
    chained, _, paths = grown(replace(HITCH, has_give_up=False, tier_widths=(1, 1, 1, 1), plain_width=1), [offer])
    assert paths[1] == [[(1, 2, 3)]] and chained.n.tolist() == [6]


@pytest.mark.parametrize(
    ("top", "root", "other"),
    [(-53, 3, 2), (-54, 3, 3), (-108, 3, 3), (-109, 5, 3), (-166, 5, 3), (-167, 5, 4), (-228, 5, 4), (-229, 8, 4),
     (-523, 8, 4), (-524, 9, 4)],
)  # fmt: skip
def test_trims_by_hand(top: int, root: int, other: int) -> None:
    """Thresholds .95 -> -53, .9 -> -108, .85 -> -166, .8 -> -228, .6 -> -523 steps of 1/1024 nat."""
    plan = BlockPlan(n_slots=2, root_width=9, tier_widths=(2, 4, 6, 4), n_blocks=1, has_trims=True, budget=60)
    forest, _, _ = grown(
        plan, [lambda path: [([(r, top - r) for r in range(9)], 3), ([(r, top - r) for r in range(9)], 1)]]
    )
    assert forest.n.tolist() == [root + other]
    assert int((forest.depth[0] == 1).sum()) == root
    narrow = replace(plan, root_width=2, tier_widths=(1, 1, 1, 1))
    assert grown(narrow, [lambda path: [([(r, top - r) for r in range(9)], 0)] * 2])[0].n.tolist() == [2 + 1]


def test_a_merging_candidate_makes_an_old_node_a_start() -> None:
    """Node (1, 2) is a plain spine node of block 0 (tier 0); block 1 under (1,) offers it again at a branching slot."""
    plan = BlockPlan(n_slots=3, root_width=2, tier_widths=(1, 2, 3, 0), n_blocks=3, budget=60)
    offers: dict[Path, list[Slot]] = {
        (): [([(1, -10), (9, -20)], 0), ([(2, -10)], 0), ([(3, -10)], 3)],  # flagged: no hitch-hike
        (1,): [([(2, -5), (7, -6)], 1), ([(4, -5)], 0), ([(5, -5)], 0)],
        (9,): [([(2, -5)], 0), ([(4, -5)], 3), ([(5, -5)], 0)],
    }
    rest: list[Slot] = [([(6, -1)], 0)] * 3
    forest, history, paths = grown(plan, [lambda path: offers.get(path, rest)])
    assert paths[1] == [[(1,), (9,)]]
    assert paths[2] == [[(1, 2), (1, 7), (1, 2, 4, 5)]]
    # (1, 2) keeps the address of block 0; the hitch-hiking end and (1, 7) have block 1's.
    assert tree_rows(history[2], 0, ("level", "start", "slot", "rank")) == [(0, 0, 1, 1), (1, 0, 0, 2), (1, 0, 2, 1)]


def test_caps_keep_the_best_in_order() -> None:
    plan = BlockPlan(n_slots=1, root_width=4, tier_widths=(4, 4, 4, 4), n_blocks=3, start_cap=3, first_start_cap=2)
    logps = {(): (-40, -50, -60, -70), (0,): (-1, -90, -91, -92), (1,): (-2, -3, -95, -96)}
    offer = lambda path: [([(r, v) for r, v in enumerate(logps.get(path, (-5, -5, -5, -5)))], 0)]  # noqa: E731
    _, _, paths = grown(plan, [offer])
    assert paths[1] == [[(0,), (1,)]]
    assert paths[2] == [[(0, 0), (1, 0), (1, 1)]]  # -41, -52, -53
    assert grown(replace(plan, start_cap=None), [offer])[2][2] == [
        [(0, r) for r in range(4)] + [(1, r) for r in range(4)]
    ]


def test_starts_that_cannot_survive_are_not_started() -> None:
    plan = BlockPlan(n_slots=1, root_width=4, n_blocks=2, budget=2)
    offer = lambda path: [([(r, -10 * r) for r in range(4)], 0)]  # noqa: E731
    assert grown(plan, [offer])[2][1] == [[(0,), (1,)]]
    assert grown(replace(plan, is_lazy=False), [offer])[2][1] == [[(0,), (1,), (2,), (3,)]]


# ------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("plan", [
    BlockPlan(n_slots=1, root_width=1, n_blocks=1, budget=1), BeamPlan(depth=0, top_k=1, budget=1),
    StaticPlan(((0,),)), ProductPlan(budget=1, max_depth=1, width=1),
])  # fmt: skip
def test_depth_1_width_1(plan: Plan) -> None:
    forest, _, _ = grown(plan, [lambda path: [([(5, -3), (6, -4)], 0)]])
    tree = tree_of(plan.finish(forest))
    assert tree_rows(tree) == [(5, -1, 1, -3, 0, 0, 0, 1)]
    assert accept(tree, lambda i: 5) == ([0], 5) and accept(tree, lambda i: 6) == ([], 6)


@pytest.mark.parametrize("name", PRESETS)
def test_no_candidate_at_all_is_an_empty_tree(name: str) -> None:
    plan, _ = any_plan(name)
    forest, _, _ = grown(plan, [lambda path: [([], 0)] * plan.n_slots])
    tree = tree_of(plan.finish(forest))
    assert len(tree.token) == 0 and accept(tree, lambda i: 7) == ([], 7)


@pytest.mark.parametrize("name", PRESETS)
def test_a_vocabulary_smaller_than_the_width(name: str) -> None:
    """Two tokens only: by -1 candidates and by an expansion of two columns alike."""
    plan, _ = any_plan(name)
    offer = lambda path: [([(0, -100), (1, -200)], 1)] * plan.n_slots  # noqa: E731
    padded = plan.finish(grown(plan, [offer])[0])

    def expand(level: int, starts: Starts, width: int) -> Expansion:
        shape = (1, starts.node.shape[1], plan.n_slots, 2)
        logp = np.broadcast_to(np.array([-100, -200], np.int16), shape)
        return Expansion(np.broadcast_to(np.arange(2, dtype=np.int32), shape), logp, np.ones(shape[:3], np.int8))

    assert tree_rows(tree_of(plan.finish(grow(plan, expand)))) == tree_rows(tree_of(padded))


@pytest.mark.parametrize("name", PRESETS)
def test_expansions_that_do_not_fit_are_refused(name: str) -> None:
    plan, _ = any_plan(name)
    forest = plan.seed(1)
    starts = plan.starts(forest, 0)
    good = Expansion(
        np.zeros((1, 1, plan.n_slots, 1), "i4"),
        np.zeros((1, 1, plan.n_slots, 1), "i2"),
        np.zeros((1, 1, plan.n_slots), "i1"),
    )
    for bad in (
        replace(good, token=good.token[:, :, :, :0]),
        replace(good, tier=good.tier + 4),
        replace(good, logp=good.logp + 1),
        Expansion(*(np.repeat(a, 2, axis=1) for a in (good.token, good.logp, good.tier))),
    ):
        with pytest.raises(InputError):
            plan.attach(forest, starts, bad, 0)
    if plan.n_slots > 1:
        with pytest.raises(InputError, match="slots"):
            plan.attach(forest, starts, Expansion(good.token[:, :, 1:], good.logp[:, :, 1:], good.tier[:, :, 1:]), 0)
