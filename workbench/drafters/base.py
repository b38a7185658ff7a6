"""What every drafter is to the rest of the house: arrays out, prefix-pure state, torch inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from workbench.tree import LOGP_STEPS_PER_NAT, Expansion, Starts

LOGP_MIN = -32767  # int16 steps of 1/1024 nat
N_TOP = 20  # candidates looked at per slot; also what the rank features are normalised over


@dataclass(frozen=True)
class Forward:
    """One forward of the drafter: its kind, the rows it ran (query rows of the network) and the starts it grew."""

    kind: str
    n_rows: int
    n_starts: int


@dataclass
class DraftState:
    """A request's drafting state. `forwards` lists what ran since `decode` last cleared it."""

    forwards: list[Forward] = field(default_factory=list)


class Drafter(Protocol):
    """The cheap proposer. Its candidates depend on the prompt, the committed tokens and the path alone."""

    name: str
    kind: str  # "specblock", "eagle3", "medusa", "parallelspec", "lookup"
    n_slots: int
    n_levels: int
    has_tiers: bool
    max_width: int
    weights_hash: str

    def open(self, prompt_ids: list[int], capacity: int) -> DraftState:
        """Start a request with an empty cache that holds `capacity` committed positions."""
        ...

    def observe(self, state: DraftState, features: Tensor, final: Tensor, tokens: list[int]) -> None:
        """Queue n newly committed pairs (h_i, t_{i+1}): features [n, 3H], final hidden [n, H]. Runs no forward."""
        ...

    def expand(self, state: DraftState, level: int, starts: Starts, width: int) -> Expansion:
        """Candidates of one level for one position (T = 1); level 0 first runs the queued pairs."""
        ...


class TopLogits(NamedTuple):
    """The best logits of each row, best first [..., n], and their draft ids."""

    logits: Tensor
    draft_id: Tensor


def top_logits(logits: Tensor, width: int) -> TopLogits:
    """Enough of the best of logits [..., V_d] for `width` candidates and the rank features, some spare for ties."""
    return TopLogits(*logits.topk(min(max(N_TOP, width + 4), logits.shape[-1]), dim=-1))


def best_candidates(logits: Tensor, width: int, target_ids: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """The `width` best tokens of logits [..., V_d] -> (token int32 [..., W], logp int16 [..., W]).

    Log-probabilities are normalised over the full draft vocabulary, rounded to steps of 1/1024 nat, and sorted by
    (rounded log-probability descending, target token id ascending), so that the order does not hang on float noise.
    `target_ids` [V_d] maps draft ids to target ids (None: they are the same). Missing candidates are token -1.
    """
    token, steps = _sorted_candidates(logits, top_logits(logits, width), width, target_ids)
    return _arrays(torch.stack([token, steps]).cpu().numpy(), width)


def offer(logits: Tensor, top: TopLogits, width: int, target_ids: Tensor | None, tier: Tensor | None) -> Expansion:
    """The expansion of logits [S, K, V_d] whose best are `top`, with predicted tiers [S, K] if any (T = 1).

    Everything crosses from the device in one copy.
    """
    token, steps = _sorted_candidates(logits, top, width, target_ids)
    if tier is None:
        tier = token.new_full(token.shape[:-1], -1)
    packed = torch.cat([token, steps, tier[..., None]], dim=-1)[None].cpu().numpy()
    n_found = token.shape[-1]
    pair = np.stack([packed[..., :n_found], packed[..., n_found : 2 * n_found]])
    return Expansion(*_arrays(pair, width), tier=packed[..., -1].astype(np.int8))


def _sorted_candidates(logits: Tensor, top: TopLogits, width: int, target_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """(target ids, log-probability steps), int64 [..., at most W]; half precision is normalised in float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logp = torch.log_softmax(wide, dim=-1).gather(-1, top.draft_id)
    steps = (logp.double() * LOGP_STEPS_PER_NAT).round().clamp(LOGP_MIN, 0).to(torch.int64)
    token = top.draft_id if target_ids is None else target_ids[top.draft_id]
    order = (-steps * (1 << 32) + token).argsort(dim=-1)[..., :width]
    return token.gather(-1, order), steps.gather(-1, order)


def _arrays(found: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(token, logp) of int64 [2, ..., n], padded to `width` where the vocabulary is smaller."""
    token = np.full((*found.shape[1:-1], width), -1, dtype=np.int32)
    logp = np.full(token.shape, LOGP_MIN, dtype=np.int16)
    token[..., : found.shape[-1]], logp[..., : found.shape[-1]] = found[0], found[1]
    return token, logp
