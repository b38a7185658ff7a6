"""One training loop for the four drafters: optimisers, schedule, held-out readings, durable state."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from workbench.drafters.nets import Eagle3Net, MedusaNet, NetConfig, ParallelSpecNet, SpecBlockNet
from workbench.errors import InputError
from workbench.training.data import Batch, FeatureStore, batches
from workbench.training.muon import Muon
from workbench.training.objectives import (
    Objective,
    ObjectiveConfig,
    Readings,
    eagle3_objective,
    medusa_objective,
    parallelspec_objective,
    specblock_objective,
)
from workbench.training.rankfit import RankFitConfig, collect_rows, fit_rank_head

KINDS = ("specblock", "eagle3", "medusa", "parallelspec")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run (times and paths apart)."""

    kind: str
    net: NetConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    n_positions: int = 1_000_000  # label positions seen over the whole run
    batch_tokens: int = 2560  # padded tokens a step
    matrix_lr: float = 2e-3  # Muon
    head_lr: float = 5e-4  # AdamW: vocabulary head
    other_lr: float = 1e-3  # AdamW: norms, queries, rank head, biases
    weight_decay: float = 0.05
    warmup_share: float = 0.03
    clip_norm: float = 1.0
    held_out_share: float = 0.04
    n_rank_fit: int = 60_000  # SpecBlock: positions whose slots the rank head is fitted to at the end; 0 = not
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_net(config: TrainConfig) -> nn.Module:
    """A fresh network of the configured kind."""
    torch.manual_seed(config.seed)
    c = config.net
    if config.kind == "specblock":
        return SpecBlockNet(c)
    if config.kind == "eagle3":
        return Eagle3Net(c)
    if config.kind == "parallelspec":
        return ParallelSpecNet(c)
    if config.kind == "medusa":
        return MedusaNet(c.n_slots, 1, c.hidden_size, None)
    raise InputError(f"unknown drafter kind {config.kind!r}; known: {', '.join(KINDS)}")


def warm_start(net: nn.Module, head_rows: Tensor, final_norm: Tensor) -> None:
    """Begin at the target's own head: its rows at the draft vocabulary and its final norm's weight."""
    if isinstance(net, MedusaNet):
        return
    with torch.no_grad():
        net.lm_head.weight.copy_(head_rows)  # type: ignore[union-attr,operator]
        net.norm.weight.copy_(final_norm)  # type: ignore[union-attr,operator]


def make_objective(net: nn.Module, embed: Tensor, head_rows: Tensor, config: ObjectiveConfig) -> Objective:
    if isinstance(net, SpecBlockNet):
        return specblock_objective(net, embed, config)
    if isinstance(net, Eagle3Net):
        return eagle3_objective(net, embed, config)
    if isinstance(net, ParallelSpecNet):
        return parallelspec_objective(net, embed, config)
    assert isinstance(net, MedusaNet)
    return medusa_objective(net, head_rows, config)


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


