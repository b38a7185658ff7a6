"""Walks against a loop that commits with the tree module; streams, refreshes after an arm switch, draws, the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from synthetic import STOP, pools, text_along

from workbench.errors import InputError
from workbench.forwards import N_CHUNK_ROWS, forward_counts, step_forwards
from workbench.hindsight import fewest_steps
from workbench.outcomes import OutcomeTable, Span, outcome_table
from workbench.policy import Arm, Feedback, FlatCost, Observation, kept, prompt_draw_key, uniforms
from workbench.pools import Text
from workbench.tree import PRESETS, commit
from workbench.walk import Menu, Steps, streams, walk

ARMS = {"specblock": PRESETS["specblock"], "medusa": PRESETS["medusa"], "eagle3": PRESETS["eagle3"]}


class Seen(NamedTuple):
    last: np.ndarray  # [B]
    sum: np.ndarray  # [B]


@dataclass
class Hashed:
    """Picks arms from its draw and from what it was told, so that every input matters."""

    arms: tuple[Arm, ...]
    n_uniforms: int = 2

    def init(self, n_streams: int) -> Seen:
        return Seen(np.zeros(n_streams), np.zeros(n_streams))

    def choose(self, state: Seen, obs: Observation) -> np.ndarray:
        mixed = obs.uniform[:, 1] * 7 + state.last + state.sum % 5 + obs.position % 3 + obs.step + obs.context_length
        return mixed.astype(np.int64) % len(self.arms)

    def update(self, state: Seen, arm: np.ndarray, feedback: Feedback) -> Seen:
        return Seen(feedback.n_committed + feedback.ms % 3, state.sum + feedback.n_nodes + arm + feedback.n_accepted)


@pytest.fixture(scope="module")
def rig() -> tuple[Text, Menu, tuple[Arm, ...]]:
    found = {kind: pools(kind, 90, seed=i) for i, kind in enumerate(ARMS)}
    text = text_along(found["specblock"], 6)
    menu = Menu(
        [outcome_table(plan, found[kind], Span.of(text)) for kind, plan in ARMS.items()],
        list(ARMS), [found[kind].n_slots for kind in ARMS],
    )  # fmt: skip
    return text, menu, tuple(Arm(kind, kind, plan) for kind, plan in ARMS.items())


def slow_walk(policy: Any, menu: Menu, text: Text, order: list[int], seed: int) -> list[dict[str, Any]]:
    """One stream, one step at a time, cut by tree.commit."""
    rows, state, cost = [], policy.init(1), FlatCost()
    for e in order:
        tokens = text.token[text.offset[e] : text.offset[e + 1]].tolist()
        key, n_prompt = prompt_draw_key(text.prompt_tokens[e], text.turn[e]), len(text.prompt_tokens[e])
        t, step, ran = 1, 0, dict.fromkeys(menu.names, 0)
        while t < len(tokens):
            one = np.array([step], np.int32)
            draws = uniforms(np.array([seed], np.uint64), np.array([key], np.uint64), one, policy.n_uniforms)
            context = np.array([n_prompt + t], np.int32)
            arm = int(policy.choose(state, Observation(one, np.array([t], np.int32), context, draws))[0])
            row, table, drafter = text.row(e, t), menu.tables[arm], menu.drafters[arm]
            accepted = tokens[t : t + int(table.n_accepted[row])]
            bonus = tokens[t + len(accepted)] if t + len(accepted) < len(tokens) else -1
            cut = commit(accepted, bonus, text.stop_ids, int(text.room[e]) - t)
            n_starts = table.n_starts[row, : table.n_blocks[row]].tolist()
            forwards = step_forwards(drafter, menu.n_slots[arm], t - ran[drafter], n_starts)
            ms = cost.verification_ms + cost.node_ms * table.n_nodes[row] + cost.forward_ms * len(forwards)
            rows.append(
                {
                    "episode": e, "step": step, "position": t, "row": row, "arm": arm, "n_refreshed": t - ran[drafter],
                    "n_committed": len(cut.tokens), "n_accepted": cut.n_accepted, "has_bonus": cut.has_bonus,
                    "is_stopped": cut.is_stopped, "is_truncated": cut.is_truncated, "n_nodes": table.n_nodes[row],
                    "tree_depth": table.tree_depth[row], "n_forwards": len(forwards), "ms": ms,
                    "n_forward_rows": sum(f.n_rows for f in forwards), "context_length": n_prompt + t,
                }
            )  # fmt: skip
            ran[drafter] = t
            fed = Feedback(
                np.array([len(cut.tokens)]), np.array([cut.n_accepted]), np.array([table.n_nodes[row]]), np.array([ms])
            )
            state = policy.update(state, np.array([arm]), fed)
            t, step = t + len(cut.tokens), step + 1
    return rows


def rows_of(steps: Steps, stream: int) -> list[dict[str, Any]]:
    mine = steps.only(steps.stream == stream)
    names = [
        name
        for name in Steps.__dataclass_fields__
        if name not in ("stream", "is_missed", "n_accepted_high", "n_blocks")
    ]
    return [{name: getattr(mine, name)[i].item() for name in names} for i in range(mine.n_steps)]


def test_every_stream_is_the_slow_walk_of_its_seed_and_order(rig: Any) -> None:
    text, menu, arms = rig
    over = streams(text.n_episodes, n_seeds=3, n_orders=2)
    steps = walk(Hashed(arms), menu, text, over)
    assert len(np.unique(steps.arm)) == 3
    for b in range(6):
        slow = slow_walk(Hashed(arms), menu, text, over.order[b].tolist(), int(over.policy_seed[b]))
        assert rows_of(steps, b) == slow
    assert steps.stream.tolist() == sorted(steps.stream.tolist())


def test_a_menu_of_one_arm_is_walked_at_once_with_the_same_steps(rig: Any) -> None:
    text, menu, arms = rig
    one = Menu(menu.tables[:1], menu.drafters[:1], menu.n_slots[:1])
    steps = walk(Hashed(arms[:1]), one, text, streams(text.n_episodes))
    assert rows_of(steps, 0) == slow_walk(Hashed(arms[:1]), one, text, list(range(6)), 0)
    last = np.flatnonzero(np.diff(steps.episode, append=99))
    assert steps.is_stopped[last].tolist() == [True, False] * 3  # by the stop id that ends every other episode
    assert (text.token[text.offset[1:] - 1] == STOP).tolist() == [True, False] * 3
    assert steps.n_committed.sum() == text.n_rows


def table_of(n_accepted: list[int], n_nodes: int = 9) -> OutcomeTable:
    a = np.array(n_accepted, np.int32)
    one = np.ones(len(a), np.int16)
    return OutcomeTable(a, a, a < 0, one * np.int32(n_nodes), one, one[:, None])


def text_of(*lengths: int, stop: bool = False) -> Text:
    total = sum(lengths)
    token = np.arange(100, 100 + total, dtype=np.int32)
    stops = (int(token[-1]),) if stop else (1,)
    n = len(lengths)
    return Text(
        token, np.cumsum([0, *lengths]), list(range(n)), [str(i) for i in range(n)], ["a"] * n, [0] * n,
        [np.arange(2, dtype=np.int32)] * n, np.array(lengths, np.int32), stops,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accepted", "stop", "expected"),
    [
        # six tokens, positions 1..5: (n_committed, has_bonus, is_stopped, is_truncated) of every step
        ([0, 0, 0, 0, 0], False, [(1, True, False, False)] * 5),
        ([4, 9, 9, 9, 9], False, [(5, True, False, False)]),
        ([5, 9, 9, 9, 9], False, [(5, False, False, True)]),
        ([5, 9, 9, 9, 9], True, [(5, False, True, False)]),
        ([4, 9, 9, 9, 9], True, [(5, True, True, False)]),
        ([1, 9, 2, 9, 9], False, [(2, True, False, False), (3, True, False, False)]),
        ([1, 9, 3, 9, 9], False, [(2, True, False, False), (3, False, False, True)]),
    ],
)
def test_cuts_by_hand(accepted: list[int], stop: bool, expected: list[tuple]) -> None:
    text, menu = text_of(6, stop=stop), Menu([table_of(accepted)], ["medusa"], [4])
    steps = walk(Hashed((Arm("a", "medusa", PRESETS["medusa"]),)), menu, text, streams(1))
    found = list(zip(steps.n_committed, steps.has_bonus, steps.is_stopped, steps.is_truncated))
    assert found == expected


def test_episodes_without_steps_are_passed_over() -> None:
    text = text_of(1, 4, 1, 3, 1)
    menu = Menu([table_of([0, 1, 0, 0, 0])], ["medusa"], [4])
    policy = Hashed((Arm("a", "medusa", PRESETS["medusa"]),))
    assert walk(policy, menu, text, streams(5)).episode.tolist() == [1, 1, 3, 3]
    two = Hashed((*policy.arms, replace(policy.arms[0], name="b")))
    both = Menu([*menu.tables, *menu.tables], ["medusa"] * 2, [4] * 2)
    assert walk(two, both, text, streams(5, n_seeds=2)).episode.tolist() == [1, 1, 3, 3] * 2
    assert walk(policy, Menu([table_of([])], ["medusa"], [4]), text_of(1), streams(1)).n_steps == 0
    assert walk(two, Menu([table_of([])] * 2, ["medusa"] * 2, [4] * 2), text_of(1), streams(1)).n_steps == 0


def test_a_drafter_that_waited_refreshes_what_it_missed() -> None:
    """Arms a, b of one drafter, c of another: turns a c c b; a and b share a cache."""

    class Turns(Hashed):
        def choose(self, state: Any, obs: Observation) -> np.ndarray:
            return np.array([[0, 2, 2, 1, 1][int(obs.step[0])]])

    text = text_of(8)
    tables = [table_of([1] * 7), table_of([0] * 7), table_of([1, 1, 1, 1, 0, 0, 0])]
    menu = Menu(tables, ["specblock", "specblock", "eagle3"], [4, 4, 1])
    arms = tuple(Arm(name, "x", PRESETS["specblock"]) for name in "abc")
    steps = walk(Turns(arms), menu, text, streams(1))
    assert steps.position.tolist() == [1, 3, 5, 6, 7]
    assert steps.n_refreshed.tolist() == [1, 3, 2, 5, 1]
    assert steps.n_forward_rows.tolist() == [4, 3, 2, 20, 4]


def test_forward_counts_are_those_of_the_list() -> None:
    for kind, n_slots, refreshed, starts in product(
        ("specblock", "eagle3", "parallelspec", "medusa", "lookup"), (1, 4), (1, 7, 300, 2000), ([1], [1, 5], [1, 5, 9])
    ):
        forwards = step_forwards(kind, n_slots, refreshed, starts)
        counts = forward_counts(kind, n_slots, *(np.array([x]) for x in (refreshed, len(starts), sum(starts[1:]))))
        if kind in ("specblock", "eagle3") or len(starts) == 1:
            assert [int(c[0]) for c in counts] == [len(forwards), sum(f.n_rows for f in forwards)]
        assert all(f.n_rows <= N_CHUNK_ROWS for f in forwards if f.kind in ("prompt", "first") and kind == "specblock")


def test_draws_are_keyed_by_seed_prompt_step_and_index() -> None:
    seed, prompt, step = (
        np.array([a, b], dtype) for a, b, dtype in ((0, 0, np.uint64), (5, 5, np.uint64), (3, 3, np.int32))
    )
    first = uniforms(seed, prompt, step, 3)
    assert (first[0] == first[1]).all() and len(np.unique(first[0])) == 3
    assert (uniforms(seed, prompt, step, 2) == first[:, :2]).all()
    for changed in ((seed + 1, prompt, step), (seed, prompt + 1, step), (seed, prompt, step + 1)):
        assert not np.isin(uniforms(*changed, 3), first).any()
    assert prompt_draw_key([1, 2], 0) != prompt_draw_key([1, 2], 1) != prompt_draw_key([1, 3], 1)
    many = uniforms(np.zeros(20_000, np.uint64), np.zeros(20_000, np.uint64), np.arange(20_000, dtype=np.int32), 2)
    assert 0 < many.min() and many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01 and abs(np.corrcoef(many.T)[0, 1]) < 0.03  # 3 standard errors and more


def test_dropping_streams_keeps_the_others() -> None:
    state = kept(Seen(np.arange(3), np.arange(3) * 2), np.array([True, False, True]))
    assert state.last.tolist() == [0, 2] and state.sum.tolist() == [0, 4]


def test_streams_are_orders_times_seeds() -> None:
    over = streams(5, n_seeds=2, n_orders=3)
    assert over.policy_seed.tolist() == [0, 1] * 3
    assert over.order[0].tolist() == over.order[1].tolist() == list(range(5))
    assert all(sorted(order) == list(range(5)) for order in over.order.tolist())
    assert len({tuple(order) for order in over.order.tolist()}) == 3
    with pytest.raises(InputError, match="at least 1 seed"):
        streams(5, n_seeds=0)


def test_hindsight_takes_the_fewest_steps(rig: Any) -> None:
    """Against every sequence of choices, over short texts."""
    rng = np.random.default_rng(3)
    text = text_of(7, 1, 5)
    accepted = rng.integers(0, 3, (2, text.n_rows)).astype(np.int32)

    def fewest(e: int, t: int) -> int:
        n = int(text.offset[e + 1] - text.offset[e])
        if t >= n:
            return 0
        return 1 + min(fewest(e, t + int(accepted[a, text.row(e, t)]) + 1) for a in range(2))

    assert fewest_steps(accepted, text).tolist() == [fewest(e, 1) for e in range(3)]
    text, menu, arms = rig
    best = fewest_steps(menu.n_accepted, text).sum()
    assert all(
        best <= walk(Hashed(arms[:1]), Menu([t], [d], [1]), text, streams(6)).n_steps for t, d in zip(menu.tables, ARMS)
    )
