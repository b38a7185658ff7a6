"""Every policy of the catalogue alike, and known answers of each."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr
from synthetic import pools, text_along

from policies import CATALOGUE, parse_arm, parse_policy, read_policies
from policies.armsums import no_sums, rates, with_step
from policies.depth_stop import DepthStopPlan
from policies.static_trees import expected_tokens, medusa_tree, sequoia_tree
from policies.thompson import posterior
from policies.ucb import bonus, upper_bounds
from workbench.errors import InputError
from workbench.outcomes import Span, outcome_table
from workbench.policy import Feedback, Observation
from workbench.pools import Text
from workbench.tree import PRESETS, BeamPlan, BlockPlan, StaticPlan, beam_chain, grow, plan_to_dict
from workbench.walk import Menu, streams, walk

RANKS = {"medusa": np.array([[0.6, 0.2, 0.1], [0.5, 0.1, 0.3]]), "parallelspec": np.full((2, 3), 0.2)}
FIXED = (
    "specblock",
    "eagle3:depth=5,budget=59",
    "stop:mass=0.3,arm=eagle3",
    "tree:budget=4",
    "sequoia:budget=4,depth=2",
)
BANDITS = tuple(f"{name}:arms=specblock+medusa+specblock-chain" for name in CATALOGUE)


def ranks(drafter: str) -> np.ndarray:
    return RANKS[drafter]


def observed(n: int, seed: int = 0, n_uniforms: int = 8) -> Observation:
    rng = np.random.default_rng(seed)
    whole = [rng.integers(1, 50, n).astype(np.int32) for _ in range(3)]
    return Observation(*whole, rng.random((n, n_uniforms)))


def fed(tokens: list[float], ms: list[float]) -> Feedback:
    n = np.array(tokens)
    return Feedback(n, n - 1, n * 0, np.array(ms, float))


@pytest.fixture(scope="module")
def rig() -> tuple[Text, dict[str, Any]]:
    found = {kind: pools(kind, 120, seed=i) for i, kind in enumerate(("specblock", "medusa", "eagle3"))}
    return text_along(found["specblock"], 6), found


def menu_of(policy: Any, rig: Any) -> Menu:
    text, found = rig
    drafters = [arm.drafter for arm in policy.arms]
    tables = [outcome_table(arm.plan, found[arm.drafter], Span.of(text)) for arm in policy.arms]
    return Menu(tables, drafters, [found[d].n_slots for d in drafters])


@pytest.mark.parametrize("spec", FIXED + BANDITS)
def test_every_policy(rig: Any, spec: str) -> None:
    """Arms in range; the same choices again; each stream for itself; what lies ahead does not matter."""
    text, _ = rig
    policy = parse_policy(spec, ranks)
    menu, over = menu_of(policy, rig), streams(6, n_seeds=2, n_orders=2)
    steps = walk(policy, menu, text, over)
    assert set(steps.arm.tolist()) <= set(range(len(policy.arms)))
    again = walk(parse_policy(spec, ranks), menu, text, over)
    assert (steps.arm == again.arm).all() and (steps.row == again.row).all()
    for b in range(4):
        alone = walk(policy, menu, text, type(over)(over.order[b : b + 1], over.policy_seed[b : b + 1]))
        mine = steps.only(steps.stream == b)
        assert (alone.arm == mine.arm).all() and (alone.row == mine.row).all()
    changed = [t.n_accepted.copy() for t in menu.tables]
    ahead = text.row_offset[4]
    for values in changed:
        values[ahead:] = 3
    tables = [
        type(t)(a, *[getattr(t, f) for f in list(t.__dataclass_fields__)[1:]]) for t, a in zip(menu.tables, changed)
    ]
    other = walk(policy, Menu(tables, menu.drafters, menu.n_slots), text, streams(6))
    first, second = (s.only((s.stream == 0) & (s.row < ahead)) for s in (steps, other))
    assert (first.arm == second.arm).all() and (first.row == second.row).all()


@pytest.mark.parametrize("spec", BANDITS)
def test_every_bandit_tries_every_arm_and_settles_on_the_better(spec: str) -> None:
    """Arm 1 commits twice as much in the same time: it gets most of the pulls, and most of the late ones."""
    policy, n = parse_policy(spec), 50
    state, rng, counts = policy.init(n), np.random.default_rng(0), np.zeros(3)
    first = []
    for step in range(200):
        obs = Observation(*[np.full(n, step, np.int32)] * 3, rng.random((n, policy.n_uniforms)))
        arm = policy.choose(state, obs)
        first.append(arm)
        tokens = np.array([2, 4, 2])[arm] + rng.integers(-1, 2, n)
        state = policy.update(state, arm, Feedback(tokens, tokens - 1, tokens * 0, np.full(n, 10.0)))
        if step >= 100:
            counts += np.bincount(arm, minlength=3)
    assert all(set(column) == {0, 1, 2} for column in np.array(first).T.tolist())
    assert counts[1] / counts.sum() > 0.6


def test_an_arm_s_value_is_a_ratio_of_sums() -> None:
    """Two steps of 1 token in 1 ms and 9 tokens in 19 ms make 0.5, not the mean of 1 and 9/19."""
    sums = no_sums(1, 2)
    for tokens, ms in ((1, 1.0), (9, 19.0)):
        sums = with_step(sums, np.array([0]), fed([tokens], [ms]))
    assert rates(sums.tokens, sums.ms).tolist() == [[0.5, np.inf]]


def test_ucb_s_bonus_falls_with_the_arm_s_own_pulls() -> None:
    """By hand: N = 8, so c · scale · √(2 ln 8 / n)."""
    n = np.array([[1.0, 2.0, 5.0]])
    found = bonus(n, np.array([3.0]), 0.5)[0]
    assert found == pytest.approx(1.5 * np.sqrt(2 * np.log(8) / n[0]))
    assert found[0] > found[1] > found[2]
    more = bonus(n + [[0, 0, 4]], np.array([3.0]), 0.5)[0]
    assert more[2] < found[2] and more[0] > found[0] and more[1] > found[1]  # its own pulls, not everyone's


def test_ucb_s_choice_by_hand() -> None:
    """Rates 0.2 and 0.25; the less pulled arm wins only with a bonus: scale 21/100, N = 12."""
    policy = parse_policy("ucb:c=0,arms=specblock+medusa")
    state = policy.init(1)._replace(
        n=np.array([[2.0, 10.0]]), tokens=np.array([[2.0, 22.5]]), ms=np.array([[10.0, 90.0]])
    )
    assert policy.choose(state, observed(1)).tolist() == [1]
    wide = parse_policy("ucb:c=1,arms=specblock+medusa")
    assert wide.choose(state, observed(1)).tolist() == [0]
    scale = 24.5 / 100
    expected = [2 / 10 + scale * np.sqrt(2 * np.log(12) / 2), 22.5 / 90 + scale * np.sqrt(2 * np.log(12) / 10)]
    assert upper_bounds(state, 1.0)[0] == pytest.approx(expected)


def test_discounted_ucb_forgets() -> None:
    """After a change of the better arm, the discounted rule follows within the window, plain UCB does not."""

    def share_of_new_best(spec: str) -> float:
        policy = parse_policy(spec)
        state, picks = policy.init(1), []
        for step in range(600):
            arm = policy.choose(state, observed(1))
            good = 0 if step < 300 else 1
            tokens = 5 if arm[0] == good else 1
            state = policy.update(state, arm, fed([tokens], [10.0]))
            picks.append(int(arm[0]))
        return float(np.mean(np.array(picks[400:]) == 1))

    assert share_of_new_best("ducb:c=0.2,discount=0.95,arms=specblock+medusa") > 0.7
    assert share_of_new_best("ducb:c=0.2,discount=1,arms=specblock+medusa") == share_of_new_best(
        "ucb:c=0.2,arms=specblock+medusa"
    )


def test_epsilon_greedy_explores_by_its_first_draw_alone() -> None:
    policy = parse_policy("egreedy:epsilon=0.25,arms=specblock+medusa+lookup")
    state = policy.init(4)._replace(n=np.ones((4, 3)), tokens=np.tile([1.0, 3.0, 2.0], (4, 1)), ms=np.ones((4, 3)))
    draws = np.array([[0.24, 0.0], [0.24, 0.99], [0.25, 0.0], [0.9, 0.99]])
    obs = Observation(*[np.zeros(4, np.int32)] * 3, draws)
    assert policy.choose(state, obs).tolist() == [0, 2, 1, 1]


def test_thompson_s_posterior_narrows_and_decides_by_its_draws() -> None:
    """n equal steps of 2 tokens in 10 ms: rate 0.2, spread √(0 + 2²) / 10n; the odds of two arms follow the normals."""
    policy = parse_policy("thompson:arms=specblock+medusa")
    n = 2000
    state = policy.init(n)
    for arm, tokens in ((0, 2), (0, 2), (1, 3)):
        state = policy.update(state, np.full(n, arm), fed([tokens] * n, [10.0] * n))
    rate, spread = posterior(state)
    assert rate[0] == pytest.approx([0.2, 0.3]) and spread[0] == pytest.approx([2 / 20, 3 / 10])
    picked = policy.choose(state, observed(n, n_uniforms=2)).mean()
    assert picked == pytest.approx(ndtr(0.1 / np.hypot(0.1, 0.3)), abs=0.035)  # three standard errors of 2000 draws


# ------------------------------------------------------------------------------------------------ plans


def best_by_enumeration(by_slot: np.ndarray, budget: int) -> float:
    nodes = [p for d in range(1, len(by_slot) + 1) for p in product(range(by_slot.shape[1]), repeat=d)]
    best = 0.0
    for chosen in combinations(nodes, budget):
        if all(p[:-1] in chosen or len(p) == 1 for p in chosen):
            best = max(best, expected_tokens(chosen, by_slot))
    return best


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_medusa_s_tree_is_the_best_of_its_size(budget: int) -> None:
    plan = medusa_tree(RANKS["medusa"], budget)
    assert len(plan.paths) == budget
    assert expected_tokens(plan.paths, RANKS["medusa"]) == pytest.approx(best_by_enumeration(RANKS["medusa"], budget))


def test_medusa_s_tree_by_hand() -> None:
    """Nodes by value: (0) .6, (0,0) .3, (1) .2, (0,2) .18, then (1,0) and (2) at .1, the shorter first."""
    assert set(medusa_tree(RANKS["medusa"], 5).paths) == {(0,), (0, 0), (1,), (0, 2), (2,)}
    assert len(medusa_tree(np.array([[0.5, 0.0]]), 9).paths) == 1  # what is never right has no place
    with pytest.raises(InputError, match="was ever right"):
        medusa_tree(np.zeros((2, 3)), 5)


@pytest.mark.parametrize(("budget", "depth"), [(1, 2), (3, 2), (5, 2), (5, 1), (4, 3)])
def test_sequoia_s_tree_is_the_best_of_its_size_and_depth(budget: int, depth: int) -> None:
    by_rank = np.array([0.6, 0.3, 0.1])
    plan = sequoia_tree(by_rank, budget, depth)
    by_slot = np.tile(by_rank, (depth, 1))
    size = min(budget, 3 if depth == 1 else budget)
    assert len(plan.paths) == size and max(map(len, plan.paths)) <= depth
    assert expected_tokens(plan.paths, by_slot) == pytest.approx(best_by_enumeration(by_slot, size))


def test_sequoia_and_medusa_agree_where_slots_are_alike() -> None:
    """With acceptance by rank alone the greedy choice is optimal too."""
    by_rank = np.array([0.55, 0.2, 0.1, 0.05])
    by_slot = np.tile(by_rank, (4, 1))
    found = [expected_tokens(p.paths, by_slot) for p in (sequoia_tree(by_rank, 40, 4), medusa_tree(by_slot, 40))]
    assert found[0] == pytest.approx(found[1])


def test_a_depth_stop_cuts_what_is_unlikely(rig: Any) -> None:
    text, found = rig
    whole = outcome_table(BeamPlan(), found["eagle3"], Span.of(text))
    for mass, same in ((0.0, True), (1e5, False)):
        table = outcome_table(DepthStopPlan(BeamPlan(), mass), found["eagle3"], Span.of(text))
        assert (table.n_starts == whole.n_starts).all() == same
    first = outcome_table(BeamPlan(depth=0), found["eagle3"], Span.of(text))
    assert (table.n_accepted == first.n_accepted).all() and (table.n_blocks == 1).all()
    some = outcome_table(DepthStopPlan(BeamPlan(), 0.4), found["eagle3"], Span.of(text))
    assert 1 < some.n_blocks.mean() < 8 and len(np.unique(some.n_blocks)) > 2
    assert (some.n_accepted <= whole.n_accepted).mean() > 0.9


def test_a_depth_stop_on_a_chain_is_a_stop_by_confidence(rig: Any) -> None:
    """Levels go on while the chain's probability is at least the threshold, worked out from the log-probabilities."""
    text, found = rig
    plan, pool = DepthStopPlan(beam_chain(4), 0.25), found["eagle3"].rows(slice(0, 30))
    token, logp = (getattr(pool.levels[0].expansion, name) for name in ("token", "logp"))

    def expand(level: int, starts: Any, width: int) -> Any:
        n = starts.node.shape[1]
        return type(pool.levels[0].expansion)(token[:, :n], logp[:, :n] * 1, np.full((30, n, 1), -1, np.int8))

    forest = grow(plan, expand, 30)
    top = logp[:, 0, 0, 0].astype(int)
    for t in range(30):
        n = 1
        while n < 4 and np.exp(top[t] * n / 1024) >= 0.25 - 1e-8:
            n += 1
        assert forest.n[t] == n


