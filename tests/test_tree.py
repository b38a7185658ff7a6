"""One tree at a time: masks, acceptance, commits, presets, plan words and other projects' budgets."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.tree import (
    PRESETS,
    STATIC_TREES,
    BeamPlan,
    BlockPlan,
    Commit,
    Plan,
    ProductPlan,
    StaticPlan,
    Tree,
    accept,
    ancestor_mask,
    block_chain,
    chain_tree,
    check_plan,
    commit,
    depths,
    logp_steps,
    parse_plan,
    plan_from_dict,
    plan_from_eagle,
    plan_from_sglang,
    plan_from_vllm,
    plan_to_dict,
    plan_to_eagle,
    plan_to_sglang,
    plan_to_vllm,
)


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 30)))]


def tree_from(parents: list[int], tokens: list[int]) -> Tree:
    return replace(chain_tree(tokens), parent=np.array(parents, np.int32), depth=depths(np.array(parents, np.int32)))


def test_probabilities_in_steps() -> None:
    """ln .9 = -.10536, * 1024 = -107.89; ln .8 * 1024 = -228.499; ln 1 = 0."""
    assert [logp_steps(p) for p in (1.0, 0.95, 0.9, 0.85, 0.8, 0.6)] == [0, -53, -108, -166, -228, -523]


# ------------------------------------------------------------------------------------------------ shape of one tree


def test_ancestor_mask_by_hand() -> None:
    """root -> 0 -> 2, root -> 1 -> 3."""
    want = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    mask = ancestor_mask(np.array([-1, -1, 0, 1], np.int32))
    assert mask.dtype == bool and mask.astype(int).tolist() == want


@given(parent_lists())
def test_ancestor_mask_and_depths_against_walking_up(parents: list[int]) -> None:
    mask, depth = ancestor_mask(np.array(parents, np.int32)), depths(np.array(parents, np.int32))
    for i in range(-1, len(parents)):
        seen, up = {i}, i
        while up >= 0:
            up = parents[up]
            seen.add(up)
        assert {j - 1 for j in np.flatnonzero(mask[i + 1])} == seen
        assert i < 0 or depth[i] == len(seen) - 1
    assert depth.dtype == np.int32 and mask.shape == (len(parents) + 1,) * 2


@pytest.mark.parametrize("parents", [[0], [-1, 2, 0], [-1, 1], [-2]])
def test_children_before_parents_are_refused(parents: list[int]) -> None:
    for function in (ancestor_mask, depths):
        with pytest.raises(InputError, match="parents before children"):
            function(np.array(parents, np.int32))


def test_chain_tree() -> None:
    tree = chain_tree([7, 8, 9])
    assert tree.token.tolist() == [7, 8, 9] and tree.parent.tolist() == [-1, 0, 1] and tree.depth.tolist() == [1, 2, 3]
    assert tree.slot.tolist() == [0, 1, 2] and tree.rank.tolist() == [1, 1, 1] and not tree.cum.any()
    assert ancestor_mask(tree.parent).tolist() == np.tri(4, dtype=bool).tolist()


def test_the_empty_tree_is_plain_decoding() -> None:
    tree = chain_tree([])
    assert tree.token.shape == (0,) and ancestor_mask(tree.parent).tolist() == [[True]]
    assert accept(tree, lambda i: 42) == ([], 42)
    assert commit([], 42, (), 9) == Commit([42], 0, True, False, False)


# ------------------------------------------------------------------------------------------------ acceptance


def test_a_drafter_equal_to_the_target_has_all_accepted() -> None:
    """Four drafted tokens and the bonus: five committed."""
    path, bonus = accept(chain_tree([1, 2, 3, 4]), lambda i: i + 2)
    assert (path, bonus) == ([0, 1, 2, 3], 5)
    assert commit([1, 2, 3, 4], 5, (), 100) == Commit([1, 2, 3, 4, 5], 4, True, False, False)


def test_nothing_counts_after_the_first_refusal() -> None:
    """Accept, refuse, accept: only the first counts, and the target is not asked further."""
    asked: list[int] = []

    def token_at(i: int) -> int:
        asked.append(i)
        return {-1: 1, 0: 9, 1: 3}[i]

    assert accept(chain_tree([1, 2, 3]), token_at) == ([0], 9)
    assert asked == [-1, 0]


def test_acceptance_takes_the_branch_the_target_wants() -> None:
    """root -> 0 (5), 1 (6); 0 -> 2 (7); 1 -> 3 (7), 4 (8); 4 -> 5 (9)."""
    tree = tree_from([-1, -1, 0, 1, 1, 4], [5, 6, 7, 7, 8, 9])
    assert accept(tree, {-1: 6, 1: 8, 4: 9, 5: 1}.__getitem__) == ([1, 4, 5], 1)
    assert accept(tree, {-1: 6, 1: 7, 3: 9}.__getitem__) == ([1, 3], 9)
    assert accept(tree, {-1: 5, 0: 8}.__getitem__) == ([0], 8)
    assert accept(tree, {-1: 7}.__getitem__) == ([], 7)


@given(st.data(), parent_lists())
def test_acceptance_is_the_longest_matching_path(data: st.DataObject, parents: list[int]) -> None:
    """Against every path of the tree, equal siblings included; the text decides, so equal paths want the same token."""
    tokens = [data.draw(st.integers(0, 2)) for _ in parents]
    text = [data.draw(st.integers(0, 2)) for _ in range(len(parents) + 1)]
    tree = tree_from(parents, tokens)
    depth = [0, *tree.depth.tolist()]
    path, bonus = accept(tree, lambda i: text[depth[i + 1]])
    best = 0
    for i in range(len(parents)):
        up, line = i, []
        while up >= 0:
            line.append(tokens[up])
            up = parents[up]
        best = max(best, len(line) if line[::-1] == text[: len(line)] else 0)
    assert len(path) == best <= max(depth)
    assert [tokens[i] for i in path] == text[:best] and bonus == text[best]
    assert [parents[i] for i in path] == [-1, *path][:best]


# ------------------------------------------------------------------------------------------------ commits


def test_a_stop_inside_the_accepted_run_ends_it() -> None:
    """Stop id 2 at depth 2 of 5: two tokens, no bonus, and nothing after it counts."""
    assert commit([8, 2, 7, 7, 7], 7, (2,), 100) == Commit([8, 2], 2, False, True, False)


@pytest.mark.parametrize(
    ("stops", "want"),
    [
        ((), Commit([4, 5, 6, 7], 3, True, False, False)),
        ((9,), Commit([4, 5, 6, 7], 3, True, False, False)),
        ((5, 4), Commit([4], 1, False, True, False)),
        ((6, 7), Commit([4, 5, 6], 3, False, True, False)),
        ((7,), Commit([4, 5, 6, 7], 3, True, True, False)),
    ],
)
def test_stop_ids_several_or_none(stops: tuple[int, ...], want: Commit) -> None:
    assert commit([4, 5, 6], 7, stops, 100) == want


@pytest.mark.parametrize("room", range(1, 8))
def test_room_is_exact(room: int) -> None:
    """Four accepted and a bonus into 1..7: never more than the room; five is just enough."""
    got = commit([1, 2, 3, 4], 5, (), room)
    assert got == Commit([1, 2, 3, 4, 5][:room], min(room, 4), room >= 5, False, room < 5)


def test_room_and_stop_together() -> None:
    """The stop is the third token: beyond a room of 2 it does not happen; in a room of 3 nothing is truncated."""
    assert commit([1, 2, 9, 4], 5, (9,), 2) == Commit([1, 2], 2, False, False, True)
    assert commit([1, 2, 9, 4], 5, (9,), 3) == Commit([1, 2, 9], 3, False, True, False)
    assert commit([1, 2, 9, 4], 5, (9,), 4) == Commit([1, 2, 9], 3, False, True, False)
    assert commit([1], 9, (9,), 2) == Commit([1, 9], 1, True, True, False)
    with pytest.raises(InputError, match="room"):
        commit([1], 2, (), 0)


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 5), st.sets(st.integers(0, 5)), st.integers(1, 9))
def test_commit_against_token_by_token(path: list[int], bonus: int, stops: set[int], room: int) -> None:
    tokens: list[int] = []
    for token in [*path, bonus]:
        if len(tokens) == room or (tokens and tokens[-1] in stops):
            break
        tokens.append(token)
    got = commit(path, bonus, stops, room)
    assert got.tokens == tokens and got.n_accepted + got.has_bonus == len(tokens)
    assert got.is_stopped == (tokens[-1] in stops)
    assert got.is_truncated == (len(tokens) < len(path) + 1 and not got.is_stopped)
    assert 0 <= got.n_accepted <= len(path) and not (got.is_stopped and got.is_truncated)


# ------------------------------------------------------------------------------------------------ presets


def test_presets_hold_the_stated_values() -> None:
    paper = PRESETS["specblock"]
    assert isinstance(paper, BlockPlan)
    assert (paper.n_slots, paper.n_blocks, paper.budget, paper.root_width) == (4, 2, 60, 10)
    assert paper.tier_widths == (2, 4, 10, 0) and paper.is_merging and not paper.has_trims
    assert PRESETS["specblock-release"] == replace(
        paper, tier_widths=(2, 4, 6, 4), budget=90, has_trims=True, is_merging=False
    )
    assert PRESETS["specblock-article"] == replace(paper, tier_widths=(1, 4, 8, 10))
    assert PRESETS["eagle3"] == BeamPlan(depth=7, top_k=10, budget=60) and PRESETS["eagle3"].n_levels == 8
    assert PRESETS["eagle3-published"] == BeamPlan(depth=7, top_k=10, budget=59)
    assert PRESETS["parallelspec"] == ProductPlan(budget=60, max_depth=4, width=10)
    assert PRESETS["lookup"] == ProductPlan(budget=10, max_depth=10, width=1)
    assert (PRESETS["lookup"].n_slots, PRESETS["lookup"].width, PRESETS["lookup"].n_levels) == (10, 1, 1)
    assert {name for name in PRESETS if name.endswith("-chain")} == {
        "specblock-chain", "eagle3-chain", "medusa-chain", "parallelspec-chain",
    }  # fmt: skip


def test_medusa_is_the_published_tree() -> None:
    """63 draft nodes; per depth 10, 28, 23, 2, and 10, 23, 23, 7 for the second published tree."""
    medusa = PRESETS["medusa"]
    assert isinstance(medusa, StaticPlan) and medusa == STATIC_TREES["mc_sim_7b_63"] and medusa.budget == 63
    assert Counter(map(len, medusa.paths)) == {1: 10, 2: 28, 3: 23, 4: 2}
    assert {path for path in medusa.paths if len(path) == 4} == {(0, 0, 0, 0), (0, 0, 0, 1)}
    assert Counter(map(len, STATIC_TREES["vicuna_7b_stage2"].paths)) == {1: 10, 2: 23, 3: 23, 4: 7}
    assert (medusa.n_slots, medusa.width) == (4, 10)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: StaticPlan(((0,), (1, 0))), "prefix"),
        (lambda: StaticPlan(((0, 0),)), "prefix"),
        (lambda: StaticPlan(((0,), (0,))), "twice"),
        (lambda: StaticPlan(((),)), "empty"),
        (lambda: StaticPlan(()), "number of paths"),
        (lambda: StaticPlan(((-1,),)), "rank"),
        (lambda: BlockPlan(budget=0), "budget"),
        (lambda: BlockPlan(n_blocks=0), "n_blocks"),
        (lambda: BlockPlan(tier_widths=(1, 2, 3)), "tier_widths"),  # type: ignore[arg-type]
        (lambda: BlockPlan(start_cap=0), "start_cap"),
        (lambda: BlockPlan(is_merging=1), "is_merging"),  # type: ignore[arg-type]
        (lambda: BeamPlan(top_k=0), "top_k"),
        (lambda: BeamPlan(depth=True), "depth"),
        (lambda: ProductPlan(width=0), "width"),
        (lambda: ProductPlan(width=1000, max_depth=100), "too many paths"),
        (lambda: block_chain(0), "length"),
    ],
)
def test_impossible_plans_are_refused(make, word: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=word):
        make()


def test_plans_fit_their_drafters() -> None:
    for name, plan in PRESETS.items():
        check_plan(plan, name.split("-")[0], n_slots=10, max_width=10, n_levels=8)
    check_plan(PRESETS["specblock"], "a new drafter", n_slots=4)
    for plan, drafter in (
        (PRESETS["medusa"], "specblock"), (PRESETS["parallelspec"], "eagle3"), (PRESETS["eagle3"], "medusa"),
        (PRESETS["specblock"], "eagle3"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"does not fit the drafter {drafter}"):
            check_plan(plan, drafter, n_slots=10)
    with pytest.raises(InputError, match="needs 4 slots, the drafter medusa offers 3"):
        check_plan(PRESETS["medusa"], "medusa", n_slots=3)
    with pytest.raises(InputError, match="needs 10 candidates a slot, the drafter specblock offers 8"):
        check_plan(PRESETS["specblock"], "specblock", n_slots=4, max_width=8)
    with pytest.raises(InputError, match="needs 8 levels"):
        check_plan(PRESETS["eagle3"], "eagle3", n_slots=1, n_levels=3)


# ------------------------------------------------------------------------------------------------ words and JSON


@pytest.mark.parametrize(
    ("spec", "drafter", "plan"),
    [
        *((name, name.split("-")[0], plan) for name, plan in PRESETS.items()),
        ("specblock:blocks=2,budget=60,tiers=2-4-10-0,root=10", "specblock", BlockPlan()),
        (
            "specblock-release: blocks=3, merging=on, start_cap=none, first_start_cap=20",
            "specblock",
            BlockPlan(
                tier_widths=(2, 4, 6, 4), budget=90, has_trims=True, n_blocks=3, start_cap=None, first_start_cap=20
            ),
        ),
        ("specblock:slots=3,plain=4,trims=on,give_up=off,lazy=off", "specblock",
         BlockPlan(n_slots=3, plain_width=4, has_trims=True, has_give_up=False, is_lazy=False)),
        ("specblock-chain:length=6", "specblock", block_chain(6)),
        ("eagle3:depth=7,top_k=10,budget=59", "eagle3", PRESETS["eagle3-published"]),
        ("eagle3-chain:length=3", "eagle3", BeamPlan(depth=2, top_k=1, budget=3)),
        ("medusa:tree=mc63", "medusa", STATIC_TREES["mc_sim_7b_63"]),
        ("medusa:tree=vicuna_7b_stage2", "medusa", STATIC_TREES["vicuna_7b_stage2"]),
        ("medusa:budget=20", "medusa", ProductPlan(budget=20, max_depth=4, width=10)),
        ("medusa-chain:length=2", "medusa", ProductPlan(budget=2, max_depth=2, width=1)),
        ("parallelspec:budget=30,depth=3,width=4", "parallelspec", ProductPlan(budget=30, max_depth=3, width=4)),
        ("parallelspec:tree=mc63", "parallelspec", STATIC_TREES["mc_sim_7b_63"]),
        ("lookup:length=5", "lookup", ProductPlan(budget=5, max_depth=5, width=1)),
    ],
)  # fmt: skip
def test_plan_words(spec: str, drafter: str, plan: Plan) -> None:
    assert parse_plan(spec) == (drafter, plan)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("falcon", "falcon"),
        ("", "no plan"),
        ("specblock:width=3", "width"),
        ("specblock:budget", "budget"),
        ("specblock:", "no option"),
        ("specblock:budget=many", "many"),
        ("specblock:budget=0", "budget"),
        ("specblock:tiers=2-4", "tier_widths"),
        ("specblock:tiers=a-b-c-d", "a-b-c-d"),
        ("specblock:merging=perhaps", "perhaps"),
        ("specblock:budget=3,budget=4", "twice"),
        ("specblock-chain:budget=3", "budget"),
        ("eagle3:length=3", "length"),
        ("medusa:tree=oak", "oak"),
        ("medusa:tree=mc63,budget=3", "no other option"),
        ("lookup:length=0", "length"),
    ],
)
def test_unknown_plan_words_are_named(spec: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        parse_plan(spec)


@pytest.mark.parametrize("plan", [*PRESETS.values(), BlockPlan(start_cap=None, n_slots=3), StaticPlan(((1,), (1, 2)))])
def test_plans_round_trip_through_json(plan: Plan) -> None:
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan)))) == plan


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kind": "tree"}, "kind"),
        ({"beam": 3}, "beam"),
        ({"budget": "60"}, "budget"),
        ({"budget": 60.0}, "budget"),
        ({"budget": None}, "budget"),
        ({"depth": True}, "depth"),
    ],
)
def test_bad_plan_json_is_refused(change: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        plan_from_dict(plan_to_dict(BeamPlan()) | change)


def test_incomplete_plan_json_is_refused() -> None:
    with pytest.raises(InputError, match="depth"):
        plan_from_dict({"kind": "beam", "top_k": 3, "budget": 3})
    with pytest.raises(InputError, match="paths"):
        plan_from_dict({"kind": "static", "paths": [0, 1]})
    with pytest.raises(InputError, match="kind"):
        plan_from_dict([])  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ others' budgets


def test_the_published_eagle_tree_in_three_conventions() -> None:
    """60 tokens with the root are 59 drafted; depth 7 is eight drafted depths, SGLang's num_steps."""
    plan = PRESETS["eagle3-published"]
    assert plan_from_eagle(total_token=60, depth=7, top_k=10) == plan
    assert plan_from_sglang(8, 10, 60) == plan
    assert isinstance(plan, BeamPlan)
    assert plan_to_eagle(plan) == {"total_token": 60, "depth": 7, "top_k": 10}
    assert plan_to_sglang(plan) == {
        "speculative_num_steps": 8, "speculative_eagle_topk": 10, "speculative_num_draft_tokens": 60,
    }  # fmt: skip


def test_a_chain_in_three_conventions() -> None:
    """k = 5: vLLM says 5, SGLang 5 steps and 6 tokens with the root, EAGLE depth 4 and 6 tokens with the root."""
    chain = plan_from_vllm(5)
    assert chain == plan_from_sglang(5, 1, 6) == plan_from_eagle(6, 4, 1) == parse_plan("eagle3-chain:length=5")[1]
    assert plan_to_vllm(chain) == {"num_speculative_tokens": 5}
    with pytest.raises(InputError, match="chain"):
        plan_to_vllm(BeamPlan())


@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 200))
def test_budgets_round_trip(depth: int, top_k: int, budget: int) -> None:
    plan = BeamPlan(depth=depth, top_k=top_k, budget=budget)
    assert plan_from_eagle(**plan_to_eagle(plan)) == plan
    assert plan_from_sglang(**plan_to_sglang(plan)) == plan
    assert plan_from_vllm(**plan_to_vllm(plan_from_vllm(budget))) == plan_from_vllm(budget)
