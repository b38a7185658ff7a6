"""Losses: the soft cross-entropy over the draft vocabulary and the rank head's loss (arXiv:2605.07243)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.drafters.nets import N_RANK_TIERS, rank_features
from workbench.metrics import TIER_BOUNDS

ROW_CHUNK = 512


@dataclass
class HeadReading:
    """What a pass of the vocabulary head says of its rows besides the loss (all detached)."""

    is_best: Tensor  # bool [R] the draft's best token is the target's best token
    rank: Tensor  # int64 [R] rank of the target's best token in the draft's order, 1 = top
    features: Tensor | None  # [R, 15] rank-head features


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of w_r * (lse_r - sum_j p_rj logit_rj); the gradient is formed in the forward, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        soft_id: Tensor,
        soft_p: Tensor,
        weight: Tensor,
        reading: list[HeadReading],
        has_features: bool,
    ) -> Tensor:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if needs_head else None
        loss = hidden.new_zeros(())
        is_best, rank, features = [], [], []
        for rows in torch.arange(len(hidden)).split(ROW_CHUNK):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = hidden[part] @ head.T  # [r, V_d]
            ids, p, w = soft_id[part], soft_p[part], weight[part]
            lse = logits.logsumexp(-1)
            loss += (w * (p.sum(-1) * lse - (p * logits.gather(-1, ids)).sum(-1))).sum()
            best = logits.gather(-1, ids[:, :1])
            above = (logits > best).sum(-1)
            is_best.append(above == 0)
            rank.append(above + 1)
            if has_features:
                features.append(rank_features(logits))
            if not needs_hidden:
                continue
            grad = logits.sub_(lse[:, None]).exp_().mul_((w * p.sum(-1))[:, None])
            grad.scatter_add_(-1, ids, -p * w[:, None])
            torch.mm(grad, head, out=grad_hidden[part])
            if grad_head is not None:
                grad_head.addmm_(grad.T, hidden[part])
        ctx.save_for_backward(grad_hidden, *([] if grad_head is None else [grad_head]))
        reading.append(HeadReading(torch.cat(is_best), torch.cat(rank), torch.cat(features) if has_features else None))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_head = saved[1] * grads[0] if len(saved) > 1 else None
        return saved[0] * grads[0], grad_head, None, None, None, None, None


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, soft_id: Tensor, soft_p: Tensor, weight: Tensor, has_features: bool = False
) -> tuple[Tensor, HeadReading]:
    """Weighted sum over rows of the soft cross-entropy, and a reading of the rows.

    hidden [R, H] (normed), head [V_d, H], soft_id/soft_p [R, J] with soft_id[:, 0] the target's best token,
    weight [R].
    """
    if len(hidden) == 0:
        empty = torch.zeros(0, dtype=torch.int64, device=hidden.device)
        features = hidden.new_zeros(0, 15) if has_features else None
        return hidden.sum(), HeadReading(empty.bool(), empty, features)
    reading: list[HeadReading] = []
    loss = _SoftCrossEntropy.apply(hidden, head, soft_id, soft_p, weight, reading, has_features)
    return loss, reading[0]


def tier_of_rank(rank: Tensor) -> Tensor:
    """Rank (1 = top) to rank tier: 0 = rank 1, 1 = 2-4, 2 = 5-10, 3 = beyond 10."""
    return torch.bucketize(rank, torch.tensor(TIER_BOUNDS, device=rank.device))


def rank_loss(logits: Tensor, tier: Tensor, budget_per_tier: float, slot: Tensor | None = None) -> Tensor:
    """The rank head's loss over rows of all slots together: logits [R, 4], true tier [R].

    Soft label q(c|t) ~ 1 / (1 + |c-t| + max(t-c, 0))^2; rows weigh 1 + |t-p| + max(t-p, 0) with p the predicted tier,
    so under-estimating a rank counts double; times min(1, budget / count of the tier) where the budget is positive,
    counted in each `slot` [R] by itself where slots are given.
    """
    if len(logits) == 0:
        return logits.sum()
    c = torch.arange(N_RANK_TIERS, device=logits.device)
    t = c[:, None]
    soft = 1.0 / (1.0 + (c - t).abs() + (t - c).clamp(min=0)).to(logits) ** 2
    soft = (soft / soft.sum(-1, keepdim=True))[tier]
    guess = logits.detach().argmax(-1)
    distance = 1.0 + (tier - guess).abs() + (tier - guess).clamp(min=0)
    weight = logits.new_ones(len(logits))
    if budget_per_tier > 0:
        cell = tier if slot is None else N_RANK_TIERS * slot + tier
        weight = (budget_per_tier / torch.bincount(cell)[cell]).clamp(max=1.0).to(logits)
    return (weight * distance * -(soft * logits.log_softmax(-1)).sum(-1)).sum() / weight.sum()
