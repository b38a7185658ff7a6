"""Random drafters of every kind for a tiny target, and folders of them in the layouts the workbench writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.drafters import LookupDrafter
from workbench.drafters.base import Drafter
from workbench.drafters.checkpoint import MedusaConfig, build_net, save_checkpoint
from workbench.drafters.eagle3 import Eagle3Drafter
from workbench.drafters.medusa import MedusaDrafter
from workbench.drafters.nets import NetConfig
from workbench.drafters.parallelspec import ParallelSpecDrafter
from workbench.drafters.specblock import SpecBlockDrafter

KINDS = ("specblock", "eagle3", "medusa", "parallelspec")


def random_net(kind: str, hidden_size: int, vocab_size: int, n_draft: int, seed: int = 0) -> Any:
    """A random network in float64, its weights what half precision holds."""
    torch.manual_seed(seed)
    config: Any = NetConfig(
        hidden_size=hidden_size,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        vocab_size=vocab_size,
        draft_vocab_size=n_draft,
        n_layers=2 if kind == "specblock" else 1,
        n_slots=4,
    )
    if kind == "medusa":
        config = MedusaConfig(n_heads=4, n_blocks=1, hidden_size=hidden_size)
    net = build_net(kind, config).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.3).half())
    return net


def draft_ids_of(vocab_size: int) -> np.ndarray:
    """Three of four target tokens, sorted."""
    return np.array([token for token in range(vocab_size) if token % 4 != 2])


def random_drafter(kind: str, target: Any, seed: int = 0) -> Drafter:
    """A drafter with random weights on the target's embedding or head."""
    if kind == "lookup":
        return LookupDrafter()
    ids = torch.from_numpy(draft_ids_of(target.vocab_size))
    net = random_net(kind, target.hidden_size, target.vocab_size, len(ids), seed)
    if kind == "medusa":
        return MedusaDrafter(net, target.head_weight[ids], ids)
    make: Any = {"specblock": SpecBlockDrafter, "eagle3": Eagle3Drafter, "parallelspec": ParallelSpecDrafter}[kind]
    return make(net, target.embed_weight, ids)


def save_drafter(folder: Path, kind: str, hidden_size: int, vocab_size: int, seed: int = 0) -> None:
    """Write a random drafter's folder."""
    ids = draft_ids_of(vocab_size)
    net = random_net(kind, hidden_size, vocab_size, len(ids), seed)
    extra = {"target_vocab_size": vocab_size} if kind == "medusa" else {}
    save_checkpoint(folder, kind, net, ids, extra)
