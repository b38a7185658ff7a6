"""Pools: what every drafter would offer at every position of a committed text, and the text they lie along. No torch.

Verification is lossless, so the text does not depend on the policy; a pool depends on the text before it alone. Row r
of a pool is one possible step start: position t >= 1 of an episode, its root the token at t - 1. Rows run through the
episodes one after another, t = 1 .. L - 1 of each: an episode of L tokens has L - 1 rows.

A pool is recorded along an envelope, the widest plan it can answer: level 0 is the block at the root, a later level the
blocks under the starts the envelope chose. A start is known by the candidate that created it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from workbench.errors import InputError
from workbench.ngrams import NgramIndex
from workbench.tree import PADDING, ROOT, BeamPlan, BlockPlan, Expansion, Plan, Starts

_MOST = 1_000
NO_LOGP = -32767  # the log-probability that stands where there is no candidate
LABEL = 1 << 24  # tokens from here on are labels, not token ids


_ALL = 10_000  # a budget that no envelope fills


@dataclass(frozen=True)
class Envelope:
    """The widest plans a recording answers: what is drafted at every position.

    A block drafter offers `width` candidates at each slot of its first block, then of the blocks under the `starts[0]`
    best nodes, and so on, a number of starts a level; only the last number may stand for several levels. "Best" is the
    prune order of trees, over all candidates offered, equal (parent, token) merged, each node at most one block: the
    block plan that keeps everything. A beam drafter grows a beam of `top_k` for `depth` levels behind the first. Any
    other drafter offers `width` candidates a slot.
    """

    width: int = 10
    starts: tuple[int, ...] = (24, 10)
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        if any(n != self.starts[1] for n in self.starts[2:]):
            raise InputError(f"an envelope takes one number of starts for all levels behind the second: {self.starts}")
        for what, value in (("width", self.width), ("depth", self.depth), ("top_k", self.top_k), *self._named_starts()):
            if type(value) is not int or not 0 < value <= _MOST:
                raise InputError(f"envelope: {what} must be a whole number from 1 to {_MOST}, not {value!r}")

    def _named_starts(self) -> list[tuple[str, int]]:
        return [("starts", n) for n in self.starts]

    def plan(self, kind: str, n_slots: int) -> Plan | None:
        """The plan that picks the starts of a drafter kind with K slots; None where there is but one level."""
        if kind == "eagle3":
            return BeamPlan(depth=self.depth, top_k=self.top_k, budget=_ALL)
        if kind != "specblock":
            return None
        w = self.width
        return BlockPlan(
            n_slots=n_slots, root_width=w, tier_widths=(w, w, w, w), plain_width=w, n_blocks=1 + len(self.starts),
            budget=_ALL, has_give_up=False, is_lazy=False, first_start_cap=self.starts[0] if self.starts else None,
            start_cap=self.starts[1] if len(self.starts) > 1 else None,
        )  # fmt: skip

    def width_of(self, kind: str) -> int:
        """Candidates asked of each slot of a drafter kind."""
        return self.top_k if kind == "eagle3" else self.width


ENVELOPES: dict[str, Envelope] = {
    "default": Envelope(),
    "two-blocks": Envelope(starts=(24,)),
    "small": Envelope(width=4, starts=(6,), depth=3, top_k=4),
}


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


def root_starts(n_rows: int) -> Starts:
    """The roots of R rows."""
    whole, address = np.full((n_rows, 1), ROOT, np.int32), np.full((n_rows, 1), -1, np.int16)
    return Starts(whole, whole, address, address, address, address, np.ones(n_rows, np.int32))


def clean_level(expansion: Expansion, starts: Starts) -> PoolLevel:
    """A level as it is recorded: nothing in padded columns, no node numbers."""
    is_start = np.arange(starts.node.shape[1]) < starts.n[:, None]
    node = np.where(is_start, np.minimum(starts.node, 0), PADDING).astype(np.int32)
    token = np.where(is_start[..., None, None], expansion.token, -1).astype(np.int32)
    return PoolLevel(
        Expansion(
            token=token,
            logp=np.where(token < 0, NO_LOGP, expansion.logp).astype(np.int16),
            tier=np.where(is_start[..., None], expansion.tier, -1).astype(np.int8),
        ),
        Starts(node, starts.token, starts.level, starts.start, starts.slot, starts.rank, starts.n),
    )


def stack_levels(parts: Sequence[Sequence[PoolLevel]], n_slots: int, width: int) -> list[PoolLevel]:
    """Levels of consecutive rows as one, padded to the most starts; a part may end at an earlier level than others."""
    n_rows = [len(levels[0].starts.n) for levels in parts]
    n_levels = max((len(levels) for levels in parts), default=1)
    out = []
    for i in range(n_levels):
        filled = [levels[i] if i < len(levels) else _no_starts(n, n_slots, width) for levels, n in zip(parts, n_rows)]
        filled = filled or [_no_starts(0, n_slots, width)]
        n_starts = max(level.starts.node.shape[1] for level in filled)
        wide = [_widened(level, n_starts) for level in filled]
        out.append(
            PoolLevel(
                Expansion(*(np.concatenate([getattr(x.expansion, f.name) for x in wide]) for f in fields(Expansion))),
                Starts(*(np.concatenate([getattr(x.starts, f.name) for x in wide]) for f in fields(Starts))),
            )
        )
    return out


def _no_starts(n_rows: int, n_slots: int, width: int) -> PoolLevel:
    expansion = Expansion(
        np.empty((n_rows, 0, n_slots, width), np.int32),
        np.empty((n_rows, 0, n_slots, width), np.int16),
        np.empty((n_rows, 0, n_slots), np.int8),
    )
    whole, address = np.empty((n_rows, 0), np.int32), np.empty((n_rows, 0), np.int16)
    return PoolLevel(expansion, Starts(whole, whole, address, address, address, address, np.zeros(n_rows, np.int32)))


def _widened(level: PoolLevel, n_starts: int) -> PoolLevel:
    """The level with padding up to `n_starts` columns."""
    n_more = n_starts - level.starts.node.shape[1]
    if not n_more:
        return level

    def padded(x: np.ndarray, value: int) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, n_more)] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    e, s = level.expansion, level.starts
    return PoolLevel(
        Expansion(padded(e.token, -1), padded(e.logp, NO_LOGP), padded(e.tier, -1)),
        Starts(
            padded(s.node, PADDING), padded(s.token, -1), padded(s.level, -1), padded(s.start, -1),
            padded(s.slot, -1), padded(s.rank, -1), s.n,
        ),
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


def lookup_pools(text: Text, max_ngram: int, n_slots: int) -> DraftPools:
    """What prompt lookup offers along a text: no recording is needed, the tokens suffice."""
    token = np.full((text.n_rows, 1, n_slots, 1), -1, np.int32)
    row = 0
    for episode, prompt in enumerate(text.prompt_tokens):
        index = NgramIndex(max_ngram)
        index.extend(prompt.tolist())
        for committed in text.token[text.offset[episode] : text.offset[episode + 1] - 1].tolist():
            index.extend([committed])
            copied = index.copy(n_slots)
            token[row, 0, : len(copied), 0] = copied
            row += 1
    logp = np.where(token < 0, NO_LOGP, 0).astype(np.int16)
    expansion = Expansion(token, logp, np.full(token.shape[:3], -1, np.int8))
    return DraftPools("lookup", n_slots, False, [PoolLevel(expansion, root_starts(text.n_rows))])
