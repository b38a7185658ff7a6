"""Tables from walked steps: what each policy does on each task, beside a baseline. Pure; no files, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.cells import ALL_TASKS, aligned, format_rank_reading, jsonable, number, span
from workbench.metrics import (
    TierReading,
    accept_at_depth,
    loop_mask,
    position_average_tau,
    ratio,
    ratio_difference,
    safe_divide,
    tier_reading,
)
from workbench.pools import Text
from workbench.readings import N_BINS, PROB_UNIT, Calibration
from workbench.slots import SlotTable
from workbench.stats import Interval, bootstrap
from workbench.walk import Steps

UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


@dataclass(frozen=True)
class Walked:
    """One policy's steps and what was read of them."""

    name: str
    drafter: str  # of a policy of one arm; else all, joined
    arms: Sequence[str]
    steps: Steps
    position_average: float  # of a policy of one arm; else NaN
    slots: SlotTable | None = None
    calibration: Calibration | None = None


@dataclass(frozen=True)
class ReplayRow:
    """One policy on one task (or on all of them). With missed steps, what counts tokens is a lower bound."""

    policy: str
    drafter: str
    task: str
    n_prompts: int
    n_steps: int
    n_tokens: int
    n_missed: int
    tau: Interval
    tau_outside_loops: Interval
    difference: Interval  # of τ, from the baseline, paired by prompt; NaN where either missed a step
    loop_share: float
    draft_efficiency: float
    nodes_per_step: float
    forwards_per_step: float
    ms_per_token: float  # modelled
    position_average_tau: float

    @property
    def is_bound(self) -> bool:
        """Whether τ is a lower bound only."""
        return self.n_missed > 0