# ------------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "no plan 'nothing'"),
        ("ucb", "name its arms"),
        ("ucb:c=1", "name its arms"),
        ("ucb:c=-1,arms=specblock+medusa", "c must be a number from 0"),
        ("ucb:c=nan,arms=specblock+medusa", "c must be a number"),
        ("ucb:k=1,arms=specblock+medusa", "no option 'k'"),
        ("ucb:c=1,c=2,arms=specblock+medusa", "stands twice"),
        ("ucb:arms=specblock", "at least 2 different arms"),
        ("ucb:arms=specblock+specblock", "at least 2 different arms"),
        ("ucb:arms=specblock+", "no plan ''"),
        ("thompson:c=1,arms=specblock+medusa", "there are none"),
        ("stop:arm=eagle3", "give mass"),
        ("stop:mass=x,arm=eagle3", "mass must be a number"),
        ("tree:drafter=eagle3", "does not fit"),
        ("tree:budget=0", "budget must be a number from 1"),
        ("sequoia:depth=9", "depth must be a number from 1 to 2"),
        ("specblock:budget=x", "is not a value"),
    ],
)
def test_bad_words_are_told(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_policy(spec, ranks)


def test_a_chosen_tree_needs_a_trace() -> None:
    with pytest.raises(InputError, match="there is no trace here"):
        parse_arm("tree:budget=4")


def test_words_give_what_they_say() -> None:
    policy = parse_policy("ucb:c=0.5, arms=specblock:blocks=1,budget=30 + stop:mass=0.2,arm=eagle3:depth=5,budget=59")
    assert [arm.drafter for arm in policy.arms] == ["specblock", "eagle3"]
    assert policy.arms[0].plan == BlockPlan(n_blocks=1, budget=30)
    assert policy.arms[1].plan == DepthStopPlan(BeamPlan(depth=5, budget=59), 0.2)
    assert policy.c == 0.5  # type: ignore[attr-defined]
    assert isinstance(parse_arm("sequoia:drafter=parallelspec,budget=5", ranks).plan, StaticPlan)


def test_policies_from_json(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    arm = {"drafter": "specblock", "plan": plan_to_dict(PRESETS["specblock-chain"]), "name": "chain"}
    file.write_text(json.dumps(["eagle3", arm, {"policy": "ducb", "c": 1, "arms": [arm, "medusa"], "name": "b"}]))
    found = read_policies(file)
    assert [name for name, _ in found] == ["eagle3", "chain", "b"]
    assert found[1][1].arms[0].plan == PRESETS["specblock-chain"]
    assert [a.name for a in found[2][1].arms] == ["chain", "medusa"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not readable as JSON"),
        ("3", "a policy is a spec or an object"),
        ('{"policy": "x"}', "no policy 'x'"),
        ('{"policy": ["ucb"]}', "no policy"),
        ('{"policy": "ucb"}', "arms must be a list"),
        ('{"policy": "ucb", "d": 1, "arms": []}', "no option 'd'"),
        ('{"policy": "ucb", "c": true, "arms": ["specblock", "medusa"]}', "c must be a number"),
        ('{"policy": "ucb", "arms": [3, 4]}', "an arm is a spec or an object"),
        ('{"drafter": "nobody", "plan": {}}', "no drafter 'nobody'"),
        ('{"drafter": "medusa", "plan": {}}', "not a plan"),
        ('{"drafter": ["medusa"], "plan": {}}', "no drafter"),
        ('{"plan": {}}', "an arm is a spec or an object"),
    ],
)
def test_bad_policy_files_are_told(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        read_policies(file)


def test_a_missing_policy_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_policies(tmp_path / "none.json")
