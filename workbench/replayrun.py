"""A replay from its specs to its tables: policies are resolved, their arms looked up, walked and read. No torch.

Pools are read part by part (whole episodes), once for the outcome tables of all arms of a drafter and once more for
the readings of the steps that were walked, so that a trace may be larger than memory. Outcome tables and the text stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies import parse_policy, read_policies
from workbench.errors import InputError
from workbench.hindsight import fewest_steps
from workbench.outcomes import OutcomeTable, Span, joined, outcome_table
from workbench.policy import Arm, FlatCost, Policy, StepCost
from workbench.pools import DraftPools, Text
from workbench.readings import Calibration, calibration, no_calibration, rank_counts, rank_shares
from workbench.replayreport import ReplayRow, Walked, average_tau, replay_rows, summary
from workbench.slots import SlotTable, joined_slots, slot_table
from workbench.source import Creators
from workbench.walk import Menu, Steps, streams, walk


class PoolSource(Protocol):
    """Recorded pools, however they are kept."""

    @property
    def text(self) -> Text:
        """The committed text of all episodes."""
        ...

    @property
    def drafters(self) -> tuple[str, ...]:
        """Whose pools there are."""
        ...

    def parts(self, drafter: str) -> Iterator[tuple[slice, DraftPools]]:
        """Runs of the text's rows, in order, and their pools."""
        ...


@dataclass(frozen=True)
class PoolsInMemory:
    """Pools held in memory, one part."""

    text: Text
    pools: Mapping[str, DraftPools]

    @property
    def drafters(self) -> tuple[str, ...]:
        """Whose pools there are."""
        return tuple(self.pools)

    def parts(self, drafter: str) -> Iterator[tuple[slice, DraftPools]]:
        """All rows at once."""
        yield slice(0, self.text.n_rows), self.pools[drafter]


@dataclass(frozen=True)
class Named:
    """A policy under the name that tables call it."""

    name: str
    policy: Policy


@dataclass
class Replayed:
    """What a replay found."""

    walked: list[Walked]
    rows: list[ReplayRow]
    oracle: NDArray[np.int64]  # [E], fewest steps
    text: Text
    baseline: str | None
    cost: str

    def summary(self) -> dict:
        """As plain JSON values."""
        return {"cost": self.cost} | summary(self.walked, self.rows, self.text, self.oracle, self.baseline)


