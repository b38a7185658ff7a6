"""Random pools along a random text, whole envelopes wide, without a model: for speed and for properties of replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workbench.pools import DraftPools, PoolLevel, Text
from workbench.tree import BeamPlan, BlockPlan, Expansion, Plan, ProductPlan, Starts, grow

N_VOCAB = 1000
STOP = N_VOCAB  # never drafted

BLOCK_ENVELOPE = BlockPlan(
    root_width=10, tier_widths=(10, 10, 10, 10), plain_width=10, n_blocks=3, budget=9999, first_start_cap=24,
    start_cap=10, has_give_up=False, is_lazy=False,
)  # fmt: skip


def _offers(rng: np.random.Generator, n_slots: int, has_tiers: bool, sureness: float) -> Callable:
    """Candidates of random sureness: log-probabilities of a softmax over random gaps, tiers from the top's."""

    def expand(level: int, starts: Starts, width: int) -> Expansion:
        shape = (*starts.node.shape, n_slots)
        sharp = rng.gamma(1.5, sureness, shape)[..., None]
        scores = -sharp * np.cumsum(rng.exponential(0.6, (*shape, width)), axis=-1)
        rest = np.log(np.exp(scores).sum(axis=-1, keepdims=True) + 0.2 * np.exp(scores[..., -1:]) + 0.02)
        logp = np.round((scores - rest) * 1024).clip(-32767, 0).astype(np.int16)
        token = (rng.integers(N_VOCAB, size=shape)[..., None] + np.arange(width) * 7) % N_VOCAB
        top = np.exp(logp[..., 0] / 1024)
        tier = np.select([top > 0.7, top > 0.35, top > 0.12], [0, 1, 2], 3) if has_tiers else np.full(shape, -1)
        return Expansion(token.astype(np.int32), logp, tier.astype(np.int8))

    return expand


def pools(kind: str, n_rows: int, seed: int = 0, envelope: Plan | None = None, sureness: float = 6.0) -> DraftPools:
    """Pools of R rows along an envelope (the default one if None)."""
    plan = envelope or {"specblock": BLOCK_ENVELOPE, "eagle3": BeamPlan(budget=9999)}.get(kind, ProductPlan())
    n_slots = {"eagle3": 1, "lookup": 10}.get(kind, 4)
    rng, parts = np.random.default_rng(seed), []
    for first in range(0, n_rows, 500):
        parts.append(_levels(plan, _offers(rng, n_slots, kind == "specblock", sureness), min(500, n_rows - first)))
    n_levels = max(map(len, parts))
    assert all(len(part) == n_levels for part in parts)
    levels = [stacked([part[i] for part in parts]) for i in range(n_levels)]
    return DraftPools(kind, n_slots, kind == "specblock", levels, plan)


def _levels(plan: Plan, offers: Callable, n_rows: int) -> list[PoolLevel]:
    levels: list[PoolLevel] = []

    def expand(level: int, starts: Starts, width: int) -> Expansion:
        levels.append(PoolLevel(offers(level, starts, width), starts))
        return levels[-1].expansion

    grow(plan, expand, n_rows)
    return levels


def stacked(levels: Sequence[PoolLevel]) -> PoolLevel:
    """Levels of consecutive rows as one, padded to the most starts."""
    n_most = max(level.starts.node.shape[1] for level in levels)

    def joined(arrays: list[np.ndarray], fill: int) -> np.ndarray:
        pads = [[(0, 0), (0, n_most - a.shape[1]), *[(0, 0)] * (a.ndim - 2)] for a in arrays]
        return np.concatenate([np.pad(a, pad, constant_values=fill) for a, pad in zip(arrays, pads)])

    fills = {"token": -1, "logp": 0, "tier": -1}
    expansion = Expansion(*(joined([getattr(x.expansion, name) for x in levels], fill) for name, fill in fills.items()))
    names = ("node", "token", "level", "start", "slot", "rank")
    columns = [joined([getattr(x.starts, name) for x in levels], -2 if name == "node" else -1) for name in names]
    return PoolLevel(expansion, Starts(*columns, np.concatenate([x.starts.n for x in levels])))


def text_along(found: DraftPools, n_episodes: int, seed: int = 0, n_tasks: int = 2) -> Text:
    """A text whose next token is a candidate of the root more often than not; half the episodes end in a stop id."""
    rng, n_each = np.random.default_rng(seed), found.n_rows // n_episodes
    assert n_each * n_episodes == found.n_rows
    first = found.levels[0].expansion.token[:, 0, 0]  # [R, W]
    rank = np.minimum(rng.geometric(0.5, found.n_rows) - 1, first.shape[1] - 1)
    wanted = np.where(
        rng.random(found.n_rows) < 0.85, first[np.arange(len(rank)), rank], rng.integers(N_VOCAB, size=len(rank))
    )
    token = np.concatenate([np.zeros((n_episodes, 1), int), wanted.reshape(n_episodes, n_each)], axis=1)
    token[::2, -1] = STOP
    return Text(
        token=token.reshape(-1).astype(np.int32),
        offset=np.arange(n_episodes + 1, dtype=np.int64) * (n_each + 1),
        prompt=list(range(n_episodes)),
        prompt_id=[f"p{i}" for i in range(n_episodes)],
        task=[f"task{i % n_tasks}" for i in range(n_episodes)],
        turn=[0] * n_episodes,
        prompt_tokens=[np.array([i, 1, 2], np.int32) for i in range(n_episodes)],
        room=np.full(n_episodes, n_each + 1, np.int32),
        stop_ids=(STOP,),
    )
