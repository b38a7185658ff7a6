"""One training loop for the four drafters: optimisers, schedule, held-out readings, durable state."""

from __future__ import annotations

import json
import math
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
from workbench.training.objectives import (
    Objective,
    ObjectiveConfig,
    Readings,
    eagle3_objective,
    medusa_objective,
    parallelspec_objective,
    specblock_objective,
)
from workbench.training.optimisers import make_optimisers, schedule
from workbench.training.rankfit import fit_to_batches
from workbench.training.statefile import append_metrics, read_metrics, read_state, trim_metrics, write_state

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


class Trainer:
    """Holds what a run needs and steps through it; the state in its folder makes it resumable after SIGKILL."""

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
        """Begin, or take up the run in `out`. Raises InputError where that is another run, or the store unfit."""
        self.config, self.store, self.out, self.device = config, store, out, torch.device(device)
        saved = self._saved()
        if saved is not None and saved.get("n_shards", len(store.shards)) != len(store.shards):
            self.store = FeatureStore(store.root, saved["n_shards"])  # it has grown since: the epoch keeps its answers
        self.embed = embed.to(self.device)
        self.train, self.held_out = self.store.split(config.held_out_share)
        self.draft_ids = self._vocabulary(draft_ids, saved)
        self.to_draft = np.full(config.net.vocab_size, -1, np.int64)
        self.to_draft[self.draft_ids] = np.arange(len(self.draft_ids))
        self.scale = torch.from_numpy(self.store.feature_scale(self.train).astype(np.float32))
        head_rows = head.cpu()[torch.from_numpy(self.draft_ids)].to(self.device)
        self.net = make_net(config).to(self.device)
        warm_start(self.net, head_rows, final_norm)
        self.objective = make_objective(self.net, self.embed, head_rows, config.objective)
        self.optimisers, self.clipped = make_optimisers(self.net, config)
        self.base_lr = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.generator = torch.Generator().manual_seed(config.seed)
        self.n_seen, self.epoch, self.index, self.n_steps, self.seconds = 0, 0, 0, 0, 0.0
        self.window = Readings()  # since the last line of metrics
        self.is_finished = False
        if saved is not None:
            self.restore(saved)

    def _saved(self) -> dict[str, Any] | None:
        """The state in the folder, if any. Raises InputError for that of another run."""
        state = read_state(self.out)
        if state is None:
            return None
        if state["config"] != json.dumps(self.config.to_dict(), sort_keys=True):
            raise InputError(f"{self.out} holds a run with other settings; choose another folder or the same settings.")
        if state.get("features", self.store.note) != self.store.note:
            raise InputError(f"{self.out} holds a run on other features than {self.store.root}.")
        return state

    def _vocabulary(self, given: np.ndarray | None, saved: dict[str, Any] | None) -> np.ndarray:
        """Sorted target ids of the draft vocabulary: the saved run's, the given one or, afresh, the most frequent."""
        if saved is not None and "draft_ids" in saved:
            known: np.ndarray = saved["draft_ids"].numpy()
            if given is not None and not np.array_equal(known, given):
                raise InputError(f"{self.out} holds a run with another draft vocabulary.")
            return known
        if given is not None:
            return given
        net = self.config.net
        return self.store.draft_vocabulary(self.train, net.draft_vocab_size, net.vocab_size)

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a saved state; tensors move to the run's device."""
        self.net.load_state_dict(state["net"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.scale = state["scale"]
        self.n_seen, self.epoch, self.index = state["n_seen"], state["epoch"], state["index"]
        self.n_steps, self.seconds = state["n_steps"], state["seconds"]
        self.window = Readings(**state.get("window", {}))
        self.is_finished = state.get("is_finished", False)

    def save(self) -> None:
        """Write the whole state. Raises InputError where the disk does not take it."""
        window = {"hit": self.window.hit, "rows": self.window.rows, "confusion": self.window.confusion}
        state = {
            "config": json.dumps(self.config.to_dict(), sort_keys=True),
            "net": self.net.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "generator": self.generator.get_state(),
            "scale": self.scale,
            "draft_ids": torch.from_numpy(np.asarray(self.draft_ids, np.int64)),
            "features": self.store.note,
            "n_shards": len(self.store.shards),
            "window": window,
            "is_finished": self.is_finished,
            "n_seen": self.n_seen,
            "epoch": self.epoch,
            "index": self.index,
            "n_steps": self.n_steps,
            "seconds": self.seconds,
        }
        write_state(self.out, state)

    def run(self, save_every_s: float = 180.0, log_every: int = 20, evaluate_every_s: float = 600.0) -> None:
        """Train to `n_positions`, appending to metrics.jsonl; ends with a held-out reading.

        Lines of metrics past the restored state are dropped, since their steps run again; a finished run does nothing.
        """
        trim_metrics(self.out, self.n_steps)
        bar = tqdm(total=self.config.n_positions, initial=self.n_seen, unit="pos", desc=self.config.kind)
        saved = evaluated = time.monotonic()
        while self.n_seen < self.config.n_positions:
            plan = batches(self.train, self.config.batch_tokens, self.config.seed, self.epoch)
            while self.index < len(plan) and self.n_seen < self.config.n_positions:
                began = time.monotonic()
                loss, readings, n = self.step(plan[self.index])
                self.index += 1
                self.seconds += time.monotonic() - began
                self.window.merge(readings)
                bar.update(n)
                if self.n_steps % log_every == 0:
                    self.log("train", self.window, loss)
                    self.window = Readings()
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
        bar.close()
        if not self.is_finished:
            self.save()
            self.finish()
            self.is_finished = True
            self.save()
        if not any(row.get("is_last") for row in read_metrics(self.out)[-1:]):
            self.log("held_out", self.evaluate(), None, is_last=True)

    def finish(self) -> None:
        """With the drafter still, fit SpecBlock's rank head to the slots of `n_rank_fit` training positions."""
        net, config = self.net, self.config
        if not (isinstance(net, SpecBlockNet) and net.config.has_rank_head and config.n_rank_fit):
            return
        net.eval()
        n_all = min(config.n_rank_fit, sum(a.length - a.prompt_length for a in self.train))
        groups = batches(self.train, config.batch_tokens, config.seed, self.epoch + 1)
        loaded = (self.load(group) for group in groups)
        fit_to_batches(net, self.objective, loaded, n_all, config.objective.rank_budget_per_tier, config.seed)

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
        if not math.isfinite(float(loss.detach())):
            raise InputError(f"The loss of step {self.n_steps} is not finite; try lower learning rates.")
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

    def log(self, split: str, readings: Readings, loss: float | None, is_last: bool = False) -> None:
        row = {
            "split": split,
            "is_last": is_last,
            "n_positions": self.n_seen,
            "n_steps": self.n_steps,
            "seconds": round(self.seconds, 1),
            "loss": loss,
            "accuracy": {k: round(readings.hit[k] / max(1.0, readings.rows[k]), 4) for k in sorted(readings.rows)},
            "rows": {k: int(readings.rows[k]) for k in sorted(readings.rows)},
        }
        if self.config.kind == "specblock":
            row["rank_confusion"] = readings.confusion.int().tolist()
        append_metrics(self.out, row)

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