@dataclass
class Engine:
    """Outcome tables by (drafter, plan) and what is read of the pools, each computed once."""

    source: PoolSource
    cost: StepCost = field(default_factory=FlatCost)
    _tables: dict[Arm, OutcomeTable] = field(default_factory=dict)
    _ranks: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _n_slots: dict[str, int] = field(default_factory=dict)

    def ranks(self, drafter: str) -> NDArray[np.float64]:
        """How often each rank of each slot of the first level is the text's token, [K, W]."""
        self._need(drafter)
        if drafter not in self._ranks:
            counts = sum(rank_counts(pools, self.span.rows(rows)) for rows, pools in self.source.parts(drafter))
            self._ranks[drafter] = rank_shares(np.asarray(counts))
        return self._ranks[drafter]

    def policies(self, specs: Sequence[str]) -> list[Named]:
        """Policies by their words, or those of a JSON file. InputError on an unknown or repeated one."""
        found: list[Named] = []
        for spec in specs:
            if spec.endswith(".json"):
                found += [Named(*named) for named in read_policies(Path(spec), self.ranks)]
            else:
                found.append(Named(spec, parse_policy(spec, self.ranks)))
        names = [named.name for named in found]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"the policy {repeated!r} is listed twice")
        if not found:
            raise InputError("no policy is given; name some with --policy")
        return found

    def tables(self, arms: Sequence[Arm]) -> list[OutcomeTable]:
        """Every arm's outcome table, all those of a drafter in one reading of its pools."""
        for drafter in dict.fromkeys(arm.drafter for arm in arms):
            wanted = [a for a in dict.fromkeys(arms) if a.drafter == drafter and a not in self._tables]
            if wanted:
                self._need(drafter)
                self._fill(drafter, wanted)
        return [self._tables[arm] for arm in arms]

    def _fill(self, drafter: str, arms: Sequence[Arm]) -> None:
        parts: dict[Arm, list[OutcomeTable]] = {arm: [] for arm in arms}
        for rows, pools in self.source.parts(drafter):
            span, creators = self.span.rows(rows), Creators.of(pools)
            self._n_slots[drafter] = pools.n_slots
            for arm in arms:
                parts[arm].append(outcome_table(arm.plan, pools, span, creators))
        self._tables.update({arm: joined(tables) for arm, tables in parts.items()})

    def _need(self, drafter: str) -> None:
        if drafter not in self.source.drafters:
            there = ", ".join(self.source.drafters) or "none"
            raise InputError(f"the trace holds no pools of the drafter {drafter!r}; there are {there}")

    @cached_property
    def span(self) -> Span:
        """Where the text goes on behind each of its rows."""
        return Span.of(self.source.text)

    def menu(self, policy: Policy) -> Menu:
        """A policy's arms side by side."""
        tables = self.tables(policy.arms)
        drafters = [arm.drafter for arm in policy.arms]
        return Menu(tables, drafters, [self._n_slots[drafter] for drafter in drafters])

    def walked(self, named: Named, n_seeds: int, n_orders: int, is_read: bool = True) -> Walked:
        """One policy's steps; of one arm also its slots and calibration (`is_read`)."""
        arms, menu, text = named.policy.arms, self.menu(named.policy), self.source.text
        is_alone = len(arms) == 1
        over = streams(text.n_episodes, *((1, 1) if is_alone else (n_seeds, n_orders)))
        steps = walk(named.policy, menu, text, over, self.cost)
        average = average_tau(menu.tables[0].n_accepted, text) if is_alone else float("nan")
        drafter = "+".join(dict.fromkeys(arm.drafter for arm in arms))
        slots, found = self._readings(arms[0], steps) if is_alone and is_read else (None, None)
        return Walked(named.name, drafter, [arm.name for arm in arms], steps, average, slots, found)

    def _readings(self, arm: Arm, steps: Steps) -> tuple[SlotTable, Calibration]:
        """Slots and calibration of the walked rows, part by part; steps stand in order of their rows."""
        slots, found = [], no_calibration()
        for part, pools in self.source.parts(arm.drafter):
            here = (part.start <= steps.row) & (steps.row < part.stop)
            rows, span = steps.row[here].astype(np.int64) - part.start, self.span.rows(part)
            slots.append(slot_table(arm.plan, pools, span, rows).up_to(steps.n_committed[here]))
            found += calibration(arm.plan, pools, span, rows)
        return joined_slots(slots), found


def replay(
    source: PoolSource,
    specs: Sequence[str],
    baseline: str | None = None,
    n_seeds: int = 1,
    n_orders: int = 1,
    seed: int = 0,
    is_read: bool = True,
    tick: Callable[[], object] = lambda: None,
) -> Replayed:
    """Walk every policy over a trace and read the results. `baseline` names one of them (the first if None)."""
    engine = Engine(source)
    policies = engine.policies(specs)
    names = [named.name for named in policies]
    if baseline is not None and baseline not in names:
        raise InputError(f"the baseline {baseline!r} is not among the policies {', '.join(names)}")
    arms = list(dict.fromkeys(arm for named in policies for arm in named.policy.arms))
    n_accepted = np.stack([table.n_accepted for table in engine.tables(arms)])
    walked = []
    for named in policies:
        walked.append(engine.walked(named, n_seeds, n_orders, is_read))
        tick()
    against = baseline or names[0]
    rows = replay_rows(walked, source.text, against, seed)
    return Replayed(walked, rows, fewest_steps(n_accepted, source.text), source.text, against, engine.cost.name)
