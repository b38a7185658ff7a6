"""Every drafter under every kind of plan commits the target's own text: tiny float64 targets, where equality holds."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import CountingClock
from tiny_drafters import random_drafter

from workbench.decode import Episode, decode
from workbench.sampling import Sampling
from workbench.target import Target
from workbench.tree import PRESETS, BlockPlan, Plan, ProductPlan, StaticPlan, parse_plan

PLANS: dict[str, tuple[str, Plan]] = {name: (parse_plan(name)[0], plan) for name, plan in PRESETS.items()} | {
    "specblock-three-blocks": ("specblock", BlockPlan(n_blocks=3, budget=30, root_width=4)),
    "specblock-eager": ("specblock", BlockPlan(is_lazy=False, budget=25)),
    "medusa-product": ("medusa", ProductPlan(budget=20)),
    "parallelspec-static": ("parallelspec", StaticPlan(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0, seed=3),
    "cut": Sampling(temperature=0.8, top_p=0.9, top_k=8, seed=5),
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def run(target: Target, drafter: Any, plan: Plan | None, sampling: Sampling, n: int = 40, turn: int = 0) -> Episode:
    return decode(
        target,
        drafter,
        plan,
        PROMPT,
        sampling=sampling,
        turn=turn,
        max_new_tokens=n,
        stop_ids=(11,),
        clock=CountingClock(),
    )


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    return make_target(vocab_size=16, sharpness=2.0)  # a small vocabulary, so that random drafts are accepted at times


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", PLANS)
def test_the_text_is_plain_decoding_s(target: Target, name: str, sampling: Sampling) -> None:
    kind, plan = PLANS[name]
    plain = run(target, None, None, sampling)
    episode = run(target, random_drafter(kind, target), plan, sampling)
    assert episode.tokens == plain.tokens
    assert episode.is_stopped == plain.is_stopped
    assert sum(row["n_committed"] for row in episode.steps) == len(plain.tokens) - 1


def test_the_trial_is_not_idle(target: Target) -> None:
    """Over all plans, drafts are accepted and refused at several depths, or equality above would prove little."""
    accepted = [
        row["n_accepted"]
        for kind, plan in PLANS.values()
        for row in run(target, random_drafter(kind, target), plan, SAMPLINGS["sampled"]).steps
    ]
    assert {0, 1, 2} <= set(accepted)


def test_turn_and_seed_choose_the_text(target: Target) -> None:
    texts = [
        tuple(run(target, None, None, Sampling(temperature=1.0, seed=seed), turn=turn).tokens)
        for seed, turn in ((0, 0), (0, 1), (1, 0))
    ]
    assert len(set(texts)) == 3
    assert tuple(run(target, None, None, Sampling(temperature=1.0, seed=0)).tokens) == texts[0]


@pytest.mark.parametrize("name", ["specblock", "eagle3", "medusa", "parallelspec", "lookup"])
def test_drafts_do_not_depend_on_how_the_prompt_was_refreshed(target: Target, name: str) -> None:
    """The first step offers the same whether the prompt's pairs ran before it, as live decoding does, or in it."""
    kind, plan = PLANS[name]
    drafter = random_drafter(kind, target)
    first = run(target, drafter, plan, SAMPLINGS["greedy"]).steps[0]
    session = target.session(len(PROMPT) + 100, SAMPLINGS["greedy"])
    prefill = session.prefill(PROMPT)
    state = drafter.open(PROMPT, len(PROMPT) + 40)
    drafter.observe(state, prefill.features, prefill.final, [*PROMPT[1:], prefill.token])
    expansion = drafter.expand(state, 0, plan.starts(plan.seed(1), 0), plan.width)
    wanted = session.step()
    at_root = expansion.token[0, 0, 0].tolist()
    assert first["slot_rank"][0] == (at_root.index(wanted) + 1 if wanted in at_root else 0)
    assert first["slot_offered"][0] == sum(token >= 0 for token in at_root)
