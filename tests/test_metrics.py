"""The measures against hand counts, the intervals against known laws, the report against both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import CountingClock, ScriptedDrafter, ScriptedTarget

from workbench.decode import decode
from workbench.errors import InputError
from workbench.metrics import (
    DEFINITIONS,
    accept_at_depth,
    loop_mask,
    position_average_tau,
    ratio,
    ratio_difference,
    safe_divide,
    speedup,
    tau,
    tier_of_rank,
    tier_reading,
)
from workbench.report import (
    QUANTITIES,
    aligned,
    divergences,
    format_divergences,
    format_rows,
    rank_readings,
    report_rows,
    summary,
)
from workbench.schema import arrow_schema, to_table
from workbench.stats import bootstrap
from workbench.tree import beam_chain

# ---------------------------------------------------------------------------------------- ratios


def test_tau_is_a_ratio_of_sums_with_the_bonus() -> None:
    assert tau([3, 5, 1]) == 3.0
    assert math.isnan(tau([]))


def test_ratios_are_nan_where_nothing_was_measured() -> None:
    assert np.isnan(safe_divide([1.0, 0.0], [0.0, 0.0])).all()
    assert ratio(np.array([[6.0, 3.0]])).tolist() == [2.0]
    assert ratio_difference(np.array([[6.0, 3.0, 1.0, 2.0]])).tolist() == [1.5]
    # plain: 100 ms for 4 tokens; the policy: 60 ms for 6 tokens
    assert speedup(np.array([[100.0, 4.0, 60.0, 6.0]])).tolist() == [2.5]


def test_every_measure_has_its_sentence_and_its_sums_exist() -> None:
    for definition in DEFINITIONS.values():
        assert definition.label and definition.sentence.endswith(".")
        assert set(definition.sums) <= set(QUANTITIES)


# ---------------------------------------------------------------------------------------- by depth


def test_conditional_and_joint_acceptance_by_hand() -> None:
    # Ten steps of a chain of 3: accepted 0 four times, 1 three times, 2 once, 3 twice.
    reading = accept_at_depth([0] * 4 + [1] * 3 + [2] + [3] * 2, [True] * 10, [3] * 10)
    assert reading.n_tried.tolist() == [10, 6, 3]
    assert reading.n_accepted.tolist() == [6, 3, 2]
    assert reading.conditional.tolist() == pytest.approx([0.6, 0.5, 2 / 3])
    assert reading.joint.tolist() == pytest.approx([0.6, 0.3, 0.2])  # shares of all steps, as no step was cut


def test_depths_are_counted_without_a_table_of_steps_by_depths() -> None:
    """Trees that say they are 32,767 deep, at 100,000 steps: 3 GB if every depth had a row of steps."""
    n = 100_000
    reading = accept_at_depth(np.arange(n) % 3, np.arange(n) % 2 == 0, np.full(n, 32_767, np.int16))
    assert reading.n_accepted[:3].tolist() == [66_666, 33_333, 0]
    assert reading.n_tried[:4].tolist() == [n - 16_667, 66_666 - 16_667, 33_333 - 16_666, 0]


def test_depths_never_tried_are_nan_with_a_count() -> None:
    # The trees reach depths 2, 4 and 0; nothing is accepted beyond depth 1, so depths 3 and 4 were never tried.
    reading = accept_at_depth([1, 0, 0], [True] * 3, [2, 4, 0])
    assert reading.n_tried.tolist() == [3, 1, 0, 0]
    assert reading.conditional[:2].tolist() == pytest.approx([1 / 3, 0.0])
    assert np.isnan(reading.conditional[2:]).all() and np.isnan(reading.joint[2:]).all()
    assert len(accept_at_depth([], [], []).conditional) == 0


def test_a_cut_step_says_nothing_about_the_depth_it_could_not_try() -> None:
    # The second step was cut right after its first accepted token: depth 2 was tried by the first step alone.
    reading = accept_at_depth([2, 1], [True, False], [3, 3])
    assert reading.n_tried.tolist() == [2, 1, 1]
    assert reading.conditional.tolist() == [1.0, 1.0, 0.0]


steps_strategy = st.lists(
    st.integers(0, 6).flatmap(lambda deep: st.tuples(st.integers(0, deep), st.booleans(), st.just(deep))), max_size=40
)


@given(steps_strategy)
def test_rates_lie_between_zero_and_one_and_multiply(steps: list[tuple[int, bool, int]]) -> None:
    accepted, has_bonus, deep = (list(column) for column in zip(*steps)) if steps else ([], [], [])
    reading = accept_at_depth(accepted, has_bonus, deep)
    rates = reading.conditional[reading.n_tried > 0]
    assert ((rates >= 0) & (rates <= 1)).all()
    assert np.array_equal(np.isnan(reading.conditional), reading.n_tried == 0)
    measured = ~np.isnan(reading.joint)
    assert (np.diff(reading.joint[measured]) <= 0).all()
    if all(has_bonus) and steps:
        share = [np.mean([a >= d for a in accepted]) for d in range(1, len(reading.joint) + 1)]
        assert reading.joint[measured] == pytest.approx(np.array(share)[measured])
        committed = np.array(accepted) + 1
        assert 1 <= tau(committed) <= max(deep) + 1
        # Steps' tau is 1 + the sum of joint rates: two ways to the same number.
        assert tau(committed) == pytest.approx(1 + np.nansum(reading.joint))


# ---------------------------------------------------------------------------------------- walking


@pytest.mark.parametrize("length", [1, 4])
def test_rates_by_walk_depend_on_the_chain_while_rates_by_position_do_not(length: int) -> None:
    """The same drafter, right at two of every five positions: a longer chain starts its steps elsewhere."""
    text = list(range(100, 200))
    is_right = [t % 5 in (1, 2) for t in range(len(text))]

    def offer(prefix: list[int], n_drafted: int) -> tuple[list[list[int]], list[int]]:
        position = len(prefix) - 2
        return [[text[position] if position < 100 and is_right[position] else 0]], [0]

    episode = decode(
        ScriptedTarget(text),
        ScriptedDrafter(offer, n_slots=1),
        beam_chain(length),
        [1, 2],
        sampling=None,
        max_new_tokens=91,
        stop_ids=(),
        clock=CountingClock(),
    )
    columns = ([row[name] for row in episode.steps] for name in ("n_accepted", "has_bonus", "tree_depth"))
    first = accept_at_depth(*columns).conditional[0]
    # By hand, over positions 1..90. Length 1 starts at 1 (right: +2), 3 (wrong: +1), 4, 5, then 6 again: one of four
    # steps is right. Length 4 at 1 accepts two and a bonus: 4, 5, then 6 again: one of three.
    assert first == pytest.approx({1: 1 / 4, 4: 1 / 3}[length])
    assert np.mean(is_right[1:91]) == pytest.approx(2 / 5)
    run = [next(n for n in range(length + 1) if n == length or not is_right[t + n]) for t in range(1, 91)]
    assert position_average_tau(np.array(run) + 1) == pytest.approx({1: 7 / 5, 4: 8 / 5}[length])
    assert tau([row["n_committed"] for row in episode.steps]) == pytest.approx({1: 5 / 4, 4: 5 / 3}[length])


# ---------------------------------------------------------------------------------------- loops


def test_a_loop_is_a_nine_gram_seen_before() -> None:
    gram = list(range(9))
    assert not loop_mask(gram).any() and not loop_mask([]).any()
    assert loop_mask([*gram, 50, *gram, 51]).tolist() == [False] * 10 + [True] * 9 + [False]
    assert not loop_mask([*gram, 50, *gram[:8], 51]).any()
    assert loop_mask([7] * 12).tolist() == [False] + [True] * 11  # the second window repeats the first


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
def test_loops_agree_with_a_search_by_hand(tokens: list[int], n: int) -> None:
    expected = [False] * len(tokens)
    for s in range(len(tokens) - n + 1):
        if any(tokens[e : e + n] == tokens[s : s + n] for e in range(s)):
            expected[s : s + n] = [True] * n
    assert loop_mask(tokens, n).tolist() == expected


# ---------------------------------------------------------------------------------------- rank head


def test_ranks_fall_into_their_tiers() -> None:
    assert tier_of_rank([1, 2, 4, 5, 10, 11, 0]).tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_the_rank_head_s_reading_by_hand() -> None:
    #          tier 0 right twice, wrong once; tier 1 right once; tier 3 right once (rank 0 of ten offered)
    tier = [0, 0, 0, 1, 3, -1, 3, 0]
    rank = [1, 1, 3, 2, 0, 1, 0, 1]
    offered = [10, 10, 10, 10, 10, 10, 4, 4]  # one slot has no prediction; of four offered, rank 0 tells no tier
    reading = tier_reading(tier, rank, offered)
    assert reading.confusion.tolist() == [[2, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert reading.precision[[0, 1, 3]].tolist() == pytest.approx([2 / 3, 1.0, 1.0])
    assert reading.recall[[0, 1, 3]].tolist() == pytest.approx([1.0, 1 / 2, 1.0])
    assert reading.f1[[0, 1, 3]].tolist() == pytest.approx([0.8, 2 / 3, 1.0])
    assert np.isnan([reading.precision[2], reading.recall[2], reading.f1[2]]).all()


# ---------------------------------------------------------------------------------------- intervals


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """400 samples of 40 units of a ratio whose truth is 2: 95 % intervals of the percentile kind cover 90 to 98 %."""
    rng = np.random.default_rng(0)
    n_covered = 0
    for seed in range(400):
        weight = rng.integers(1, 6, size=40).astype(float)
        sums = np.stack([weight * 2 + rng.normal(0, weight), weight], axis=1)
        found = bootstrap(sums, ratio, seed, n_resamples=400)
        assert found.low <= found.value <= found.high
        n_covered += found.low <= 2.0 <= found.high
    assert 0.90 <= n_covered / 400 <= 0.98


def test_a_paired_difference_is_tighter_than_its_parts() -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(50, 150, size=30).astype(float)  # what the prompts share
    a = np.stack([base * 2.0, np.full(30, 50.0)], axis=1)
    b = np.stack([base * 2.0 + rng.normal(5, 1, size=30), np.full(30, 50.0)], axis=1)
    difference = bootstrap(np.hstack([b, a]), ratio_difference, seed=0)
    alone = bootstrap(a, ratio, seed=0)
    assert difference.low > 0 and difference.high - difference.low < (alone.high - alone.low) / 5


def test_an_interval_that_cannot_be_computed_is_nan() -> None:
    one = bootstrap(np.array([[4.0, 2.0]]), ratio, seed=0)
    assert (one.value, one.n) == (2.0, 1) and math.isnan(one.low) and math.isnan(one.high)
    none = bootstrap(np.zeros((0, 2)), ratio, seed=0)
    assert math.isnan(none.value) and none.n == 0
    assert math.isnan(bootstrap(np.zeros((5, 2)), ratio, seed=0).value)


def test_the_same_seed_gives_the_same_interval_in_chunks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.random.default_rng(2).uniform(1, 2, size=(20, 2))
    first = bootstrap(sums, ratio, seed=5, n_resamples=300)
    assert first == bootstrap(sums, ratio, seed=5, n_resamples=300) != bootstrap(sums, ratio, seed=6, n_resamples=300)
    monkeypatch.setattr("workbench.stats._CHUNK_CELLS", 200)
    assert bootstrap(sums, ratio, seed=5, n_resamples=300) == first


# ---------------------------------------------------------------------------------------- the report


def a_step(prompt: int, task: str, policy: str, position: int, n_committed: int, ms: float, **more: Any) -> dict:
    is_plain = policy == "plain"
    empty: dict[str, Any] = {field.name: [] for field in arrow_schema("steps") if pa.types.is_list(field.type)}
    return empty | {
        "prompt": prompt,
        "prompt_id": str(prompt),
        "task": task,
        "turn": 0,
        "policy": policy,
        "drafter": "none" if is_plain else "eagle3",
        "plan": int(not is_plain),
        "drafter_version": 0,
        "step": 0,
        "position": position,
        "context_length": 10,
        "n_blocks": 0,
        "n_forwards": 0 if is_plain else 8,
        "n_nodes": 0 if is_plain else 4,
        "tree_depth": 0 if is_plain else 4,
        "n_accepted": n_committed - 1,
        "has_bonus": True,
        "n_committed": n_committed,
        "bonus": 1,
        "is_stopped": False,
        "is_truncated": False,
        "drafter_ms": 0.0 if is_plain else ms / 4,
        "verification_ms": ms * (1.0 if is_plain else 0.5),
        "other_ms": 0.0 if is_plain else ms / 4,
    } | more  # fmt: skip


def an_episode(prompt: int, task: str, policy: str, tokens: list[int], **more: Any) -> dict:
    return {
        "prompt": prompt,
        "prompt_id": str(prompt),
        "task": task,
        "turn": 0,
        "policy": policy,
        "drafter": "none" if policy == "plain" else "eagle3",
        "plan": int(policy != "plain"),
        "source": "x:1",
        "sample_seed": 0,
        "order": 0,
        "prompt_tokens": [1],
        "tokens": tokens,
        "text": "",
        "n_steps": 1,
        "stop_reason": "length",
        "prefill_ms": 1.0,
        "drafter_prefill_ms": 0.0,
        "decode_ms": 1.0,
        "divergence": None,
        "divergence_gap": None,
    } | more


@pytest.fixture
def tables() -> tuple[pa.Table, pa.Table]:
    """Prompt 0 (code) loops from position 10 on; prompt 1 (math) does not. Plain: 10 ms a token everywhere."""
    looping = [*range(9), 50, *range(9), 51]
    other = list(range(20))
    steps, episodes = [], []
    for prompt, task, text in ((0, "code", looping), (1, "math", other)):
        steps += [a_step(prompt, task, "plain", t, 1, 10.0) for t in range(1, 20)]
        episodes += [an_episode(prompt, task, "plain", text), an_episode(prompt, task, "eagle3", text)]
    for position, n in ((1, 2), (3, 7), (10, 5), (15, 5)):  # the last two start inside the loop
        steps.append(a_step(0, "code", "eagle3", position, n, 20.0))
    for position, n in ((1, 2), (3, 1), (4, 1), (5, 15)):
        steps.append(a_step(1, "math", "eagle3", position, n, 20.0))
    episodes[3] |= {"divergence": 4, "divergence_gap": 1e-5}
    return to_table(steps, "steps"), to_table(episodes, "episodes")


def test_the_report_by_hand(tables: tuple[pa.Table, pa.Table]) -> None:
    rows = {(row.policy, row.task): row for row in report_rows(*tables)}
    assert list(rows) == [(p, t) for p in ("plain", "eagle3") for t in ("all", "code", "math")]
    both, code, math_ = (rows["eagle3", task] for task in ("all", "code", "math"))
    assert (both.n_steps, both.n_tokens, both.n_prompts) == (8, 38, 2)
    assert (both.tau.value, code.tau.value, math_.tau.value) == (38 / 8, 19 / 4, 19 / 4)
    assert code.tau_outside_loops.value == 4.5 and code.loop_share == 0.5
    assert both.tau_outside_loops.value == pytest.approx((9 + 19) / 6)
    assert both.speedup.value == pytest.approx(10 / (160 / 38))  # 8 steps of 20 ms for 38 tokens
    assert both.tokens_per_s == pytest.approx(38 / 0.160)
    assert (both.draft_share, both.nodes_per_step, both.forwards_per_step) == (0.25, 4.0, 8.0)
    assert both.draft_efficiency == pytest.approx(30 / 32)
    assert (both.n_diverged, code.n_diverged, math_.n_diverged) == (1, 0, 1)
    plain = rows["plain", "all"]
    assert (plain.tau.value, plain.speedup.value, plain.draft_share) == (1.0, 1.0, 0.0)
    assert math.isnan(plain.draft_efficiency)
    assert math.isnan(code.tau.low) and not math.isnan(both.tau.low)  # one prompt gives no interval


def test_summary_is_plain_json_with_nulls_for_nan(tables: tuple[pa.Table, pa.Table]) -> None:
    found = summary(*tables)
    assert found["tau"]["eagle3"] == {"all": 38 / 8, "code": 19 / 4, "math": 19 / 4}
    plain = next(row for row in found["rows"] if row["policy"] == "plain")
    assert plain["draft_efficiency"] is None
    assert found["accept_at_depth"]["eagle3"]["n_tried"][0] == 8 and found["rank_head"] == {}


def test_divergences_are_listed_with_their_gap(tables: tuple[pa.Table, pa.Table]) -> None:
    found = divergences(tables[1])
    assert [(d.policy, d.prompt_id, d.turn, d.position, d.gap) for d in found] == [("eagle3", "1", 0, 4, 1e-5)]
    text = "eagle3 left plain decoding's text at position 4 of prompt 1, turn 1: the target's scores differ by 1e-05"
    assert format_divergences(found) == text
    assert format_divergences(found * 12).splitlines()[-1] == "... and 2 more"


def test_an_answer_of_one_token_has_no_step_and_no_tau() -> None:
    episodes = to_table([an_episode(0, "a", policy, [5]) for policy in ("plain", "eagle3")], "episodes")
    rows = report_rows(to_table([], "steps"), episodes)
    assert [(row.n_steps, row.task) for row in rows] == [(0, "a"), (0, "a")]
    assert all(math.isnan(row.tau.value) and math.isnan(row.speedup.value) for row in rows)
    assert format_rows(rows).splitlines()[1].split() == ["plain", "a", "0", *["–"] * 7, "0"]


def changed(table: pa.Table, name: str, value: Any) -> pa.Table:
    """The table with `name` changed in its last row."""
    rows = table.to_pylist()
    rows[-1][name] = value
    return pa.Table.from_pylist(rows, schema=table.schema)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("position", 20, "step at position 20 of prompt 1, turn 0, policy 'eagle3'"),
        ("position", -1, "step at position -1"),
        ("turn", 3, "of prompt 1, turn 3"),
        ("policy", "none such", "policy 'none such'"),
        ("n_accepted", -1, "accepted less than no token"),
    ],
)
def test_steps_that_contradict_the_rest_are_told(
    tables: tuple[pa.Table, pa.Table], name: str, value: Any, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        summary(changed(tables[0], name, value), tables[1])


@pytest.mark.parametrize("slot", [{"slot_tier": [4]}, {"slot_tier": [-2]}, {"slot_rank": [-1]}])
def test_slots_of_no_tier_or_rank_are_told(tables: tuple[pa.Table, pa.Table], slot: dict[str, list[int]]) -> None:
    lists = {name: [0] for name in arrow_schema("steps").names if name.startswith("slot_")} | slot
    row = a_step(1, "math", "eagle3", 5, 1, 1.0, **lists)
    with pytest.raises(InputError, match="whose tier or rank is none"):
        rank_readings(to_table([row], "steps"))


def test_names_from_files_cannot_move_the_cursor(tables: tuple[pa.Table, pa.Table]) -> None:
    steps, episodes = (changed(table, "task", "a\x1b[2J\nb") for table in tables)
    text = format_rows(report_rows(steps, episodes))
    assert "\x1b" not in text and "a\ufffd[2J\ufffdb" in text


def test_columns_are_aligned() -> None:
    assert aligned([("a", "bb"), ("ccc", "d")], n_left=1) == "a    bb\nccc   d"
