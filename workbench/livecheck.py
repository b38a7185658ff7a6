"""Re-run replayed steps live, held to the recorded text, and compare step by step.

Live and replay take the same steps in the same order: the real drafter drafts at the step's position from the features
of the recorded text, the real target verifies its tree, and every integer column of the two rows must be equal. After
each step both stand where the replay says (the live session is set there anew if it disagreed), so that one
disagreement is one disagreement. Each is given its cause:

- miss: the replay had flagged the step, since it asked for drafts that were not recorded;
- near-tie of the target: its scores of the recorded token and of its own choice differ by less than NEAR_TIE;
- near-tie of the draft: candidates' log-probabilities, or the rank head's scores of two tiers, do;
- other: anything else. It is an error somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.decode import Drafting
from workbench.livecauses import MISS, NEAR_TIE, OTHER, TARGET, TierSpy, draft_difference
from workbench.livetext import HeldSession
from workbench.policy import Arm
from workbench.pools import DraftPools, Text
from workbench.recorded import Recording
from workbench.recorder import divergence
from workbench.replaysteps import step_rows
from workbench.sampling import Sampling
from workbench.source import Creators, TraceSource
from workbench.steps import Draft, StepTimes, step_row
from workbench.target import Prefill, Target
from workbench.tree import Expansion, commit, grow
from workbench.walk import Menu, Steps

if TYPE_CHECKING:
    from workbench.drafters.base import Drafter

TIMES = ("drafter_ms", "verification_ms", "other_ms")


@dataclass(frozen=True)
class Disagreement:
    """A step on which live and replay differ, the columns that do, and why."""

    policy: str
    prompt_id: str
    turn: int
    position: int
    columns: list[str]
    cause: str  # see livecauses
    gap: float | None  # of what tied


@dataclass
class Verified:
    """One policy, compared."""

    policy: str
    n_steps: int = 0
    found: list[Disagreement] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """Share of steps equal in every column."""
        return 1.0 - len(self.found) / self.n_steps if self.n_steps else float("nan")


@dataclass(frozen=True)
class Job:
    """A policy's replayed steps (one stream, whole episodes) and what they were looked up in."""

    policy: str
    arms: Sequence[Arm]
    menu: Menu
    pools: Sequence[DraftPools]  # each arm's
    steps: Steps


def text_rows(target: Target, prompt_ids: Sequence[int], tokens: Sequence[int]) -> Recording:
    """A recorded answer with its features: one prefill over prompt and text, as when pools are recorded."""
    text = [*prompt_ids, *tokens[:-1]]
    rows = target.session(len(text) + 1, Sampling()).prefill(text)
    return Recording(list(prompt_ids), list(tokens), rows.features, rows.final)


def verify_job(
    job: Job,
    text: Text,
    target: Target,
    drafters: Mapping[str, Drafter],
    sampling: Sampling,
    recordings: Iterable[Recording],
    most_steps: int | None = None,
    tick: Callable[[], Any] = lambda: None,
) -> Verified:
    """Re-run a job's steps live, at most `most_steps` of them, and compare. `recordings`: every episode's, in order."""
    n = job.steps.n_steps if most_steps is None else min(most_steps, job.steps.n_steps)
    steps = job.steps.only(np.arange(n))
    rows = step_rows(steps, job.arms, job.menu, job.pools, text)
    out = Verified(job.policy)
    creators = [Creators.of(pools) for pools in job.pools]
    last = int(steps.episode.max(initial=-1))
    for e, recording in zip(range(last + 1), recordings):
        if e not in steps.episode:
            continue
        live = _Live(job, recording, target, drafters, sampling, text.turn[e], text.stop_ids, int(text.room[e]))
        for i in np.flatnonzero(steps.episode == e).tolist():
            arm, expected = int(steps.arm[i]), rows[i]
            draft, got, said = live.step(arm, expected)
            out.n_steps += 1
            columns = [name for name in expected if got[name] != expected[name]]
            if columns:
                row = int(steps.row[i])
                recorded = _recorded_levels(job.arms[arm], job.pools[arm], creators[arm], row)
                cause, gap = (MISS, None) if steps.is_missed[i] else live.cause(draft, recorded, said)
                place = text.prompt_id[e], text.turn[e], int(steps.position[i])
                out.found.append(Disagreement(job.policy, *place, columns, cause, gap))
            live.go_on(expected, got)
            tick()
    return out


