"""Pools: the fast recorder against the live drafter, integer for integer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_drafters import KINDS, random_drafter

from workbench import poolnames
from workbench.errors import InputError
from workbench.keeping import Keeping, keep_turn, kept_parts
from workbench.outcomes import Span, outcome_table
from workbench.poolnames import labelled, named, regrow
from workbench.poolrecorder import record_pools
from workbench.pools import LABEL, DraftPools, Envelope, PoolLevel, Text, clean_level, root_starts
from workbench.poolstore import WRITING, PoolShape, pool_table, pools_from, shape_of
from workbench.recorded import Recording, record_answer
from workbench.sampling import Sampling
from workbench.target import Target
from workbench.tree import BeamPlan, BlockPlan, Expansion, Plan, ProductPlan, Starts, grow

PLANS: dict[str, list[Plan]] = {
    "specblock": [
        BlockPlan(root_width=5, tier_widths=(2, 3, 5, 0), budget=20),
        BlockPlan(root_width=3, tier_widths=(1, 2, 3, 4), budget=12, n_blocks=3, is_merging=False),
        BlockPlan(root_width=5, tier_widths=(5, 5, 5, 5), budget=60, n_blocks=3, start_cap=3),
    ],
    "eagle3": [BeamPlan(depth=3, top_k=4, budget=20), BeamPlan(depth=2, top_k=2, budget=7)],
    "medusa": [ProductPlan(budget=15, width=5)],
    "parallelspec": [ProductPlan(budget=15, width=5)],
}
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


def text_of(r: Recording, room: int = 99) -> Text:
    """The one episode of a recording."""
    return Text(
        token=np.array(r.tokens, np.int32),
        offset=np.array([0, len(r.tokens)]),
        prompt=[0],
        prompt_id=["p"],
        task=["t"],
        turn=[0],
        prompt_tokens=[np.array(r.prompt_ids, np.int32)],
        room=np.array([room], np.int32),
        stop_ids=(),
    )


def assert_same_pools(a: DraftPools, b: DraftPools) -> None:
    assert (a.kind, a.n_slots, a.has_tiers, a.envelope) == (b.kind, b.n_slots, b.has_tiers, b.envelope)
    assert len(a.levels) == len(b.levels)
    for x, y in zip(a.levels, b.levels):
        for one, other in ((x.expansion, y.expansion), (x.starts, y.starts)):
            for f in fields(one):
                np.testing.assert_array_equal(getattr(one, f.name), getattr(other, f.name), f.name)
                assert getattr(one, f.name).dtype == getattr(other, f.name).dtype, f.name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(
    kind: str, target: Target, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few ids named, so that labels stand in trees and among starts; a plan's outcomes do not change by it."""
    monkeypatch.setattr(poolnames, "N_NAMED", 6)
    drafter, text = random_drafter(kind, target), text_of(recording)
    pools = record_pools(drafter, TINY, recording.prompt_ids, recording.tokens, recording.features, recording.final)
    sink = pa.BufferOutputStream()
    pq.write_table(pool_table(pools, text), sink, **WRITING)
    shape = PoolShape.from_dict(kind, shape_of(pools).to_dict(), "here")
    back = pools_from(pq.read_table(pa.BufferReader(sink.getvalue())), shape, "here")
    assert_same_pools(back, labelled(pools, named(pools, text)))
    assert (back.levels[-1].expansion.token >= LABEL).any() == (pools.envelope is not None)
    for plan in PLANS[kind]:
        whole, short = (outcome_table(plan, x, Span.of(text)) for x in (pools, back))
        for f in fields(whole):
            np.testing.assert_array_equal(getattr(whole, f.name), getattr(short, f.name), f.name)
    if back.envelope is not None:
        assert regrow(back).forest.n.tolist() == regrow(pools).forest.n.tolist()  # merging survives the labels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1,), (1, 5), (5, 1, 2)], ids=str)
def test_turns_of_one_token_have_no_positions(
    kind: str, lengths: tuple[int, ...], target: Target, recording: Recording
) -> None:
    drafter, r = random_drafter(kind, target), recording
    keeping = Keeping({kind: drafter}, TINY)
    turns = [keep_turn(target, keeping, r.prompt_ids, r.tokens[:n], turn) for turn, n in enumerate(lengths)]
    (part,) = kept_parts(0, turns)
    shape = PoolShape.from_dict(kind, keeping.described()[kind], "here")
    back = pools_from(part.data, shape, "here")
    assert part.data.column("turn").to_pylist() == [turn for turn, n in enumerate(lengths) for _ in range(n - 1)]
    assert back.n_rows == sum(lengths) - len(lengths)
    begin = 0
    for turn, n in zip(turns, lengths):
        text = replace(text_of(r), token=np.array(turn.tokens, np.int32), offset=np.array([0, n]))
        expected = labelled(turn.pools[0], named(turn.pools[0], text))
        for row in range(n - 1):
            assert_same_row(back, begin + row, expected.rows(slice(row, row + 1)).levels)
        begin += n - 1


def test_an_envelope_says_what_it_cannot_be() -> None:
    with pytest.raises(InputError, match="one number of starts"):
        Envelope(starts=(9, 5, 4))
    with pytest.raises(InputError, match="width must be a whole number"):
        Envelope(width=0)
    with pytest.raises(InputError, match="starts must be a whole number"):
        Envelope(starts=(24, 0))
    assert Envelope(starts=(9, 5, 5)).plan("specblock", 4).n_levels == 4  # type: ignore[union-attr]
    assert Envelope(starts=()).plan("specblock", 4).n_levels == 1  # type: ignore[union-attr]


def test_rows_and_positions_of_a_text() -> None:
    """Episodes of 3, 1 and 2 tokens: three rows, none for the one of a single token."""
    text = Text(
        np.array([5, 6, 7, 8, 9, 4], np.int32), np.array([0, 3, 4, 6]), [0, 0, 1], ["a", "a", "b"], ["t"] * 3,
        [0, 1, 0], [np.array([1], np.int32)] * 3, np.array([3, 3, 3], np.int32), (4,),
    )  # fmt: skip
    assert text.n_rows == 3 and text.row_offset.tolist() == [0, 2, 2, 3]
    assert text.row_episode().tolist() == [0, 0, 2] and text.row_position().tolist() == [1, 2, 1]
    assert [text.token[row + e + 1] for row, e in enumerate(text.row_episode())] == [6, 7, 4]
    assert text.row(0, 2) == 1 and text.row(2, 1) == 2
    with pytest.raises(InputError, match="episode 1 has no step start at position 1"):
        text.row(1, 1)
    one = text.episodes([2, 0])
    assert one.token.tolist() == [9, 4, 5, 6, 7] and one.offset.tolist() == [0, 2, 5] and one.prompt == [1, 0]
