"""What a row of the steps table says about one step, read off what was drafted and what the target wanted. No torch.

The caller adds the row's keys (prompt, task, policy, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from workbench.tree import Commit, Expansion, Forest, Starts, Tree

PARALLEL_KINDS = frozenset({"static", "product"})  # plans whose slot k hangs under every node of depth k


class ForwardLike(Protocol):
    """One forward the drafter ran."""

    @property
    def kind(self) -> str: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def n_starts(self) -> int: ...


@dataclass(frozen=True)
class Level:
    """One expanded level of a grown tree, one position (T = 1)."""

    starts: Starts
    expansion: Expansion


@dataclass(frozen=True)
class Draft:
    """What was drafted in one step. Plain decoding drafts nothing: every field empty."""

    tree: Tree
    plan_kind: str = ""
    forest: Forest | None = None
    levels: Sequence[Level] = ()
    forwards: Sequence[ForwardLike] = ()


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step."""

    drafter_ms: float
    verification_ms: float
    other_ms: float


@dataclass(frozen=True, order=True)
class Slot:
    """A slot whose parent is the root or an accepted node, in the order the row lists them."""

    depth: int
    level: int
    start: int
    slot: int
    tier: int = field(compare=False)
    rank: int = field(compare=False)  # of the target's token, 1-based; 0 = not among the candidates
    offered: int = field(compare=False)
    width: int = field(compare=False)  # candidates that stood in the verified tree


def path_slots(draft: Draft, path: Sequence[int], tokens: Sequence[int]) -> list[Slot]:
    """Slots under the root and the accepted nodes `path` (tree nodes), down to the last committed token.

    tokens: what the step committed, so tokens[d] is the target's choice after the path's node of depth d. Slots whose
    choice was never committed (cut at a stop id or the length limit) are left out: the text does not hold it.
    """
    if draft.forest is None:
        return []
    hanging = _parallel_slots if draft.plan_kind in PARALLEL_KINDS else _block_slots
    return sorted(
        _slot(draft, place, depth, path[depth - 1] if depth else -1, tokens[depth])
        for place, depth in hanging(draft, path)
        if depth < len(tokens)
    )


Place = tuple[int, int, int]  # level, start, slot


def _parallel_slots(draft: Draft, path: Sequence[int]) -> Iterator[tuple[Place, int]]:
    """Every slot of the one level, as far as the path goes, with its parent's depth."""
    assert draft.forest is not None
    n_slots = draft.forest.spine[0].shape[2]
    return (((0, 0, k), k) for k in range(min(n_slots, len(path) + 1)))


def _block_slots(draft: Draft, path: Sequence[int]) -> Iterator[tuple[Place, int]]:
    """Every slot whose parent is the root or on the path, with its parent's depth.

    Slot 0 hangs under its block's start, slot k under the rank-1 candidate of slot k - 1, after merging.
    """
    assert draft.forest is not None
    depth_of = {-1: 0} | {_grown_node(draft, node): depth for depth, node in enumerate(path, start=1)}
    for index, level in enumerate(draft.levels):
        spine = draft.forest.spine[index][0]  # [S, K]
        for start in range(int(level.starts.n[0])):
            parents = [level.starts.node[0, start], *spine[start, :-1]]
            yield from (((index, start, k), depth_of[p]) for k, p in enumerate(map(int, parents)) if p in depth_of)


def _grown_node(draft: Draft, node: int) -> int:
    """The forest node that a tree node is, found by the candidate that created it."""
    forest, tree = draft.forest, draft.tree
    assert forest is not None
    n = int(forest.n[0])
    is_it = np.ones(n, bool)
    for name in ("level", "start", "slot", "rank"):
        is_it &= getattr(forest, name)[0, :n] == getattr(tree, name)[node]
    return int(np.flatnonzero(is_it)[0])


def _slot(draft: Draft, place: Place, depth: int, node: int, wanted: int) -> Slot:
    """The slot at `place` whose parent is tree node `node` at `depth`, the target wanting `wanted` there."""
    index, start, slot = place
    expansion = draft.levels[index].expansion
    candidates = expansion.token[0, start, slot]  # [W]
    found = np.flatnonzero(candidates == wanted)
    tree = draft.tree
    is_child = (tree.parent == node) & (tree.level == index) & (tree.start == start) & (tree.slot == slot)
    return Slot(
        depth=depth + 1,
        level=index,
        start=start,
        slot=slot,
        tier=int(expansion.tier[0, start, slot]),
        rank=int(found[0]) + 1 if len(found) else 0,
        offered=int((candidates >= 0).sum()),
        width=int(is_child.sum()),
    )


def step_row(
    *,
    step: int,
    position: int,
    context_length: int,
    draft: Draft,
    path: Sequence[int],
    commit: Commit,
    times: StepTimes,
) -> dict[str, Any]:
    """One row of the steps table, its keys excepted."""
    slots = path_slots(draft, path, commit.tokens)
    depths = draft.tree.depth
    return {
        "drafter_version": 0,
        "step": step,
        "position": position,
        "context_length": context_length,
        "n_blocks": len(draft.levels),
        "n_starts": [int(level.starts.n[0]) for level in draft.levels],
        "n_forwards": len(draft.forwards),
        "forward_kind": [f.kind for f in draft.forwards],
        "forward_rows": [f.n_rows for f in draft.forwards],
        "forward_starts": [f.n_starts for f in draft.forwards],
        **{f"slot_{name}": [getattr(s, name) for s in slots] for name in Slot.__dataclass_fields__},
        "n_nodes": len(depths),
        "tree_depth": int(depths.max()) if len(depths) else 0,
        "n_accepted": commit.n_accepted,
        "has_bonus": commit.has_bonus,
        "n_committed": len(commit.tokens),
        "bonus": commit.tokens[-1] if commit.has_bonus else None,
        "is_stopped": commit.is_stopped,
        "is_truncated": commit.is_truncated,
        "tokens": list(commit.tokens),
        "drafter_ms": times.drafter_ms,
        "verification_ms": times.verification_ms,
        "other_ms": times.other_ms,
    }
