"""Pools: what every drafter would offer at every position of a committed text, and the text they lie along. No torch.

Verification is lossless, so the text does not depend on the policy; a pool depends on the text before it alone. Row r
of a pool is one possible step start: position t >= 1 of an episode, its root the token at t - 1. Rows run through the
episodes one after another, t = 1 .. L - 1 of each: an episode of L tokens has L - 1 rows.

A pool is recorded along an envelope, the widest plan it can answer: level 0 is the block at the root, a later level the
blocks under the starts the envelope chose. A start is known by the candidate that created it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.errors import InputError
from workbench.tree import Expansion, Plan, Starts

LABEL = 1 << 24  # tokens from here on are labels, not token ids


@dataclass(frozen=True)
class PoolLevel:
    """What was recorded at one level for R rows of at most S starts.

    `expansion.token` int32 [R, S, K, W] holds target token ids, -1 where there is no candidate; behind level 0 it may
    hold labels (>= LABEL) instead. Two candidates that can hang under one parent hold equal values if and only if their
    tokens are equal, and a candidate whose parent lies on the committed text holds the committed token's id if and only
    if it is that token: so values may be compared among siblings and with the text, and with nothing else.
    `starts`: int16 [R, S] level, start, slot, rank of the creating candidate, where start is a column of this pool's
    level; -1 at level 0 and in the padding. `node` is -1 for the root, 0 for a start and -2 for padding.
    """

    expansion: Expansion
    starts: Starts


@dataclass(frozen=True)
class DraftPools:
    """One drafter's pools over R rows."""

    kind: str  # "specblock", "eagle3", "medusa", "parallelspec", "lookup"
    n_slots: int
    has_tiers: bool
    levels: list[PoolLevel]  # at least one; a level no row has starts at may be missing
    envelope: Plan | None = None  # what the starts were chosen by; None where there is but one level

    @property
    def n_rows(self) -> int:
        """R."""
        return len(self.levels[0].starts.n)

    @property
    def width(self) -> int:
        """W, most candidates of a slot."""
        return self.levels[0].expansion.token.shape[3]

    def rows(self, rows: slice | np.ndarray) -> DraftPools:
        """The pools of some rows alone (views for a slice)."""
        levels = [PoolLevel(expansion_rows(x.expansion, rows), starts_rows(x.starts, rows)) for x in self.levels]
        return DraftPools(self.kind, self.n_slots, self.has_tiers, levels, self.envelope)


def expansion_rows(expansion: Expansion, rows: slice | np.ndarray) -> Expansion:
    """An expansion of some rows alone."""
    return Expansion(expansion.token[rows], expansion.logp[rows], expansion.tier[rows])


def starts_rows(starts: Starts, rows: slice | np.ndarray) -> Starts:
    """Starts of some rows alone."""
    return Starts(
        starts.node[rows], starts.token[rows], starts.level[rows], starts.start[rows], starts.slot[rows],
        starts.rank[rows], starts.n[rows],
    )  # fmt: skip


@dataclass(frozen=True)
class Text:
    """The committed text of E episodes, and what cuts a step along it.

    Past an episode's recorded end nothing is known; a step that would pass `room` is cut there, as live decoding cuts.
    """

    token: np.ndarray  # int32 [L], all episodes' committed tokens, position 0 of each first
    offset: np.ndarray  # int64 [E + 1], episode e is token[offset[e] : offset[e + 1]]
    prompt: list[int]  # place of the prompt in its run
    prompt_id: list[str]
    task: list[str]
    turn: list[int]
    prompt_tokens: list[np.ndarray]  # int32, the rendered prompt of each episode
    room: np.ndarray  # int32 [E], most tokens each episode might have had
    stop_ids: tuple[int, ...]

    @property
    def n_episodes(self) -> int:
        """E."""
        return len(self.offset) - 1

    @property
    def n_rows(self) -> int:
        """R, possible step starts: every position but the first of each episode."""
        return len(self.token) - self.n_episodes

    @property
    def row_offset(self) -> np.ndarray:
        """int64 [E + 1], episode e has the rows row_offset[e] .. row_offset[e + 1] - 1."""
        return self.offset - np.arange(len(self.offset))

    def row(self, episode: int, position: int) -> int:
        """The row of position t >= 1 of an episode; InputError where there is none."""
        if not 1 <= position < self.offset[episode + 1] - self.offset[episode]:
            raise InputError(f"episode {episode} has no step start at position {position}")
        return int(self.offset[episode]) - episode + position - 1

    def row_episode(self) -> np.ndarray:
        """int32 [R], each row's episode. The token a row's target wants next is token[row + episode + 1]."""
        return np.repeat(np.arange(self.n_episodes, dtype=np.int32), np.diff(self.row_offset))

    def row_position(self) -> np.ndarray:
        """int32 [R], each row's position t."""
        return (np.arange(self.n_rows) - self.row_offset[:-1][self.row_episode()] + 1).astype(np.int32)

    def episodes(self, chosen: Sequence[int]) -> Text:
        """The text of some episodes alone, in the order given."""
        parts = [self.token[self.offset[e] : self.offset[e + 1]] for e in chosen]
        return Text(
            token=np.concatenate([*parts, np.empty(0, np.int32)]),
            offset=np.cumsum([0, *map(len, parts)], dtype=np.int64),
            prompt=[self.prompt[e] for e in chosen],
            prompt_id=[self.prompt_id[e] for e in chosen],
            task=[self.task[e] for e in chosen],
            turn=[self.turn[e] for e in chosen],
            prompt_tokens=[self.prompt_tokens[e] for e in chosen],
            room=self.room[np.asarray(chosen, np.int64)],
            stop_ids=self.stop_ids,
        )
