"""Policies walk a recorded text by lookup: which step starts where, and what it commits. Numpy and numba, no torch.

A stream is an ordered list of episodes that share one policy state; B streams walk in lockstep. A step that starts at
position t commits `n_accepted + 1` tokens, cut where the episode's text ends: that end is the first stop id or the
length limit, so the cut is the one live decoding makes (`tree.commit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.errors import InputError
from workbench.forwards import forward_counts
from workbench.outcomes import OutcomeTable
from workbench.policy import (
    Feedback,
    FlatCost,
    Observation,
    Policy,
    StepCost,
    StepWork,
    kept,
    prompt_draw_key,
    uniforms,
)
from workbench.pools import Text
from workbench.source import kernel

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Menu:
    """The arms of a policy over the R rows of a text: their outcomes and drafters, side by side."""

    tables: Sequence[OutcomeTable]  # [A]
    drafters: Sequence[str]  # [A], each arm's
    n_slots: Sequence[int]  # [A], slots of a forward of each arm's drafter

    @cached_property
    def names(self) -> list[str]:
        """The distinct drafters."""
        return list(dict.fromkeys(self.drafters))

    @cached_property
    def drafter(self) -> NDArray[np.int32]:
        """[A], each arm's drafter as an index into names."""
        return np.array([self.names.index(name) for name in self.drafters], np.int32)

    def of_rows(self, name: str, arm: Ints, row: Ints) -> NDArray:
        """A column of the outcome tables at (arm, row), [R']."""
        return self._stacked(name)[arm, row]

    @cached_property
    def _columns(self) -> dict[str, NDArray]:
        return {}

    def _stacked(self, name: str) -> NDArray:
        """[A, R]."""
        if name not in self._columns:
            values = [getattr(t, name) if name != "n_grown" else t.n_starts[:, 1:].sum(axis=1) for t in self.tables]
            self._columns[name] = np.stack(values)
        return self._columns[name]

    @property
    def n_accepted(self) -> NDArray[np.int32]:
        """[A, R]."""
        return self._stacked("n_accepted")

    def work(self, arm: Ints, row: Ints, n_refreshed: Ints, context_length: NDArray[np.int32]) -> StepWork:
        """What steps cost, in counts."""
        n_levels, n_grown = self.of_rows("n_blocks", arm, row), self.of_rows("n_grown", arm, row)
        n_forwards, n_rows = np.zeros_like(n_refreshed), np.zeros_like(n_refreshed)
        for i, (name, n_slots) in enumerate(zip(self.drafters, self.n_slots)):
            is_it = arm == i
            counts = forward_counts(name, n_slots, n_refreshed[is_it], n_levels[is_it], n_grown[is_it])
            n_forwards[is_it], n_rows[is_it] = counts
        return StepWork(self.drafter[arm], self.of_rows("n_nodes", arm, row), n_forwards, n_rows, context_length)


@dataclass(frozen=True)
class Steps:
    """R steps in order of (stream, time). Counts are after the cuts at stop ids and length."""

    stream: NDArray[np.int32]
    episode: NDArray[np.int32]
    step: NDArray[np.int32]  # of the episode, 0-based
    position: NDArray[np.int32]
    row: NDArray[np.int32]  # of the pools
    arm: NDArray[np.int32]
    n_refreshed: NDArray[np.int32]  # pairs committed since the arm's drafter last ran
    n_committed: NDArray[np.int32]
    n_accepted: NDArray[np.int32]
    n_accepted_high: NDArray[np.int32]  # equal unless missed
    is_missed: NDArray[np.bool_]
    has_bonus: NDArray[np.bool_]
    is_stopped: NDArray[np.bool_]
    is_truncated: NDArray[np.bool_]
    n_nodes: NDArray[np.int32]
    tree_depth: NDArray[np.int16]
    n_blocks: Ints
    n_forwards: Ints
    n_forward_rows: Ints
    context_length: NDArray[np.int32]
    ms: NDArray[np.float64]  # modelled

    @property
    def n_steps(self) -> int:
        """R."""
        return len(self.row)

    def only(self, chosen: NDArray) -> Steps:
        """Some of the steps (a mask or indices)."""
        return Steps(*(getattr(self, f.name)[chosen] for f in fields(Steps)))


