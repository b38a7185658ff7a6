"""A whole training, start to shipped folder: features where they are missing, the loop, the checkpoint and its card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.drafters.checkpoint import save_checkpoint
from workbench.drafters.nets import NetConfig
from workbench.errors import InputError
from workbench.provenance import machine
from workbench.target import Target, load_target
from workbench.training.data import FeatureStore
from workbench.training.features import read_corpus, write_features
from workbench.training.loop import KINDS, TrainConfig, Trainer
from workbench.training.objectives import ObjectiveConfig


@dataclass(frozen=True)
class TrainArgs:
    """Train a drafter for a target on text the target has written. Run again to resume."""

    kind: str
    """specblock, eagle3, medusa or parallelspec."""
    out: str
    """Folder for the state, metrics.jsonl and, at the end, the checkpoint in OUT/checkpoint."""
    features: str
    """Feature store; written first from --corpus where it is not complete."""
    corpus: str | None = None
    """Corpus folder (see `python -m workbench.corpus`)."""
    target: str = "smollm2"
    """Hub name, local directory, GGUF file, or smollm2."""
    device: str = "cpu"
    """Device of the target while features are written, and of the training."""
    threads: int = 0
    """Torch threads; 0 leaves torch's choice."""
    n_positions: int = 1_000_000
    """Answer positions to train on, over all passes."""
    draft_vocab_size: int = 12288
    """Most frequent answer tokens the drafter can propose."""
    n_slots: int = 4
    """Slots per block (SpecBlock, ParallelSpec) or heads (Medusa)."""
    batch_tokens: int = 2560
    """Padded tokens per step."""
    matrix_lr: float = 2e-3
    """Learning rate of matrices (Muon)."""
    head_lr: float = 5e-4
    """Learning rate of the vocabulary head (AdamW)."""
    n_steps: int = 5
    """EAGLE-3: unrolled training-time-test steps."""
    n_blocks: int = 3
    """SpecBlock: blocks per position in training."""
    has_layer_shift: bool = True
    """SpecBlock ablation switch."""
    has_prefix_broadcast: bool = True
    """SpecBlock ablation switch."""
    has_valid_prefix: bool = True
    """SpecBlock ablation switch (training only)."""
    has_rank_head: bool = True
    """SpecBlock ablation switch."""
    seed: int = 0
    json: bool = False
    """Print the last held-out reading as one JSON object."""


def net_config(args: TrainArgs, target: Target) -> NetConfig:
    """A drafter of the target's own layer sizes: two layers for SpecBlock, one for the others."""
    network = target.network
    return NetConfig(
        hidden_size=target.hidden_size,
        n_heads=network.n_heads,
        n_kv_heads=network.n_kv,
        head_dim=network.head_dim,
        intermediate_size=int(network.layers[0].gate.weight.shape[0]),
        vocab_size=target.vocab_size,
        draft_vocab_size=min(args.draft_vocab_size, target.vocab_size),
        n_layers=2 if args.kind == "specblock" else 1,
        n_slots=args.n_slots,
        has_layer_shift=args.has_layer_shift,
        has_prefix_broadcast=args.has_prefix_broadcast,
        has_rank_head=args.has_rank_head,
    )


def train(args: TrainArgs) -> dict[str, Any]:
    """Run or resume; returns the card. Raises InputError for an unknown kind, missing features or no corpus."""
    if args.kind not in KINDS:
        raise InputError(f"unknown drafter kind {args.kind!r}; known: {', '.join(KINDS)}")
    if args.n_positions < 1:
        raise InputError("--n-positions must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(args.target, device=args.device)
    if args.corpus is not None:
        write_features(target, read_corpus(Path(args.corpus)), Path(args.features))
    config = TrainConfig(
        kind=args.kind,
        net=net_config(args, target),
        objective=ObjectiveConfig(n_steps=args.n_steps, n_blocks=args.n_blocks, has_valid_prefix=args.has_valid_prefix),
        n_positions=args.n_positions,
        batch_tokens=args.batch_tokens,
        matrix_lr=args.matrix_lr,
        head_lr=args.head_lr,
        seed=args.seed,
    )
    store, out = FeatureStore(Path(args.features)), Path(args.out)
    embed, head, norm = (w.float() for w in (target.embed_weight, target.head_weight, target.network.norm.weight))
    trainer = Trainer(config, store, embed, head, norm, out, device=torch.device(args.device))
    trainer.run()
    card = make_card(trainer, target)
    export(trainer, out / "checkpoint", card)
    return card


def export(trainer: Trainer, folder: Path, card: dict[str, Any]) -> None:
    """Write the checkpoint folder: weights that take raw features, and card.json."""
    kind = trainer.config.kind
    extra = {"target_vocab_size": trainer.config.net.vocab_size} if kind == "medusa" else None
    save_checkpoint(folder, kind, trainer.exported(), np.asarray(trainer.draft_ids), extra)
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def make_card(trainer: Trainer, target: Target) -> dict[str, Any]:
    """What a user must know of the weights: data, steps, time, held-out figures."""
    lines = (trainer.out / "metrics.jsonl").read_text().splitlines()
    held_out = [row for row in map(json.loads, lines) if row["split"] == "held_out"]
    return {
        "drafter": trainer.config.kind,
        "target": target.name,
        "target_weights_hash": target.weights_hash,
        "date": date.today().isoformat(),
        "machine": machine(),
        "n_positions": trainer.n_seen,
        "n_distinct_positions": sum(a.length - a.prompt_length for a in trainer.train),
        "n_optimiser_steps": trainer.n_steps,
        "training_seconds": round(trainer.seconds),
        "n_parameters": sum(p.numel() for p in trainer.net.parameters()),
        "config": trainer.config.to_dict(),
        "held_out": held_out[-1] if held_out else None,
    }