class Trainer:
    """Holds what a run needs and steps through it; `state_path` makes it resumable after SIGKILL."""

    def __init__(
        self,
        config: TrainConfig,
        store: FeatureStore,
        embed: Tensor,
        head: Tensor,
        final_norm: Tensor,
        out: Path,
        draft_ids: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.store, self.out, self.device = config, store, out, torch.device(device)
        self.embed = embed.to(self.device)
        self.train, self.held_out = store.split(config.held_out_share)
        if draft_ids is None:
            draft_ids = store.draft_vocabulary(self.train, config.net.draft_vocab_size, config.net.vocab_size)
        self.draft_ids = draft_ids
        self.to_draft = np.full(config.net.vocab_size, -1, np.int64)
        self.to_draft[self.draft_ids] = np.arange(len(self.draft_ids))
        self.scale = torch.from_numpy(store.feature_scale(self.train).astype(np.float32))
        head_rows = head.cpu()[torch.from_numpy(self.draft_ids)].to(self.device)
        self.net = make_net(config).to(self.device)
        warm_start(self.net, head_rows, final_norm)
        self.objective = make_objective(self.net, self.embed, head_rows, config.objective)
        self.optimisers, self.clipped = make_optimisers(self.net, config)
        self.base_lr = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.generator = torch.Generator().manual_seed(config.seed)
        self.n_seen, self.epoch, self.index, self.n_steps, self.seconds = 0, 0, 0, 0, 0.0
        self.state_path = out / "training_state.pt"
        if self.state_path.exists():
            self.restore()

    def restore(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        if state["config"] != json.dumps(self.config.to_dict(), sort_keys=True):
            raise InputError(f"{self.out} holds a run with other settings; choose another folder or the same settings")
        self.net.load_state_dict(state["net"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.scale = state["scale"]
        self.n_seen, self.epoch, self.index = state["n_seen"], state["epoch"], state["index"]
        self.n_steps, self.seconds = state["n_steps"], state["seconds"]

    def save(self) -> None:
        """Write the whole state beside the old one, then swap: a kill at any moment leaves one that loads."""
        state = {
            "config": json.dumps(self.config.to_dict(), sort_keys=True),
            "net": self.net.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "generator": self.generator.get_state(),
            "scale": self.scale,
            "n_seen": self.n_seen,
            "epoch": self.epoch,
            "index": self.index,
            "n_steps": self.n_steps,
            "seconds": self.seconds,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        temporary = self.state_path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.state_path)

    def run(self, save_every_s: float = 180.0, log_every: int = 20, evaluate_every_s: float = 600.0) -> None:
        """Train to `n_positions`, appending to metrics.jsonl; ends with a held-out reading."""
        bar = tqdm(total=self.config.n_positions, initial=self.n_seen, unit="pos", desc=self.config.kind)
        saved = evaluated = time.monotonic()
        window = Readings()
        while self.n_seen < self.config.n_positions:
            plan = batches(self.train, self.config.batch_tokens, self.config.seed, self.epoch)
            while self.index < len(plan) and self.n_seen < self.config.n_positions:
                began = time.monotonic()
                loss, readings, n = self.step(plan[self.index])
                self.index += 1
                self.seconds += time.monotonic() - began
                window.merge(readings)
                bar.update(n)
                if self.n_steps % log_every == 0:
                    self.log("train", window, loss)
                    window = Readings()
                if time.monotonic() - evaluated > evaluate_every_s:
                    self.log("held_out", self.evaluate(), None)
                    evaluated = time.monotonic()
                if time.monotonic() - saved > save_every_s:
                    self.save()
                    saved = time.monotonic()
            if self.index >= len(plan):
                self.epoch, self.index = self.epoch + 1, 0
                self.store = FeatureStore(self.store.root)  # a store still being written: take what has come
                self.train, self.held_out = self.store.split(self.config.held_out_share)
        self.finish()
        self.save()
        self.log("held_out", self.evaluate(), None)
        bar.close()

    def finish(self) -> None:
        """With the drafter still, fit SpecBlock's rank head to the slots of `n_rank_fit` training positions."""
        net, config = self.net, self.config
        if not (isinstance(net, SpecBlockNet) and net.config.has_rank_head and config.n_rank_fit):
            return
        net.eval()
        parts, n_seen, generator = [], 0, torch.Generator().manual_seed(config.seed)
        for group in batches(self.train, config.batch_tokens, config.seed, self.epoch + 1):
            if n_seen >= config.n_rank_fit:
                break
            batch = self.load(group)
            parts.append(collect_rows(self.objective, batch, generator))
            n_seen += batch.n_positions
        fit_rank_head(net, parts, RankFitConfig(), config.objective.rank_budget_per_tier, config.seed)

    def load(self, answers: list[Any]) -> Batch:
        return self.store.batch(answers, self.scale, self.to_draft).to(self.device)

    def step(self, answers: list[Any]) -> tuple[float, Readings, int]:
        batch = self.load(answers)
        factor = schedule(self.n_seen / self.config.n_positions, self.config.warmup_share)
        for optimiser, lrs in zip(self.optimisers, self.base_lr, strict=True):
            for group, lr in zip(optimiser.param_groups, lrs, strict=True):
                group["lr"] = lr * factor
        self.net.train()
        loss, readings = self.objective(batch, self.generator)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.clipped, self.config.clip_norm)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.n_seen += batch.n_positions
        self.n_steps += 1
        return float(loss.detach()), readings, batch.n_positions

    @torch.no_grad()
    def evaluate(self, n_answers: int = 40) -> Readings:
        """Held-out hits and confusion, from a generator of their own so that training draws do not shift."""
        self.net.eval()
        total, generator = Readings(), torch.Generator().manual_seed(1)
        for group in batches(self.held_out[:n_answers], self.config.batch_tokens, 0, 0):
            total.merge(self.objective(self.load(group), generator)[1])
        return total

    def log(self, split: str, readings: Readings, loss: float | None) -> None:
        row = {
            "split": split,
            "n_positions": self.n_seen,
            "n_steps": self.n_steps,
            "seconds": round(self.seconds, 1),
            "loss": loss,
            "accuracy": {k: round(readings.hit[k] / max(1.0, readings.rows[k]), 4) for k in sorted(readings.rows)},
            "rows": {k: int(readings.rows[k]) for k in sorted(readings.rows)},
        }
        if self.config.kind == "specblock":
            row["rank_confusion"] = readings.confusion.int().tolist()
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def exported(self) -> nn.Module:
        """A copy of the network that takes raw features: the feature scale folded into the first linear layer."""
        net = make_net(self.config)
        net.load_state_dict({k: v.cpu() for k, v in self.net.state_dict().items()})
        with torch.no_grad():
            if isinstance(net, SpecBlockNet):
                net.input_layer.condition_proj.weight.div_(self.scale)
            elif isinstance(net, Eagle3Net | ParallelSpecNet):
                net.fc.weight.div_(self.scale)
        return net
