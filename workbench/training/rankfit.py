"""Fit SpecBlock's rank head once the drafter stands still.

While the drafter learns, the ranks it gives move under its rank head. At the end the head's inputs over many answers
are collected once, with the drafter frozen, and the small head is trained on them to convergence, with the same loss.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from workbench.drafters.nets import SpecBlockNet
from workbench.training.data import Batch
from workbench.training.losses import rank_loss
from workbench.training.objectives import Objective, Readings


@dataclass(frozen=True)
class RankFitConfig:
    """How the head is fitted to the collected rows."""

    n_epochs: int = 12
    batch_rows: int = 1024
    lr: float = 2e-3
    weight_decay: float = 0.01
    held_out_share: float = 0.1  # of the collected answers; the epoch with the least loss there is kept


@torch.no_grad()
def collect_rows(objective: Objective, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The rank head's inputs [R, H + 15] and true tiers [R] of every slot a draft reaches in a batch."""
    readings = Readings(rank_rows=[])
    objective(batch, generator, readings)
    if not readings.rank_rows:  # answers of one token: no slot has a label
        return batch.final.new_zeros(0, 0), batch.tok.new_zeros(0)
    return torch.cat([rows for rows, _ in readings.rank_rows]), torch.cat([tier for _, tier in readings.rank_rows])


def fit_to_batches(
    net: SpecBlockNet,
    objective: Objective,
    loaded: Iterable[Batch],
    n_positions: int,
    budget_per_tier: float,
    seed: int,
) -> None:
    """Fit the head to the slots of the first batches that hold `n_positions` positions."""
    parts, generator, n_seen = [], torch.Generator().manual_seed(seed), 0
    with tqdm(total=n_positions, unit="pos", desc="rank head") as bar:
        for batch in loaded:
            parts.append(collect_rows(objective, batch, generator))
            n_seen += batch.n_positions
            bar.update(batch.n_positions)
            if n_seen >= n_positions:
                break
    if parts := [part for part in parts if len(part[0])]:
        fit_rank_head(net, parts, RankFitConfig(), budget_per_tier, seed)


def fit_rank_head(
    net: SpecBlockNet, parts: list[tuple[Tensor, Tensor]], config: RankFitConfig, budget_per_tier: float, seed: int
) -> float:
    """Train `net.rank_head` on collected parts (one a batch of answers); returns the least held-out loss."""
    n_held = max(1, int(config.held_out_share * len(parts)))
    held, kept = _joined(parts[:n_held]), _joined(parts[n_held:] or parts[:n_held])
    head = net.rank_head
    optimiser = torch.optim.AdamW(head.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    n_steps = config.n_epochs * -(-len(kept[0]) // config.batch_rows)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, n_steps)
    best, best_state = float("inf"), copy.deepcopy(head.state_dict())
    for _ in range(config.n_epochs):
        for rows in torch.randperm(len(kept[0]), generator=generator).split(config.batch_rows):
            rows = rows.to(kept[0].device)
            loss = rank_loss(head(kept[0][rows]), kept[1][rows], budget_per_tier)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
        value = _held_out_loss(head, held, budget_per_tier)
        if value < best:
            best, best_state = value, copy.deepcopy(head.state_dict())
    head.load_state_dict(best_state)
    return best


@torch.no_grad()
def _held_out_loss(head: nn.Module, held: tuple[Tensor, Tensor], budget_per_tier: float) -> float:
    return float(rank_loss(head(held[0]), held[1], budget_per_tier))


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([rows for rows, _ in parts]), torch.cat([tier for _, tier in parts])
