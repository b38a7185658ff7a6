"""Which parameters which optimiser moves, and how fast over a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from workbench.training.muon import Muon

if TYPE_CHECKING:
    from workbench.training.loop import TrainConfig


def make_optimisers(net: nn.Module, config: TrainConfig) -> tuple[list[torch.optim.Optimizer], list[nn.Parameter]]:
    """Muon for matrices, AdamW for the rest; also the parameters under gradient clipping (the rank head is not)."""
    matrices, head, other, clipped = [], [], [], []
    for name, p in net.named_parameters():
        is_rank = name.startswith("rank_head")
        if not is_rank:
            clipped.append(p)
        if name.startswith("lm_head"):
            head.append(p)
        elif p.ndim == 2 and not is_rank and not name.startswith(("mask_", "input_layer.position_queries")):
            matrices.append(p)
        else:
            other.append(p)
    groups = [
        {"params": head, "lr": config.head_lr, "weight_decay": 0.0},
        {"params": other, "lr": config.other_lr, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95))
    return [Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay), adam], clipped


def schedule(progress: float, warmup: float) -> float:
    """Learning-rate factor at a share of the run: linear warm-up, flat, linear decay over the last 60 %."""
    if progress < warmup:
        return progress / warmup
    return min(1.0, max(0.02, (1.0 - progress) / 0.6))
