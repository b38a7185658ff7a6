"""A target with a fixed text and a drafter with fixed candidates, numpy only: every count can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.tree import Expansion, Starts, Tree, accept


@dataclass
class ScriptedPrefill:
    token: int
    features: np.ndarray  # [S, 3]: the index of the whole sequence, three times
    final: np.ndarray  # [S, 1]


@dataclass
class ScriptedVerdict:
    path: list[int]
    tokens: list[int]
    bonus: int
    features: np.ndarray
    final: np.ndarray


def index_features(first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Features that name their index, so that a drafter can check that pairs arrive once, in order."""
    index = np.arange(first, first + n, dtype=np.float64)[:, None]
    return index.repeat(3, axis=1), index


@dataclass
class ScriptedTarget:
    """Says `text` whatever is drafted; after its end it says `filler` for ever."""

    text: Sequence[int]
    filler: int = 0
    sessions: list[ScriptedSession] = field(default_factory=list)

    def session(self, capacity_tokens: int, sampling: Any, turn: int = 0) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self, capacity_tokens))
        return self.sessions[-1]

    def wants(self, position: int) -> int:
        return self.text[position] if position < len(self.text) else self.filler


@dataclass
class ScriptedSession:
    target: ScriptedTarget
    capacity: int
    n_prompt: int = 0
    n_committed: int = 0
    n_forwards: int = 0

    def prefill(self, prompt_ids: Sequence[int]) -> ScriptedPrefill:
        self.n_prompt, self.n_committed = len(prompt_ids), 1
        return ScriptedPrefill(self.target.wants(0), *index_features(0, self.n_prompt))

    def verify(self, tree: Tree) -> ScriptedVerdict:
        start, wants = self.n_committed, self.target.wants
        assert self.n_prompt + start + len(tree.token) <= self.capacity
        path, bonus = accept(tree, lambda node: wants(start + (0 if node < 0 else int(tree.depth[node]))))
        root = self.n_prompt + start - 1
        self.n_committed += len(path) + 1
        self.n_forwards += 1
        tokens = [int(tree.token[node]) for node in path]
        return ScriptedVerdict(list(path), tokens, bonus, *index_features(root, len(path) + 1))

    def step(self) -> int:
        self.n_committed += 1
        self.n_forwards += 1
        return self.target.wants(self.n_committed - 1)


@dataclass
class ScriptedForward:
    kind: str
    n_rows: int
    n_starts: int


@dataclass
class ScriptedState:
    tokens: list[int]  # prompt and committed
    n_pairs: int = 0
    n_queued: int = 0
    forwards: list[ScriptedForward] = field(default_factory=list)
    grown: list[tuple[list[list[int]], Expansion]] = field(default_factory=list)  # paths of the starts, candidates


Offer = Callable[[list[int], int], tuple[list[list[int]], list[int]]]


@dataclass
class ScriptedDrafter:
    """`offer(prefix, n_drafted)` gives K lists of candidates and K tiers for a start.

    `prefix` is prompt, committed text and the start's own drafted path, whose length is `n_drafted`.
    """

    offer: Offer
    n_slots: int
    max_width: int = 10
    name: str = "scripted"
    kind: str = "scripted"
    n_levels: int = 99
    has_tiers: bool = True
    weights_hash: str = "none"

    def open(self, prompt_ids: list[int], capacity: int) -> ScriptedState:
        return ScriptedState(list(prompt_ids))

    def observe(self, state: ScriptedState, features: np.ndarray, final: np.ndarray, tokens: list[int]) -> None:
        assert len(features) == len(final) == len(tokens)
        assert features[:, 0].tolist() == list(range(state.n_pairs, state.n_pairs + len(tokens))), "pairs out of order"
        for token in tokens:
            state.n_pairs += 1
            if state.n_pairs == len(state.tokens):
                state.tokens.append(token)
            assert state.tokens[state.n_pairs] == token, "pair i must bring the token at index i + 1"
        state.n_queued += len(tokens)

    def expand(self, state: ScriptedState, level: int, starts: Starts, width: int) -> Expansion:
        if level == 0:
            assert state.n_queued, "every step commits at least one pair"
            state.grown = []
        n = int(starts.n[0])
        kind, n_rows = ("refresh", state.n_queued) if level == 0 else ("grow", n)
        state.forwards.append(ScriptedForward(kind, n_rows, n))
        state.n_queued = 0
        paths = [self._path(state, starts, s) for s in range(n)]
        # A refresh ends at the last pair seen; the text so far is what the pairs brought, not the prompt beyond.
        prefix = state.tokens[: state.n_pairs + 1]
        expansion = self._offers([self.offer(prefix + path, len(path)) for path in paths], starts.node.shape[1], width)
        state.grown.append((paths, expansion))
        return expansion

    def _path(self, state: ScriptedState, starts: Starts, s: int) -> list[int]:
        if starts.node[0, s] == -1:
            return []
        paths, grown = state.grown[int(starts.level[0, s])]
        start, slot = int(starts.start[0, s]), int(starts.slot[0, s])
        spine = [int(t) for t in grown.token[0, start, :slot, 0]]
        assert grown.token[0, start, slot, int(starts.rank[0, s]) - 1] == starts.token[0, s]
        return [*paths[start], *spine, int(starts.token[0, s])]

    def _offers(self, offers: list[tuple[list[list[int]], list[int]]], n_columns: int, width: int) -> Expansion:
        token = np.full((1, n_columns, self.n_slots, width), -1, np.int32)
        tier = np.full((1, n_columns, self.n_slots), -1, np.int8)
        for s, (slots, tiers) in enumerate(offers):
            tier[0, s, : len(tiers)] = tiers
            for k, candidates in enumerate(slots):
                token[0, s, k, : len(candidates[:width])] = candidates[:width]
        steps = -100 * np.arange(1, width + 1, dtype=np.int16)  # rank 1 costs 100 steps, rank 2 costs 200, ...
        return Expansion(token, np.where(token >= 0, steps, -32767).astype(np.int16), tier)


@dataclass
class CountingClock:
    """Every reading is one millisecond after the last."""

    time: float = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time