@kernel
def _serve(
    active: np.ndarray,
    arm: np.ndarray,
    n_most: int,
    n_accepted: np.ndarray,
    drafter: np.ndarray,
    first_row: np.ndarray,
    n_rows: np.ndarray,
    order: np.ndarray,
    cursor: np.ndarray,
    ran: np.ndarray,
    out: np.ndarray,
) -> int:
    """Walk every active stream for at most n_most steps, each under its arm; returns how many steps `out` holds.

    cursor [B, 3]: place in the stream's order [B, E], position, step. ran [B, D]: position each drafter last ran at.
    out [R, 8]: stream, episode, step, position, row, arm, pairs to refresh, tokens committed.
    """
    n_out = 0
    for i in range(active.shape[0]):
        b, a = active[i], arm[i]
        here, d = cursor[b], drafter[a]
        for _ in range(n_most):
            if here[0] >= order.shape[1]:
                break
            e, t = order[b, here[0]], here[1]
            row = first_row[e] + t - 1
            n_committed = min(n_accepted[a, row] + 1, n_rows[e] + 1 - t)
            to = out[n_out]
            to[0], to[1], to[2], to[3] = b, e, here[2], t
            to[4], to[5], to[6], to[7] = row, a, t - ran[b, d], n_committed
            n_out += 1
            ran[b, d] = t
            here[1] += n_committed
            here[2] += 1
            if here[1] > n_rows[e]:
                here[0], here[1], here[2] = here[0] + 1, 1, 0
                ran[b] = 0
    return n_out


_WIDTH = 8  # of `out`


@dataclass(frozen=True)
class Streams:
    """B streams over a text: the order of episodes and the policy seed of each."""

    order: NDArray[np.int32]  # [B, E], every stream an order of the same episodes
    policy_seed: NDArray[np.uint64]  # [B]


def streams(n_episodes: int, n_seeds: int = 1, n_orders: int = 1) -> Streams:
    """Policy seeds 0 .. n_seeds - 1 on each of n_orders orders of the episodes: as recorded, then shuffled."""
    if n_seeds < 1 or n_orders < 1:
        raise InputError(f"a walk needs at least 1 seed and 1 order, not {n_seeds} and {n_orders}")
    orders = [np.arange(n_episodes, dtype=np.int32)]
    orders += [np.random.default_rng(i).permutation(n_episodes).astype(np.int32) for i in range(1, n_orders)]
    return Streams(np.repeat(orders, n_seeds, axis=0), np.tile(np.arange(n_seeds, dtype=np.uint64), n_orders))


class _Walker:
    """B streams under way."""

    def __init__(self, menu: Menu, text: Text, over: Streams) -> None:
        n_rows = np.diff(text.row_offset)
        has_steps = n_rows[over.order] > 0
        self.order = over.order[has_steps].reshape(len(over.order), -1)
        self.n_most = int(n_rows[self.order].sum())  # steps, if each committed one token
        self.cursor = np.tile(np.array([0, 1, 0], np.int32), (len(self.order), 1))
        ran = np.zeros((len(self.order), len(menu.names)), np.int32)
        self._given = menu.n_accepted, menu.drafter, text.row_offset, n_rows, self.order, self.cursor, ran
        self.active = np.arange(len(self.order) if self.n_most else 0)

    def serve(self, arm: Ints, n_most: int, n_room: int) -> NDArray[np.int32]:
        """At most n_most steps of every active stream."""
        out = np.empty((n_room, _WIDTH), np.int32)
        return out[: _serve(self.active, arm, n_most, *self._given, out)]

    def drop_ended(self) -> NDArray[np.bool_]:
        """Forget the streams that have ended; says which of the active ones go on."""
        is_left = self.cursor[self.active, 0] < self.order.shape[1]
        self.active = self.active[is_left]
        return is_left


