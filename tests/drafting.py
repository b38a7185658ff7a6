"""Small networks, pairs and starts that the drafters' tests share."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from workbench.drafters.branching import BranchingDrafter, BranchState
from workbench.drafters.nets import NetConfig
from workbench.tree import Starts

SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "vocab_size": 40,
    "draft_vocab_size": 28,
    "rope_theta": 500.0,
}
DRAFT_IDS = np.sort(np.random.default_rng(5).choice(40, 28, replace=False)).astype(np.int64)
Net = TypeVar("Net", bound=nn.Module)


def random_net(net_class: type[Net], seed: int = 0, **changes: Any) -> Net:
    """A network in float64 whose every weight is random, norms' included; of a size that makes softmaxes uneven."""
    torch.manual_seed(seed)
    net = net_class(NetConfig(**{**SIZES, **changes})).double()
    for parameter in net.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4 + (1.0 if parameter.dim() == 1 else 0.0)
    return net


def random_embed(n_vocab: int = 40, size: int = 12) -> Tensor:
    return torch.randn(n_vocab, size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def random_pairs(n: int, seed: int = 1, n_vocab: int = 40, size: int = 12) -> tuple[Tensor, list[int]]:
    """Features [n, 3H] and tokens of n pairs, at most 64; fewer are a prefix of more."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(64, 3 * size, generator=generator, dtype=torch.float64)
    return features[:n], torch.randint(n_vocab, (64,), generator=generator).tolist()[:n]


def starts(*rows: tuple[int, int, int, int]) -> Starts:
    """Starts of one position from rows (token, creating level, start, slot)."""
    token, level, start, slot = (np.array(column)[None] for column in zip(*rows))
    one = np.ones_like(token)
    small = [a.astype(np.int16) for a in (level, start, slot, one)]
    return Starts(one.astype(np.int32), token.astype(np.int32), *small, np.array([len(rows)], np.int32))


ROOT = starts((-1, -1, -1, -1))


def observe(drafter: BranchingDrafter, state: BranchState, features: Tensor, tokens: list[int]) -> None:
    drafter.observe(state, features, torch.empty(len(tokens), 0), tokens)


def rows_of(state: BranchState, n_slots: int) -> list[Tensor]:
    """Keys and values of the committed pairs, every layer's."""
    n_rows = state.n_pairs * n_slots
    return [rows[:, :, :n_rows] for rows in (*state.cache.keys, *state.cache.values)]


def branch_of(levels: list[Starts], level: int, start: int) -> list[tuple[int, int]]:
    """(slot left, token) of every block from the last pair's own to this start's, read off who created the starts."""
    if level == 0:
        return []
    begun = levels[level]
    creator = int(begun.level[0, start]), int(begun.start[0, start])
    return [*branch_of(levels, *creator), (int(begun.slot[0, start]), int(begun.token[0, start]))]
