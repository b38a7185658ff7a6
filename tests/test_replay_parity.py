"""Replay equals live decoding, step by step and field by field: tiny float64 models, every drafter and plan kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pooled import envelope, live_pools, text_of
from scripted import CountingClock
from tiny_drafters import random_drafter

from workbench.decode import decode
from workbench.outcomes import Span, outcome_table
from workbench.policy import Arm
from workbench.pools import DraftPools, Text
from workbench.recorded import RecordedTarget, Recording, record_answer
from workbench.replaysteps import step_rows
from workbench.sampling import Sampling
from workbench.target import Target
from workbench.tree import PRESETS, BeamPlan, BlockPlan, Plan, ProductPlan, StaticPlan, block_chain, parse_plan
from workbench.walk import Menu, streams, walk

PLANS: dict[str, tuple[str, Plan]] = {name: (parse_plan(name)[0], plan) for name, plan in PRESETS.items()} | {
    "specblock-one-block": ("specblock", BlockPlan(n_blocks=1, budget=30)),
    "specblock-three-blocks": ("specblock", BlockPlan(n_blocks=3, budget=30, root_width=4)),
    "specblock-eager": ("specblock", BlockPlan(is_lazy=False, budget=25)),
    "specblock-unmerged": ("specblock", BlockPlan(is_merging=False, budget=40, tier_widths=(3, 3, 3, 3))),
    "specblock-two": ("specblock", block_chain(2)),
    "eagle3-narrow": ("eagle3", BeamPlan(depth=3, top_k=4, budget=12)),
    "medusa-product": ("medusa", ProductPlan(budget=20)),
    "parallelspec-static": ("parallelspec", StaticPlan(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))),
}
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=3)}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [5, 5, 5]]
# Of an untrained drafter the best starts are all siblings at the root, and those plans go on from elsewhere: for them
# the pools are recorded along the plan itself.
BEYOND_DEFAULT = ("specblock-chain", "specblock-release", "specblock-three-blocks", "eagle3-chain", "eagle3-narrow")
STOP_IDS, ROOM = (11,), 40
TIMES = {"drafter_ms", "verification_ms", "other_ms"}


@dataclass
class Rig:
    """A tiny target, its recorded answers and every drafter's pools along them."""

    target: Target
    recordings: list[Recording]
    text: Text
    drafters: dict[str, Any]
    pools: dict[str, DraftPools]


@pytest.fixture(scope="module", params=SAMPLINGS.values(), ids=SAMPLINGS)
def rig(request: Any, make_target: Any) -> Rig:
    target = make_target(vocab_size=16, sharpness=2.0)
    recordings = [record_answer(target, p, request.param, 0, ROOM, set(STOP_IDS)) for p in PROMPTS]
    drafters = {
        kind: random_drafter(kind, target) for kind in ("specblock", "eagle3", "medusa", "parallelspec", "lookup")
    }
    pools = {
        kind: live_pools(d, recordings, envelope(kind, d.n_slots, 1 if kind == "lookup" else 10))
        for kind, d in drafters.items()
    }
    return Rig(target, recordings, text_of(recordings, STOP_IDS, ROOM), drafters, pools)


def live_rows(rig: Rig, kind: str, plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for r in rig.recordings:
        episode = decode(
            RecordedTarget(r), rig.drafters[kind], plan, r.prompt_ids, sampling=Sampling(), max_new_tokens=ROOM,
            stop_ids=STOP_IDS, clock=CountingClock(),
        )  # fmt: skip
        assert episode.tokens == r.tokens
        rows += episode.steps
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


@dataclass
class Fixed:
    arms: tuple[Arm, ...]
    n_uniforms: int = 0

    def init(self, n_streams: int) -> Any: ...
    def choose(self, state: Any, obs: Any) -> Any: ...
    def update(self, state: Any, arm: Any, feedback: Any) -> Any: ...


@pytest.mark.parametrize("name", PLANS)
def test_replay_equals_live(rig: Rig, name: str) -> None:
    kind, plan = PLANS[name]
    pools, arms = rig.pools[kind], (Arm(name, kind, plan),)
    if name in BEYOND_DEFAULT:
        pools = live_pools(rig.drafters[kind], rig.recordings, plan)
    menu = Menu([outcome_table(plan, pools, Span.of(rig.text))], [kind], [pools.n_slots])
    steps = walk(Fixed(arms), menu, rig.text, streams(len(rig.recordings)))
    replayed, live = step_rows(steps, arms, menu, [pools], rig.text), live_rows(rig, kind, plan)
    assert not steps.is_missed.any()
    assert len(replayed) == len(live)
    for i, (a, b) in enumerate(zip(replayed, live)):
        assert a == b, (i, {k: (a[k], b[k]) for k in b if a.get(k) != b[k]})