_COST = FlatCost()


def walk(policy: Policy, menu: Menu, text: Text, over: Streams, cost: StepCost = _COST) -> Steps:
    """All steps of all streams. `menu` holds the policy's arms, in its order.

    A policy of one arm has nothing to choose, so its streams are walked to their ends at once.
    """
    walker = _Walker(menu, text, over)
    if len(policy.arms) == 1:
        arm = np.zeros(len(walker.active), np.int64)
        return _steps(walker.serve(arm, walker.n_most, walker.n_most), menu, text, cost)
    keys = np.array([prompt_draw_key(ids, turn) for ids, turn in zip(text.prompt_tokens, text.turn)], np.uint64)
    n_prompt = _prompt_lengths(text)
    parts, state = [np.empty((0, _WIDTH), np.int32)], policy.init(len(walker.order))
    while len(walker.active):
        place, position, step = walker.cursor[walker.active].T
        episode = walker.order[walker.active, place]
        draws = uniforms(over.policy_seed[walker.active], keys[episode], step, policy.n_uniforms)
        arm = policy.choose(state, Observation(step, position, n_prompt[episode] + position, draws))
        served = walker.serve(arm, 1, len(arm))
        state = policy.update(state, arm, _feedback(served, menu, n_prompt, cost))
        parts.append(served)
        is_left = walker.drop_ended()
        if not is_left.all():
            state = kept(state, is_left)
    served = np.concatenate(parts)
    return _steps(served[np.argsort(served[:, 0], kind="stable")], menu, text, cost)


def _prompt_lengths(text: Text) -> NDArray[np.int32]:
    return np.array([len(ids) for ids in text.prompt_tokens], np.int32)


def _feedback(served: NDArray[np.int32], menu: Menu, n_prompt: NDArray[np.int32], cost: StepCost) -> Feedback:
    _, episode, _, position, row, arm, n_refreshed, n_committed = served.T
    work = menu.work(arm, row, n_refreshed, n_prompt[episode] + position)
    return Feedback(n_committed, menu.n_accepted[arm, row], work.n_nodes, cost.step_ms(work))


def _steps(served: NDArray[np.int32], menu: Menu, text: Text, cost: StepCost) -> Steps:
    """The rows of the steps, everything read off the outcome tables."""
    stream, episode, step, position, row, arm, n_refreshed, n_committed = np.ascontiguousarray(served.T)
    n_accepted, room = menu.of_rows("n_accepted", arm, row), np.diff(text.offset)[episode] - position
    has_stop = np.isin(text.token[text.offset[1:] - 1], text.stop_ids)[episode]
    has_bonus = n_accepted < room
    context_length = _prompt_lengths(text)[episode] + position
    work = menu.work(arm, row, n_refreshed, context_length)
    return Steps(
        stream=stream,
        episode=episode,
        step=step,
        position=position,
        row=row,
        arm=arm,
        n_refreshed=n_refreshed,
        n_committed=n_committed,
        n_accepted=n_accepted,
        n_accepted_high=menu.of_rows("n_accepted_high", arm, row),
        is_missed=menu.of_rows("is_missed", arm, row),
        has_bonus=has_bonus,
        is_stopped=(n_committed == room) & has_stop,
        is_truncated=~has_bonus & ~has_stop,
        n_nodes=work.n_nodes,
        tree_depth=menu.of_rows("tree_depth", arm, row),
        n_blocks=menu.of_rows("n_blocks", arm, row),
        n_forwards=work.n_forwards,
        n_forward_rows=work.n_rows,
        context_length=context_length,
        ms=cost.step_ms(work),
    )
