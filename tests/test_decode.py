"""The live loop against hand-computed traces: what is committed, counted, cut and said about every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CountingClock, ScriptedDrafter, ScriptedTarget

from workbench.decode import Episode, decode
from workbench.metrics import accept_at_depth, tau
from workbench.tree import BeamPlan, BlockPlan, Plan, ProductPlan, StaticPlan, beam_chain, product_chain

PROMPT = [1, 2, 3]
EOS = 99


def run(
    text: Sequence[int],
    drafter: ScriptedDrafter | None,
    plan: Plan | None,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (EOS,),
    prompt: Sequence[int] = PROMPT,
) -> Episode:
    return decode(
        ScriptedTarget(text),
        drafter,
        plan,
        prompt,
        sampling=None,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        clock=CountingClock(),
    )


def column(episode: Episode, name: str) -> list[Any]:
    return [row[name] for row in episode.steps]


def chain_drafter(drafts: dict[int, list[int]]) -> ScriptedDrafter:
    """One candidate a level: a step that starts at position t drafts drafts[t], one after the other."""

    def offer(prefix: list[int], n_drafted: int) -> tuple[list[list[int]], list[int]]:
        position = len(prefix) - n_drafted - len(PROMPT)
        return [[drafts[position][n_drafted]] if position in drafts else [0]], [0]

    return ScriptedDrafter(offer, n_slots=1)


def self_drafter(text: Sequence[int], n_slots: int = 1, n_prompt: int = len(PROMPT)) -> ScriptedDrafter:
    """Always drafts what the target will say."""

    def offer(prefix: list[int], n_drafted: int) -> tuple[list[list[int]], list[int]]:
        position = len(prefix) - n_prompt
        return [[text[p] if p < len(text) else 0] for p in range(position, position + n_slots)], [0] * n_slots

    return ScriptedDrafter(offer, n_slots)


TEXT = list(range(10, 60))


def test_three_steps_worked_out_by_hand() -> None:
    # Position 1: 11 12 right, then wrong. Position 4: four right. Position 9: wrong at once.
    drafter = chain_drafter({1: [11, 12, 77, 14], 4: [14, 15, 16, 17], 9: [77, 20, 21, 22]})
    episode = run(TEXT, drafter, beam_chain(4), max_new_tokens=10)
    assert episode.tokens == TEXT[:10]
    assert column(episode, "position") == [1, 4, 9]
    assert column(episode, "context_length") == [4, 7, 12]
    assert column(episode, "n_accepted") == [2, 4, 0]
    assert column(episode, "n_committed") == [3, 5, 1]
    assert column(episode, "bonus") == [13, 18, 19]
    assert column(episode, "tokens") == [[11, 12, 13], [14, 15, 16, 17, 18], [19]]
    assert column(episode, "n_nodes") == [4, 4, 4] == column(episode, "tree_depth")
    assert column(episode, "is_truncated") == [False] * 3
    assert tau(column(episode, "n_committed")) == 3.0  # 9 tokens by 3 verifications; position 0 is prefill's


def test_only_what_stands_before_the_first_refusal_counts() -> None:
    drafter = chain_drafter({1: [11, 77, 13, 14]})  # accept, refuse, "accept"
    first = run(TEXT, drafter, beam_chain(4), max_new_tokens=10).steps[0]
    assert (first["n_accepted"], first["bonus"], first["tokens"]) == (1, 12, [11, 12])


def test_a_drafter_that_knows_the_target_has_tau_of_depth_plus_one() -> None:
    episode = run(TEXT, self_drafter(TEXT), beam_chain(4), max_new_tokens=41)
    assert tau(column(episode, "n_committed")) == 5.0
    assert len(episode.steps) == 8
    assert not any(column(episode, "is_truncated"))


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
def test_the_length_limit_is_met_exactly(max_new_tokens: int) -> None:
    episode = run(TEXT, self_drafter(TEXT), beam_chain(4), max_new_tokens)
    assert episode.tokens == TEXT[:max_new_tokens]
    assert not episode.is_stopped
    assert sum(column(episode, "n_committed")) == max_new_tokens - 1
    expected = {
        1: [],
        2: [(1, False)],
        3: [(2, False)],
        4: [(3, False)],
        5: [(4, False)],
        6: [(4, True)],
        7: [(4, True), (1, False)],
    }
    assert list(zip(column(episode, "n_accepted"), column(episode, "has_bonus"))) == expected[max_new_tokens]
    is_cut = [not bonus for bonus in column(episode, "has_bonus")]
    assert column(episode, "is_truncated") == is_cut  # here every step without a bonus was cut by the limit
    assert [row["bonus"] is None for row in episode.steps] == is_cut


@pytest.mark.parametrize("stop_ids", [(EOS,), (98, EOS), (EOS, 97, 96)])
def test_a_stop_id_inside_the_accepted_run_ends_everything_there(stop_ids: tuple[int, ...]) -> None:
    text = [10, 11, EOS, 13, 14, 15, 16]
    episode = run(text, self_drafter(text), beam_chain(5), 20, stop_ids)
    assert episode.tokens == [10, 11, EOS]
    assert episode.is_stopped
    (step,) = episode.steps
    assert (step["n_accepted"], step["n_committed"], step["has_bonus"], step["bonus"]) == (2, 2, False, None)
    assert step["is_stopped"] and not step["is_truncated"]
    assert step["slot_depth"] == [1, 2]  # nothing is said about what the target would have wanted after its end
    reading = accept_at_depth([2], [False], [5])
    assert reading.n_tried.tolist() == [1, 1, 0, 0, 0]
    assert reading.conditional[:2].tolist() == [1.0, 1.0] and np.isnan(reading.conditional[2:]).all()


def test_a_stop_id_as_bonus_ends_the_episode_and_counts_as_bonus() -> None:
    text = [10, 11, 12, EOS, 14]
    episode = run(text, chain_drafter({1: [11, 12, 77]}), beam_chain(3), 20)
    assert episode.tokens == [10, 11, 12, EOS]
    (step,) = episode.steps
    assert (step["n_accepted"], step["has_bonus"], step["bonus"], step["is_stopped"]) == (2, True, EOS, True)


def test_without_stop_ids_the_text_runs_to_the_limit() -> None:
    text = [10, EOS, 12, EOS, 14, 15, 16]
    episode = run(text, self_drafter(text), beam_chain(3), 6, stop_ids=())
    assert episode.tokens == text[:6] and not episode.is_stopped


def test_a_stop_at_position_zero_leaves_no_step() -> None:
    episode = run([EOS, 11], self_drafter([EOS, 11]), beam_chain(3), 6)
    assert (episode.tokens, episode.steps, episode.is_stopped) == ([EOS], [], True)


def test_plain_decoding_is_the_loop_without_a_draft() -> None:
    text = [10, 11, 12, 13, EOS, 15]
    episode = run(text, None, None, 20)
    assert episode.tokens == [10, 11, 12, 13, EOS]
    assert tau(column(episode, "n_committed")) == 1.0
    assert column(episode, "n_nodes") == [0] * 4 and column(episode, "n_blocks") == [0] * 4
    assert column(episode, "slot_depth") == [[]] * 4 and column(episode, "bonus") == [11, 12, 13, EOS]
    assert column(episode, "drafter_ms") == [1.0] * 4  # the clock of these tests moves 1 ms at each reading


def test_every_part_of_a_step_is_timed_apart() -> None:
    episode = run(TEXT, self_drafter(TEXT), beam_chain(2), 7)
    for row in episode.steps:
        assert (row["drafter_ms"], row["verification_ms"], row["other_ms"]) == (1.0, 1.0, 1.0)
    assert (episode.prefill_ms, episode.drafter_prefill_ms) == (1.0, 1.0)


def test_the_refresh_of_a_step_covers_what_the_last_step_committed() -> None:
    drafter = chain_drafter({1: [11, 12, 77, 14], 4: [14, 15, 16, 17], 9: [77, 20, 21, 22]})
    episode = run(TEXT, drafter, beam_chain(4), max_new_tokens=10)
    assert column(episode, "forward_kind") == [["refresh", "grow", "grow", "grow"]] * 3
    # The prompt's pairs were run before the first step, all but the last.
    assert [rows[0] for rows in column(episode, "forward_rows")] == [1, 3, 5]
    assert column(episode, "forward_starts") == [[1, 1, 1, 1]] * 3 == column(episode, "n_starts")
    assert column(episode, "n_blocks") == [4, 4, 4] == column(episode, "n_forwards")


def test_a_prompt_of_one_token_has_one_pair() -> None:
    drafter = self_drafter(TEXT, n_prompt=1)
    assert run(TEXT, drafter, beam_chain(3), 9, prompt=[5]).tokens == TEXT[:9]


# ---------------------------------------------------------------------------------------- slots on the path


def test_slots_of_a_block_tree_by_hand() -> None:
    """K = 2, two blocks. Root slot: 50 (rank 1), 11 (rank 2, the target's). Its block then drafts 12, and 77 for 13."""

    def offer(prefix: list[int], n_drafted: int) -> tuple[list[list[int]], list[int]]:
        if prefix[-1] == 10:
            return [[50, 11, 51], [60, 61]], [1, 0]
        if prefix[-1] == 11:
            return [[12, 70], [77, 78, 13]], [0, 2]
        return [[0], [0]], [0, 0]

    plan = BlockPlan(n_slots=2, root_width=3, tier_widths=(1, 2, 3, 0), n_blocks=2, budget=60)
    step = run(TEXT, ScriptedDrafter(offer, n_slots=2), plan, 20).steps[0]
    assert step["tokens"] == [11, 12, 13, 14]  # 13 was the third candidate of the second block's second slot
    slots = list(
        zip(*(step[f"slot_{name}"] for name in ("depth", "level", "start", "slot", "tier", "rank", "offered", "width")))
    )
    # The root block's second slot hangs under 50, which was refused, so it is not on the path. The starts of level 1
    # are 50, 11, 51 and the spine's end, so the block under 11 is column 1.
    assert slots == [(1, 0, 0, 0, 1, 2, 3, 3), (2, 1, 1, 0, 0, 1, 2, 1), (3, 1, 1, 1, 2, 3, 3, 3)]
    assert step["n_starts"] == [1, 4] and step["n_blocks"] == 2


def test_a_slot_that_gives_up_is_still_told() -> None:
    """Tier 3 with width 0: the slot's top candidate alone stands, and its true rank is recorded."""

    def offer(prefix: list[int], n_drafted: int) -> tuple[list[list[int]], list[int]]:
        return [[11, 50], [60, 12]], [0, 3]

    plan = BlockPlan(n_slots=2, root_width=1, tier_widths=(1, 2, 3, 0), n_blocks=1, budget=60)
    step = run(TEXT, ScriptedDrafter(offer, n_slots=2), plan, 20).steps[0]
    assert step["slot_tier"] == [0, 3] and step["slot_rank"] == [1, 2]
    assert step["slot_width"] == [1, 1] and step["n_accepted"] == 1


@pytest.mark.parametrize("plan", [StaticPlan(((0,), (1,), (0, 0), (1, 0), (1, 1))), ProductPlan(8, 2, 3)])
def test_slots_of_parallel_heads_hang_under_every_node(plan: Plan) -> None:
    drafter = ScriptedDrafter(lambda prefix, n_drafted: ([[50, 11, 52], [60, 12, 62], [13]], [-1, -1, -1]), n_slots=3)
    step = run(TEXT, drafter, plan, 20).steps[0]
    assert step["tokens"] == [11, 12, 13]
    assert step["slot_depth"] == [1, 2] and step["slot_rank"] == [2, 2] and step["slot_tier"] == [-1, -1]
    # Candidates under the node 11: the static tree lists two; the product tree's best eight do as well.
    assert step["slot_width"][1] == 2


def test_slots_of_a_beam_are_its_starts_on_the_path() -> None:
    def offer(prefix: list[int], n_drafted: int) -> tuple[list[list[int]], list[int]]:
        return [[11, 12] if prefix[-1] in (10, 11) else [13, 14]], [-1]

    step = run(TEXT, ScriptedDrafter(offer, n_slots=1), BeamPlan(depth=2, top_k=2, budget=8), 20).steps[0]
    assert step["tokens"][:2] == [11, 12]
    assert step["slot_level"] == list(range(len(step["slot_level"])))
    assert step["slot_rank"][:2] == [1, 2]


# ---------------------------------------------------------------------------------------- any text, any drafter


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_plan_commits_the_target_s_text_and_counts_add_up(data: st.DataObject) -> None:
    tokens = st.integers(0, 3)
    text = data.draw(st.lists(tokens, min_size=30, max_size=30))
    salt = data.draw(st.integers(0, 1000))
    limit = data.draw(st.integers(1, 20))
    stop_ids = data.draw(st.sampled_from([(), (3,), (2, 3)]))
    plan = data.draw(
        st.sampled_from(
            [
                beam_chain(3),
                product_chain(3),
                BeamPlan(depth=2, top_k=3, budget=7),
                BlockPlan(n_slots=3, root_width=3, tier_widths=(1, 2, 3, 0), n_blocks=2, budget=9),
                BlockPlan(n_slots=3, root_width=2, n_blocks=3, budget=20, is_merging=False),
                StaticPlan(((0,), (1,), (0, 1), (1, 0), (1, 0, 2))),
                ProductPlan(5, 3, 4),
            ]
        )
    )

    def offer(prefix: list[int], n_drafted: int) -> tuple[list[list[int]], list[int]]:
        rng = np.random.default_rng([salt, *prefix])
        slots = [rng.permutation(4)[: rng.integers(0, 5)].tolist() for _ in range(3)]
        return slots, rng.integers(0, 4, size=3).tolist()

    plain = run(text, None, None, limit, stop_ids)
    episode = run(text, ScriptedDrafter(offer, n_slots=3), plan, limit, stop_ids)
    assert episode.tokens == plain.tokens and episode.is_stopped == plain.is_stopped
    position = 1
    for row in episode.steps:
        assert row["position"] == position
        assert row["n_committed"] == row["n_accepted"] + row["has_bonus"] == len(row["tokens"])
        assert 1 <= row["n_committed"] <= row["tree_depth"] + 1
        assert row["n_nodes"] <= plan.budget
        assert all(depth <= row["n_committed"] for depth in row["slot_depth"])
        assert all(0 <= rank <= offered for rank, offered in zip(row["slot_rank"], row["slot_offered"]))
        position += row["n_committed"]
    assert position == len(episode.tokens)
