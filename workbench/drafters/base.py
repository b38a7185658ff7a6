"""What every drafter is to the rest of the house: arrays out, prefix-pure state, torch inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

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


def best_candidates(logits: Tensor, width: int, target_ids: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """The `width` best tokens of logits [..., V_d] -> (token int32 [..., W], logp int16 [..., W]).

    Log-probabilities are normalised over the full draft vocabulary, rounded to steps of 1/1024 nat, and sorted by
    (rounded log-probability descending, target token id ascending), so that the order does not hang on float noise.
    `target_ids` [V_d] maps draft ids to target ids (None: they are the same). Missing candidates are token -1.
    """
    n_top = min(max(N_TOP, width + 4), logits.shape[-1])
    top, draft_id = logits.topk(n_top, dim=-1)
    logp = (top.double() - torch.logsumexp(logits.double(), dim=-1, keepdim=True)) * LOGP_STEPS_PER_NAT
    steps = logp.round().clamp(LOGP_MIN, 0).to(torch.int64)
    token = draft_id if target_ids is None else target_ids[draft_id]
    order = (-steps * (1 << 32) + token).argsort(dim=-1)[..., :width]
    token, steps = token.gather(-1, order), steps.gather(-1, order)
    out_token = np.full((*token.shape[:-1], width), -1, dtype=np.int32)
    out_logp = np.full(out_token.shape, LOGP_MIN, dtype=np.int16)
    out_token[..., : token.shape[-1]] = token.cpu().numpy()
    out_logp[..., : token.shape[-1]] = steps.cpu().numpy()
    return out_token, out_logp