class _Sums:
    """A policy's step quantities summed by prompt, [P] each."""

    def __init__(self, steps: Steps, text: Text, prompts: NDArray[np.int64], in_loop: NDArray[np.bool_]) -> None:
        self.place = np.searchsorted(prompts, np.asarray(text.prompt)[steps.episode])
        self.n_prompts, self.steps, self.outside = len(prompts), steps, ~in_loop

    def of(self, values: NDArray, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Sums of one quantity [R], over some steps if chosen."""
        place = self.place if chosen is None else self.place[chosen]
        values = values if chosen is None else values[chosen]
        return np.bincount(place, values.astype(np.float64), self.n_prompts).astype(np.float64)

    def tau(self, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Committed tokens and steps, [P, 2]."""
        n = np.ones(self.steps.n_steps)
        return np.stack([self.of(self.steps.n_committed, chosen), self.of(n, chosen)], axis=1)


def loops(text: Text) -> NDArray[np.bool_]:
    """Whether each row of a text starts inside a loop, [R]."""
    masks = [loop_mask(text.token[a:b])[1:] for a, b in zip(text.offset[:-1], text.offset[1:])]
    return np.concatenate([*masks, np.empty(0, bool)])


def replay_rows(walked: Sequence[Walked], text: Text, baseline: str | None, seed: int = 0) -> list[ReplayRow]:
    """A row per policy and task, and one per policy over all tasks. Intervals are bootstrapped over prompts."""
    tasks = list(dict.fromkeys(text.task))
    tasks = tasks if len(tasks) == 1 else [ALL_TASKS, *tasks]
    in_loop = loops(text)
    by_name = {w.name: w for w in walked}
    against = by_name[baseline] if baseline is not None else None
    return [_row(w, against, text, task, in_loop, seed) for w in walked for task in tasks]


def _of_task(steps: Steps, text: Text, task: str) -> Steps:
    if task == ALL_TASKS:
        return steps
    return steps.only((np.asarray(text.task) == task)[steps.episode])


def _row(w: Walked, against: Walked | None, text: Text, task: str, in_loop: NDArray[np.bool_], seed: int) -> ReplayRow:
    steps = _of_task(w.steps, text, task)
    prompts = np.unique(np.asarray(text.prompt)[np.unique(steps.episode)])
    sums = _Sums(steps, text, prompts, in_loop[steps.row])
    difference = UNKNOWN
    if against is not None:
        theirs = _of_task(against.steps, text, task)
        if not (steps.is_missed.any() or theirs.is_missed.any()):
            other = _Sums(theirs, text, prompts, in_loop[theirs.row])
            difference = bootstrap(np.hstack([sums.tau(), other.tau()]), ratio_difference, seed)
    n_steps, n_tokens = steps.n_steps, int(steps.n_committed.sum())
    return ReplayRow(
        policy=w.name,
        drafter=w.drafter,
        task=task,
        n_prompts=len(prompts),
        n_steps=n_steps,
        n_tokens=n_tokens,
        n_missed=int(steps.is_missed.sum()),
        tau=bootstrap(sums.tau(), ratio, seed),
        tau_outside_loops=bootstrap(sums.tau(sums.outside), ratio, seed),
        difference=difference,
        loop_share=_share(in_loop[steps.row].sum(), n_steps),
        draft_efficiency=_share(steps.n_accepted.sum(), steps.n_nodes.sum()),
        nodes_per_step=_share(steps.n_nodes.sum(), n_steps),
        forwards_per_step=_share(steps.n_forwards.sum(), n_steps),
        ms_per_token=_share(steps.ms.sum(), n_tokens),
        position_average_tau=w.position_average if task == ALL_TASKS or len(set(text.task)) == 1 else math.nan,
    )


def _share(a: float, b: float) -> float:
    return float(safe_divide(a, b))


def ranking(rows: Sequence[ReplayRow]) -> list[str]:
    """Policies by τ over everything, best first; those that missed a step are left out."""
    whole = [row for row in rows if row.task == rows[0].task and not row.is_bound]
    return [row.policy for row in sorted(whole, key=lambda row: -row.tau.value)]


def average_tau(n_accepted: NDArray[np.int32], text: Text) -> float:
    """Position-average τ of one outcome table's n_accepted [R], cut at the ends of the text."""
    left = text.offset[1:][text.row_episode()] - text.offset[:-1][text.row_episode()] - text.row_position()
    return position_average_tau(np.minimum(n_accepted + 1, left))


def tiers(slots: SlotTable) -> TierReading:
    """Reading of the rank head."""
    return tier_reading(slots.column("tier"), slots.column("rank"), slots.column("offered"))


def slot_places(slots: SlotTable) -> list[dict[str, Any]]:
    """By level and slot: how often the text's token stood first, and among the candidates."""
    level, slot, rank = (slots.column(name).astype(np.int64) for name in ("level", "slot", "rank"))
    out = []
    for place in np.unique(np.stack([level, slot], axis=1), axis=0).tolist():
        here = rank[(level == place[0]) & (slot == place[1])]
        first, offered = float((here == 1).mean()), float((here > 0).mean())
        out.append({"level": place[0], "slot": place[1], "n": len(here), "first": first, "offered": offered})
    return out


def calibration_bins(c: Calibration) -> dict[str, Any]:
    """Mean draft probability and share accepted of each bin; NaN where a bin is empty."""
    edges = [i / N_BINS for i in range(N_BINS + 1)]
    rates = {
        "mean_prob": safe_divide(c.prob_sum / PROB_UNIT, c.n_nodes),
        "accepted": safe_divide(c.n_accepted, c.n_nodes),
    }
    return {"edges": edges, "n_nodes": c.n_nodes, "n_accepted": c.n_accepted} | rates


def arm_shares(w: Walked) -> dict[str, float]:
    """Share of the steps each arm served."""
    counts = np.bincount(w.steps.arm, minlength=len(w.arms))
    return {name: _share(n, w.steps.n_steps) for name, n in zip(w.arms, counts.tolist())}


def depths(steps: Steps) -> dict[str, Any]:
    """Joint and conditional acceptance by depth, with counts."""
    return asdict(accept_at_depth(steps.n_accepted, steps.has_bonus, steps.tree_depth))


def summary(
    walked: Sequence[Walked], rows: Sequence[ReplayRow], text: Text, oracle: NDArray[np.int64], baseline: str | None
) -> dict[str, Any]:
    """The report as plain JSON values, null where nothing was measured. Others rely on `tau[policy][task]`."""
    by_policy = {w.name: [row for row in rows if row.policy == w.name] for w in walked}
    tasks = [row.task for row in by_policy[walked[0].name]]
    n_committed = np.diff(text.row_offset)
    task_of = np.asarray(text.task)
    chosen = {t: np.ones(len(task_of), bool) if t == ALL_TASKS else task_of == t for t in tasks}
    best = {task: _share(n_committed[is_it].sum(), oracle[is_it].sum()) for task, is_it in chosen.items()}
    return jsonable(
        {
            "tau": {name: {row.task: row.tau.value for row in group} for name, group in by_policy.items()},
            "baseline": baseline,
            "ranking": ranking(rows),
            "rows": [asdict(row) | {"is_bound": row.is_bound} for row in rows],
            "hindsight_tau": best,
            "accept_at_depth": {w.name: _depths_by_task(w.steps, text, tasks) for w in walked},
            "arm_share": {w.name: arm_shares(w) for w in walked if len(w.arms) > 1},
            "rank_head": {w.name: asdict(tiers(w.slots)) for w in walked if w.slots and has_tiers(w.slots)},
            "slots": {w.name: slot_places(w.slots) for w in walked if w.slots},
            "calibration": {w.name: calibration_bins(w.calibration) for w in walked if w.calibration},
        }
    )


def _depths_by_task(steps: Steps, text: Text, tasks: Sequence[str]) -> dict[str, Any]:
    return {task: depths(_of_task(steps, text, task)) for task in tasks}


def has_tiers(slots: SlotTable) -> bool:
    """Whether the drafter has a rank head."""
    return bool((slots.column("tier") >= 0).any())


# ---------------------------------------------------------------------------------------------------- as text

_HEAD = (
    "policy", "task", "steps", "missed", "τ", "95 %", "outside loops", "Δτ", "95 %", "efficiency", "nodes", "forwards",
    "ms/token",
)  # fmt: skip


def format_replay(rows: Sequence[ReplayRow]) -> str:
    """One line a row; τ of a row with missed steps is marked ≥."""
    return aligned([_HEAD, *map(_line, rows)], n_left=2)


def _line(row: ReplayRow) -> tuple[str, ...]:
    mark = "≥" if row.is_bound else ""
    return (
        row.policy,
        row.task,
        str(row.n_steps),
        str(row.n_missed),
        mark + number(row.tau.value, 2),
        span(row.tau),
        mark + number(row.tau_outside_loops.value, 2),
        number(row.difference.value, 2, is_signed=True),
        span(row.difference),
        number(row.draft_efficiency, 3),
        number(row.nodes_per_step, 1),
        number(row.forwards_per_step, 2),
        number(row.ms_per_token, 1),
    )


def format_depths(walked: Sequence[Walked]) -> str:
    """Conditional acceptance by depth over all tasks, joint in brackets, with the steps that tried it."""
    found = {w.name: accept_at_depth(w.steps.n_accepted, w.steps.has_bonus, w.steps.tree_depth) for w in walked}
    deepest = max((len(d.joint) for d in found.values()), default=0)
    lines = [("acceptance at depth", *(str(d) for d in range(1, deepest + 1)))]
    for name, d in found.items():
        cells = [f"{number(c, 2)} ({number(j, 2)}; {n})" for c, j, n in zip(d.conditional, d.joint, d.n_tried)]
        lines.append((name, *cells, *[""] * (deepest - len(cells))))
    return aligned(lines, n_left=1)


def format_calibration(name: str, c: Calibration) -> str:
    """Draft probability against acceptance, bin by bin."""
    bins = calibration_bins(c)
    lines: list[tuple[str, ...]] = [(f"draft probability of {name}", "nodes", "mean", "accepted")]
    for i, n in enumerate(c.n_nodes.tolist()):
        label = f"{bins['edges'][i]:.1f}–{bins['edges'][i + 1]:.1f}"
        lines.append((label, str(n), number(bins["mean_prob"][i], 3), number(bins["accepted"][i], 3)))
    return aligned(lines, n_left=1)


def format_oracle(oracle: NDArray[np.int64], text: Text) -> str:
    """What hindsight could have done with the same arms."""
    best = _share(text.n_rows, oracle.sum())
    return f"Hindsight, choosing among all these arms at every step: τ {number(best, 2)} (a bound; it sees the future)."


def format_places(name: str, slots: SlotTable) -> str:
    """Where the text's token stood, by level and slot."""
    lines: list[tuple[str, ...]] = [(f"slots of {name}", "tried", "first", "among the candidates")]
    for place in slot_places(slots):
        label = f"level {place['level'] + 1}, slot {place['slot'] + 1}"
        lines.append((label, str(place["n"]), number(place["first"], 2), number(place["offered"], 2)))
    return aligned(lines, n_left=1)


def format_arms(w: Walked) -> str:
    """How a policy shared its steps among its arms."""
    lines = [(f"arms of {w.name}", "share")] + [(name, number(share, 2)) for name, share in arm_shares(w).items()]
    return aligned(lines, n_left=1)


def format_replayed(
    walked: Sequence[Walked], rows: Sequence[ReplayRow], oracle: NDArray[np.int64], text: Text, cost: str
) -> str:
    """Everything, table by table."""
    tables = [format_replay(rows), f"Milliseconds are modelled ({cost}).", format_oracle(oracle, text)]
    if any(row.is_bound for row in rows):
        tables.append("≥: steps asked for drafts that were not recorded; what they accepted is a lower bound.")
    tables.append(format_depths(walked))
    tables += [format_arms(w) for w in walked if len(w.arms) > 1]
    for w in walked:
        if w.slots is not None and w.calibration is not None:
            tables += [format_places(w.name, w.slots), format_calibration(w.name, w.calibration)]
            tables += [format_rank_reading(w.name, tiers(w.slots))] * has_tiers(w.slots)
    return "\n\n".join(tables)