class _Live:
    """One episode under way: the real target on the recorded text, every drafter of the policy fed along it."""

    def __init__(
        self,
        job: Job,
        recording: Recording,
        target: Target,
        drafters: Mapping[str, Drafter],
        sampling: Sampling,
        turn: int,
        stop_ids: Sequence[int],
        room: int,
    ) -> None:
        self.job, self.recording, self.target, self.sampling, self.turn = job, recording, target, sampling, turn
        self.stop_ids, self.room = stop_ids, room
        n_prompt, n_ahead = len(recording.prompt_ids), max(arm.plan.budget for arm in job.arms)
        self.session = HeldSession(target, n_prompt + room + n_ahead + 1, sampling, turn)
        self.session.stand_at(recording.prompt_ids, recording.tokens, 1)
        self.n_prompt, self.position, self.step_index = n_prompt, 1, 0
        prefill = Prefill(recording.tokens[0], recording.features[:n_prompt], recording.final[:n_prompt])
        self.drafting: dict[str, Drafting] = {}
        for arm in job.arms:
            if arm.drafter not in self.drafting:
                drafter, capacity = drafters[arm.drafter], n_prompt + room
                self.drafting[arm.drafter] = Drafting(drafter, arm.plan, recording.prompt_ids, prefill, capacity)
        self.spy = {name: TierSpy(drafters[name]) for name in self.drafting}
        self.tier_gaps: list[np.ndarray] = []

    def step(self, arm: int, expected: Mapping[str, Any]) -> tuple[Draft, dict[str, Any], list[int]]:
        """Draft and verify at the present position; returns the draft, the row, and what the target said."""
        drafting = self.drafting[self.job.arms[arm].drafter]
        drafting.plan = self.job.arms[arm].plan
        with self.spy[self.job.arms[arm].drafter] as gaps:
            draft = drafting.propose()
        self.tier_gaps = gaps
        verdict = self.session.verify(draft.tree)
        cut = commit(verdict.tokens, verdict.bonus, self.stop_ids, self.room - self.position)
        row = step_row(
            step=self.step_index,
            position=self.position,
            context_length=self.n_prompt + self.position,
            draft=draft,
            path=verdict.path,
            commit=cut,
            times=StepTimes(0.0, 0.0, 0.0),
        )
        return draft, {k: v for k, v in row.items() if k not in TIMES}, cut.tokens

    def cause(self, draft: Draft, recorded: Sequence[Expansion], said: Sequence[int]) -> tuple[str, float | None]:
        """Why a step differs, and by what gap."""
        tokens, t, prompt = self.recording.tokens, self.position, self.recording.prompt_ids
        if list(said) == tokens[t : t + len(said)]:
            return draft_difference([level.expansion for level in draft.levels], recorded, self.tier_gaps)
        parted = divergence(self.target, prompt, tokens, [*tokens[:t], *said], self.sampling, self.turn)
        gap = float(parted["divergence_gap"])
        return (TARGET if gap < NEAR_TIE else OTHER), gap

    def go_on(self, expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
        """Stand where the replay says, every drafter fed with the recorded pairs up to there."""
        begin, n = self.position, expected["n_committed"]
        self.position, self.step_index = begin + n, self.step_index + 1
        if self.position >= len(self.recording.tokens):
            return
        if got["tokens"] != expected["tokens"]:
            self.session = self.session.anew()
        self.session.stand_at(self.recording.prompt_ids, self.recording.tokens, self.position)
        rows = slice(self.n_prompt + begin - 1, self.n_prompt + self.position - 1)
        r = self.recording
        for drafting in self.drafting.values():
            drafting.drafter.observe(drafting.state, r.features[rows], r.final[rows], expected["tokens"])


def _recorded_levels(arm: Arm, pools: DraftPools, creators: Creators, row: int) -> list[Expansion]:
    """What the replay looked up for one row, level by level."""
    at = np.array([row])
    source = TraceSource(pools.rows(at), creators.rows(at))
    grow(arm.plan, source.expand, 1)
    return [expansion for _, expansion in source.levels]
