"""The live loop: draft, verify, commit, until a stop id or the length limit. Plain decoding is it without a draft.

The target and the clock are passed in, so the same loop runs on the model, on a recorded target and in tests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from workbench.steps import Draft, Level, StepTimes, step_row
from workbench.tree import Expansion, Plan, Starts, chain_tree, commit, grow, tree_of

if TYPE_CHECKING:
    from workbench.drafters.base import Drafter
    from workbench.sampling import Sampling
    from workbench.target import Prefill, Verdict


class Clock(Protocol):
    """Milliseconds, read only once the device has finished what it was given."""

    def now(self) -> float:
        """Milliseconds since some fixed moment."""
        ...


class SessionLike(Protocol):
    """One request on a target (see target.Session)."""

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill: ...
    def verify(self, tree: Any) -> Verdict: ...
    def step(self) -> int: ...


class TargetLike(Protocol):
    """What `decode` needs of a target: the model, one held to a trace, or one read from a trace."""

    def session(self, capacity_tokens: int, sampling: Sampling, turn: int = 0) -> SessionLike: ...


@dataclass(frozen=True)
class Episode:
    """One decoded prompt: the committed text (position 0 first) and a row a step, its keys excepted."""

    tokens: list[int]
    steps: list[dict[str, Any]]
    is_stopped: bool  # by a stop id; else the length limit was met
    prefill_ms: float
    drafter_prefill_ms: float


@dataclass(frozen=True)
class PlainVerdict:
    """A verification of the empty tree: the target's next token alone."""

    bonus: int
    path: Sequence[int] = ()
    tokens: Sequence[int] = ()


NO_DRAFT = Draft(tree=chain_tree([]))


class Drafting:
    """A drafter serving one request under one plan."""

    def __init__(self, drafter: Drafter, plan: Plan, prompt_ids: Sequence[int], prefill: Prefill, capacity: int):
        """Open the request and run the prompt through the drafter, as the target has just done.

        All pairs but the last are refreshed now (an expansion, thrown away), so that every step's own refresh covers
        what the step before it committed, and the prompt's share is prefill time.
        """
        self.drafter, self.plan = drafter, plan
        self.state = drafter.open(list(prompt_ids), capacity)
        tokens = [*prompt_ids[1:], prefill.token]  # pair i is (h_i, t_{i+1})
        last = len(tokens) - 1
        if last:
            drafter.observe(self.state, prefill.features[:last], prefill.final[:last], tokens[:last])
            drafter.expand(self.state, 0, plan.starts(plan.seed(1), 0), plan.width)
        drafter.observe(self.state, prefill.features[last:], prefill.final[last:], tokens[last:])

    def propose(self) -> Draft:
        """Grow the plan's tree from the last committed token."""
        levels: list[Level] = []

        def expand(level: int, starts: Starts, width: int) -> Expansion:
            expansion = self.drafter.expand(self.state, level, starts, width)
            levels.append(Level(starts, expansion))
            return expansion

        self.state.forwards.clear()
        forest = grow(self.plan, expand)
        return Draft(tree_of(self.plan.finish(forest)), self.plan.kind, forest, levels, list(self.state.forwards))

    def learn(self, verdict: Verdict) -> None:
        """Hand the drafter the pairs of the root and the accepted tokens; it runs them with its next block."""
        self.drafter.observe(self.state, verdict.features, verdict.final, [*verdict.tokens, verdict.bonus])


def decode(
    target: TargetLike,
    drafter: Drafter | None,
    plan: Plan | None,
    prompt_ids: Sequence[int],
    *,
    sampling: Sampling,
    turn: int = 0,
    max_new_tokens: int,
    stop_ids: Collection[int],
    clock: Clock,
) -> Episode:
    """Decode one prompt to exactly `max_new_tokens` tokens or the first stop id, which is kept.

    Position 0 comes from prefill and is not a step. `drafter` and `plan` None is plain decoding.
    """
    n_ahead = 0 if plan is None else plan.budget
    session = target.session(len(prompt_ids) + max_new_tokens + n_ahead + 1, sampling, turn)
    began = clock.now()
    prefill = session.prefill(prompt_ids)
    prefilled = clock.now()
    drafting = None
    if drafter is not None and plan is not None:
        drafting = Drafting(drafter, plan, prompt_ids, prefill, len(prompt_ids) + max_new_tokens)
    opened = clock.now()

    tokens, steps = [prefill.token], list[dict[str, Any]]()
    while tokens[-1] not in stop_ids and len(tokens) < max_new_tokens:
        began_step = clock.now()
        draft = drafting.propose() if drafting else NO_DRAFT
        drafted = clock.now()
        verdict = session.verify(draft.tree) if drafting else PlainVerdict(session.step())
        verified = clock.now()
        cut = commit(verdict.tokens, verdict.bonus, stop_ids, max_new_tokens - len(tokens))
        if drafting and not isinstance(verdict, PlainVerdict) and not (cut.is_stopped or cut.is_truncated):
            drafting.learn(verdict)
        ended = clock.now()

        times = StepTimes(drafted - began_step, verified - drafted, ended - verified)
        row = step_row(
            step=len(steps),
            position=len(tokens),
            context_length=len(prompt_ids) + len(tokens),
            draft=draft,
            path=verdict.path,
            commit=cut,
            times=times,
        )
        steps.append(row)
        tokens.extend(cut.tokens)
    return Episode(tokens, steps, tokens[-1] in stop_ids, prefilled - began, opened - prefilled)
