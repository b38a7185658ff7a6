"""Tables from tables: what a trace's steps and episodes say about each policy, by task. Pure; no files, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from workbench.cells import ALL_TASKS, aligned, jsonable, number, printable, span
from workbench.errors import InputError
from workbench.metrics import (
    DEFINITIONS,
    N_TIERS,
    TierReading,
    accept_at_depth,
    loop_mask,
    ratio,
    speedup,
    tier_reading,
)
from workbench.schema import PLAIN
from workbench.stats import Interval, bootstrap

FROM_TABLE = ("n_committed", "n_accepted", "n_nodes", "n_forwards", "drafter_ms")
QUANTITIES = (*FROM_TABLE, "n_steps", "n_in_loop", "step_ms", "step_s")  # of a step, summed into measures


@dataclass(frozen=True)
class Row:
    """One policy on one task (or on all of them)."""

    policy: str
    drafter: str
    task: str
    n_prompts: int
    n_episodes: int
    n_diverged: int
    n_steps: int
    n_tokens: int
    tau: Interval
    tau_outside_loops: Interval
    speedup: Interval  # measured, over plain decoding in the same run
    tokens_per_s: float
    draft_share: float
    draft_efficiency: float
    loop_share: float
    nodes_per_step: float
    forwards_per_step: float


@dataclass(frozen=True)
class Columns:
    """The steps table as arrays of R rows, read once."""

    prompt: NDArray[np.int64]
    policy: NDArray[np.object_]
    is_in_loop: NDArray[np.bool_]
    quantities: dict[str, NDArray[np.float64]]

    def sums(self, policy: str, prompts: NDArray[np.int64]) -> Sums:
        """A policy's quantities summed by prompt."""
        chosen = (self.policy == policy) & np.isin(self.prompt, prompts)
        outside = chosen & ~self.is_in_loop
        return Sums(self._totals(chosen, prompts), self._totals(outside, prompts))

    def _totals(self, chosen: NDArray[np.bool_], prompts: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        place = np.searchsorted(prompts, self.prompt[chosen])
        return {
            name: np.bincount(place, values[chosen], len(prompts)).astype(np.float64)
            for name, values in self.quantities.items()
        }


@dataclass(frozen=True)
class Sums:
    """Step quantities summed by prompt, [P] each; `outside` sums the steps outside loops only."""

    values: dict[str, NDArray[np.float64]]
    outside: dict[str, NDArray[np.float64]]

    def columns(self, *names: str) -> NDArray[np.float64]:
        """The named sums side by side, [P, C]."""
        return np.stack([self.values[name] for name in names], axis=1)

    def measure(self, name: str) -> float:
        """A ratio of sums of metrics.DEFINITIONS over all prompts."""
        return float(ratio(self.columns(*DEFINITIONS[name].sums).sum(axis=0, keepdims=True))[0])


def report_rows(steps: pa.Table, episodes: pa.Table, seed: int = 0) -> list[Row]:
    """A row per policy and task, and one per policy over all tasks, in order of first appearance.

    steps, episodes: tables of one run. Intervals are bootstrapped over prompts with `seed`. Steps after a divergence
    count like any other: they are real steps, on a text of their own.
    """
    columns = _columns(steps, episodes)
    tasks = _values(episodes, "task")
    if len(tasks) != 1:
        tasks = [ALL_TASKS, *tasks]
    rows = []
    for policy in _values(episodes, "policy"):
        for task in tasks:
            chosen = episodes.filter(pa.array(_is_of(episodes, policy, task)))
            if chosen.num_rows:
                rows.append(_row(columns, chosen, policy, task, seed))
    return rows


def _row(columns: Columns, episodes: pa.Table, policy: str, task: str, seed: int) -> Row:
    prompts = np.unique(episodes.column("prompt").to_numpy())
    mine, plain = columns.sums(policy, prompts), columns.sums(PLAIN, prompts)
    against = np.hstack([plain.columns("step_ms", "n_committed"), mine.columns("step_ms", "n_committed")])
    outside = np.stack([mine.outside[name] for name in DEFINITIONS["tau"].sums], axis=1)
    return Row(
        policy=policy,
        drafter=episodes.column("drafter")[0].as_py(),
        task=task,
        n_prompts=len(prompts),
        n_episodes=episodes.num_rows,
        n_diverged=episodes.num_rows - episodes.column("divergence").null_count,
        n_steps=int(mine.values["n_steps"].sum()),
        n_tokens=int(mine.values["n_committed"].sum()),
        tau=bootstrap(mine.columns(*DEFINITIONS["tau"].sums), ratio, seed),
        tau_outside_loops=bootstrap(outside, ratio, seed),
        speedup=bootstrap(against, speedup, seed),
        tokens_per_s=mine.measure("tokens_per_s"),
        draft_share=mine.measure("draft_share"),
        draft_efficiency=mine.measure("draft_efficiency"),
        loop_share=mine.measure("loop_share"),
        nodes_per_step=mine.measure("nodes_per_step"),
        forwards_per_step=mine.measure("forwards_per_step"),
    )


def _values(table: pa.Table, column: str) -> list[str]:
    """Distinct values in order of first appearance."""
    return table.column(column).unique().to_pylist()


def _is_of(table: pa.Table, policy: str, task: str = ALL_TASKS) -> NDArray[np.bool_]:
    is_it = table.column("policy").to_numpy() == policy
    return is_it if task == ALL_TASKS else is_it & (table.column("task").to_numpy() == task)


def _columns(steps: pa.Table, episodes: pa.Table) -> Columns:
    is_in_loop = _steps_in_loops(steps, episodes)
    found = {
        name: steps.column(name).to_numpy().astype(np.float64) for name in QUANTITIES if name in steps.column_names
    }
    found["n_steps"] = np.ones(steps.num_rows)
    found["n_in_loop"] = is_in_loop.astype(np.float64)
    times = ("drafter_ms", "verification_ms", "other_ms")
    found["step_ms"] = np.sum([steps.column(name).to_numpy() for name in times], axis=0)
    found["step_s"] = found["step_ms"] / 1000.0
    return Columns(steps.column("prompt").to_numpy(), steps.column("policy").to_numpy(), is_in_loop, found)


def _steps_in_loops(steps: pa.Table, episodes: pa.Table) -> NDArray[np.bool_]:
    """Whether each step starts inside a loop of its own episode's text, [R]."""
    keys = ("prompt", "turn", "policy")
    texts = zip(*(episodes.column(key).to_pylist() for key in (*keys, "tokens")))
    masks = {tuple(key): loop_mask(tokens) for *key, tokens in texts}
    rows = zip(*(steps.column(key).to_pylist() for key in (*keys, "position")))
    return np.array([_starts_in_loop(masks.get(tuple(key)), key, position) for *key, position in rows], bool)


def _starts_in_loop(mask: NDArray[np.bool_] | None, key: list[Any], position: int) -> bool:
    if mask is None or not 0 <= position < len(mask):
        prompt, turn, policy = key
        where = f"prompt {prompt}, turn {turn}, policy {policy!r}"
        raise InputError(f"The trace has a step at position {position} of {where}, where no episode has a text.")
    return bool(mask[position])


def rank_readings(steps: pa.Table) -> dict[str, TierReading]:
    """Reading of the rank head per policy whose drafter has one and whose plan asks it for enough candidates."""
    readings = {}
    for policy in _values(steps, "policy"):
        chosen = steps.filter(pa.array(_is_of(steps, policy)))
        tier, rank, offered = (_flat(chosen, name) for name in ("slot_tier", "slot_rank", "slot_offered"))
        if len(tier) and not (-1 <= tier.min() <= tier.max() < N_TIERS and rank.min() >= 0):
            raise InputError(f"The trace has slots of policy {policy!r} whose tier or rank is none.")
        reading = tier_reading(tier, rank, offered)
        if reading.confusion.any():
            readings[policy] = reading
    return readings


@dataclass(frozen=True)
class Divergence:
    """An episode whose text left plain decoding's: where, and the gap of the target's scores of the two tokens."""

    policy: str
    prompt_id: str
    turn: int
    position: int
    gap: float


def divergences(episodes: pa.Table) -> list[Divergence]:
    """Every episode that diverged, in order."""
    names = ("policy", "prompt_id", "turn", "divergence", "divergence_gap")
    rows = zip(*(episodes.column(name).to_pylist() for name in names))
    return [Divergence(*row) for row in rows if row[3] is not None]


def _flat(table: pa.Table, column: str) -> NDArray[np.int64]:
    return table.column(column).combine_chunks().flatten().to_numpy().astype(np.int64)


def summary(steps: pa.Table, episodes: pa.Table, seed: int = 0) -> dict[str, Any]:
    """The report as plain JSON values, null where nothing was measured. Others rely on the key `tau[policy][task]`."""
    rows = report_rows(steps, episodes, seed)
    by_policy = {policy: [row for row in rows if row.policy == policy] for policy in _values(episodes, "policy")}
    return jsonable(
        {
            "tau": {policy: {row.task: row.tau.value for row in group} for policy, group in by_policy.items()},
            "speedup": {policy: {row.task: row.speedup.value for row in group} for policy, group in by_policy.items()},
            "rows": [asdict(row) for row in rows],
            "accept_at_depth": {policy: _depths(steps, policy) for policy in by_policy if policy != PLAIN},
            "divergences": [asdict(divergence) for divergence in divergences(episodes)],
            "rank_head": {policy: asdict(reading) for policy, reading in rank_readings(steps).items()},
        }
    )


def _depths(steps: pa.Table, policy: str) -> dict[str, Any]:
    chosen = steps.filter(pa.array(_is_of(steps, policy)))
    names = ("n_accepted", "has_bonus", "tree_depth")
    accepted, has_bonus, depth = (chosen.column(name).to_numpy(zero_copy_only=False) for name in names)
    if (accepted < 0).any():
        raise InputError(f"The trace has steps of policy {policy!r} that accepted less than no token.")
    return asdict(accept_at_depth(accepted, has_bonus, depth))


# ---------------------------------------------------------------------------------------------------- as text

_HEAD = (
    "policy",
    "task",
    "steps",
    "τ",
    "95 %",
    "τ outside loops",
    "tokens/s",
    "speedup",
    "95 %",
    "drafter share",
    "diverged",
)


def format_rows(rows: Sequence[Row]) -> str:
    """The table a recording ends with, one line a row."""
    lines = [_HEAD] + [
        (
            printable(row.policy),
            printable(row.task),
            str(row.n_steps),
            number(row.tau.value, 2),
            span(row.tau),
            number(row.tau_outside_loops.value, 2),
            number(row.tokens_per_s, 1),
            number(row.speedup.value, 2),
            span(row.speedup),
            "–" if math.isnan(row.draft_share) else f"{row.draft_share:.0%}",
            str(row.n_diverged),
        )
        for row in rows
    ]
    return aligned(lines, n_left=2)


def format_divergences(found: Sequence[Divergence], n_most: int = 10) -> str:
    """The first divergences, one line each, and how many more there are."""
    lines = [
        f"{printable(d.policy)} left plain decoding's text at position {d.position} of prompt"
        f" {printable(d.prompt_id)}, turn {d.turn + 1}:"
        f" the target's scores differ by {d.gap:.2g}"
        for d in found[:n_most]
    ]
    return "\n".join(lines + [f"... and {len(found) - n_most} more"] * (len(found) > n_most))
