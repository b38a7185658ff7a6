"""Why a live step and its replay differ: candidates, rank tiers or the target's choices that tie up to float noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from workbench.pools import LABEL
from workbench.tree import LOGP_STEPS_PER_NAT, Expansion

NEAR_TIE = 1e-3  # of the target's scores, nats of a draft's log-probabilities, or the rank head's scores
MISS, TARGET, DRAFT, TIER, OTHER = "miss", "target near-tie", "draft near-tie", "tier near-tie", "other"


def draft_difference(
    live: Sequence[Expansion], recorded: Sequence[Expansion], tier_gaps: Sequence[np.ndarray]
) -> tuple[str, float | None]:
    """The first level at which the candidates or tiers differ, and the widest gap there; OTHER where none does.

    Expansions of one position. tier_gaps [S, K] a level: what separates the rank head's two best scores.
    """
    for level, (a, b) in enumerate(zip(live, recorded)):
        if a.token.shape[1] != b.token.shape[1]:
            break
        mine, theirs = _alike(a, b)
        worst = max((_slot_gap(*pair) for pair in _slots(mine, theirs)), default=0.0)
        if worst:
            return (DRAFT if worst < NEAR_TIE else OTHER), worst
        flipped = mine.tier != theirs.tier
        if flipped.any():
            worst = float(tier_gaps[level][:, : flipped.shape[1]][flipped].max())
            return (TIER if worst < NEAR_TIE else OTHER), worst
    return OTHER, None


def _alike(a: Expansion, b: Expansion) -> tuple[Expansion, Expansion]:
    """Both without their position axis, cut to the slots and candidates that both have."""
    k, w = min(a.token.shape[2], b.token.shape[2]), min(a.token.shape[3], b.token.shape[3])
    mine, theirs = (Expansion(x.token[0, :, :k, :w], x.logp[0, :, :k, :w], x.tier[0, :, :k]) for x in (a, b))
    return mine, theirs


def _slots(a: Expansion, b: Expansion) -> Iterator[tuple[np.ndarray, ...]]:
    """Tokens and log-probabilities of both sides, slot by slot."""
    shape = (-1, a.token.shape[-1])
    yield from zip(*(x.reshape(shape) for x in (a.token, a.logp, b.token, b.logp)))


def _slot_gap(token: np.ndarray, logp: np.ndarray, other: np.ndarray, other_logp: np.ndarray) -> float:
    """How far two candidate lists of a slot lie apart, in nats; 0 where they agree as far as ids are known.

    A token that stands elsewhere lies apart by the difference of its log-probabilities; one that is not in the live
    list at all, by at least what separates it from the last candidate. Half a step is what rounding hides.
    """
    both = (token >= 0) & (other >= 0)
    if not np.array_equal(token >= 0, other >= 0):
        return float("inf")
    steps = np.abs(logp.astype(int) - other_logp.astype(int))[both]
    worst = int(steps.max(initial=0))
    place = {int(t): i for i, t in enumerate(token)}
    is_moved = False
    for i in np.flatnonzero(both & (other < LABEL)).tolist():
        j = place.get(int(other[i]), len(token) - 1)
        if j != i or token[i] != other[i]:
            is_moved = True
            worst = max(worst, abs(int(logp[j]) - int(other_logp[i])))
    return max(worst - 0.5, 0.5) / LOGP_STEPS_PER_NAT if worst or is_moved else 0.0


class TierSpy:
    """Sees the rank head's scores while a drafter drafts: the gap of the two best tiers, [S, K] a level."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.gaps = drafter, list[np.ndarray]()

    def __enter__(self) -> list[np.ndarray]:
        self.gaps = []
        if self.drafter.has_tiers:
            read = self.drafter.tier_scores

            def tier_scores(*args: Any) -> torch.Tensor:
                scores = read(*args)
                best = scores.float().topk(2, dim=-1).values
                self.gaps.append((best[..., 0] - best[..., 1]).cpu().numpy())
                return scores

            self.drafter.tier_scores = tier_scores
        return self.gaps

    def __exit__(self, *_: object) -> None:
        self.drafter.__dict__.pop("tier_scores", None)
