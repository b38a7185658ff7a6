"""A whole training, start to shipped folder: features where they are missing, the loop, the checkpoint and its card."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.drafters.checkpoint import MAX_LAYERS, save_checkpoint
from workbench.drafters.nets import NetConfig
from workbench.errors import InputError
from workbench.provenance import git_state, machine, versions
from workbench.target import Target, load_target
from workbench.training.data import FeatureStore
from workbench.training.features import check_corpus, read_corpus, write_features
from workbench.training.loop import KINDS, TrainConfig, Trainer
from workbench.training.objectives import ObjectiveConfig
from workbench.training.statefile import read_metrics


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
    """Seed of the first weights, the batches and the rows picked."""
    save_every_s: float = 180.0
    """Seconds of training that a kill may cost."""
    json: bool = False
    """Print the card of the finished checkpoint as one JSON object."""


def check_args(args: TrainArgs) -> None:
    """Raise InputError for a setting that is out of range."""
    if args.kind not in KINDS:
        raise InputError(f"Unknown drafter kind {args.kind!r}; known are {', '.join(KINDS)}.")
    for name in ("n_positions", "draft_vocab_size", "n_slots", "batch_tokens", "n_steps", "n_blocks"):
        if getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}.")
    for name in ("n_slots", "n_steps", "n_blocks"):
        if getattr(args, name) > MAX_LAYERS:
            raise InputError(f"--{name.replace('_', '-')} must be at most {MAX_LAYERS}, not {getattr(args, name)}.")
    for name in ("matrix_lr", "head_lr"):
        if not (getattr(args, name) > 0 and math.isfinite(getattr(args, name))):
            raise InputError(f"--{name.replace('_', '-')} must be a number above 0, not {getattr(args, name)}.")
    if args.threads < 0 or args.seed < 0 or not args.save_every_s >= 0:
        raise InputError("--threads, --seed and --save-every-s must not be negative.")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise InputError(f"{args.out}: is not a folder.")
    if args.corpus is None and not Path(args.features).is_dir():
        raise InputError(f"{args.features}: there is no feature store; give --corpus to write it from.")


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
        n_ttt_blocks=args.n_blocks,
        has_layer_shift=args.has_layer_shift,
        has_prefix_broadcast=args.has_prefix_broadcast,
        has_rank_head=args.has_rank_head,
    )


def train(args: TrainArgs) -> dict[str, Any]:
    """Run or resume; returns the card. Raises InputError for settings, features or a corpus that will not do."""
    check_args(args)
    make_folder(Path(args.out))
    corpus = None if args.corpus is None else read_corpus(Path(args.corpus))
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(args.target, device=args.device)
    if corpus is not None:
        check_corpus(Path(str(args.corpus)), corpus, target)
        write_features(target, corpus, Path(args.features))
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
    check_store(store, target)
    embed, head, norm = (w.float() for w in (target.embed_weight, target.head_weight, target.network.norm.weight))
    trainer = Trainer(config, store, embed, head, norm, out, device=torch.device(args.device))
    trainer.run(save_every_s=args.save_every_s)
    card = make_card(trainer, target)
    export(trainer, out / "checkpoint", card)
    return card


def make_folder(folder: Path) -> None:
    """Make the folder, before hours of work rest on it. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror}).") from error


def check_store(store: FeatureStore, target: Target) -> None:
    """InputError where the features are not of this target and its tapped layers."""
    own = {"target": target.weights_hash, "layers": list(target.feature_layers)}
    if store.note is not None and any(store.note.get(key) != value for key, value in own.items()):
        raise InputError(f"{store.root} holds features of another target than {target.name!r}, or of other layers.")
    if store.feature_size != 3 * target.hidden_size or store.n_tokens > target.vocab_size:
        raise InputError(
            f"{store.root} holds features of another target than {target.name!r}: of width {store.feature_size} and "
            f"{store.n_tokens} or more tokens, against {3 * target.hidden_size} and {target.vocab_size}."
        )


def export(trainer: Trainer, folder: Path, card: dict[str, Any]) -> None:
    """Write the checkpoint folder: weights that take raw features, and card.json.

    config.json names the tapped layers (hidden_states entries) of drafters that read features, so that a target with
    other ones is refused.
    """
    kind = trainer.config.kind
    extra: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": card["feature_layers"]}
    if kind == "medusa":
        extra = {"target_vocab_size": trainer.config.net.vocab_size}
    save_checkpoint(folder, kind, trainer.exported(), np.asarray(trainer.draft_ids), extra)
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def make_card(trainer: Trainer, target: Target) -> dict[str, Any]:
    """What a user must know of the weights: data, steps, time, held-out figures.

    Held-out accuracies are of the rows whose best token the draft vocabulary has, a share `held_out_coverage`.
    """
    held_out = [row for row in read_metrics(trainer.out) if row["split"] == "held_out"]
    return {
        "drafter": trainer.config.kind,
        "target": target.name,
        "target_weights_hash": target.weights_hash,
        "target_template_hash": target.template_hash,
        "feature_layers": list(target.feature_layers),
        "date": date.today().isoformat(),
        "machine": machine() | {"device": str(trainer.device)},
        "versions": versions(),
        "git": git_state(),
        "n_positions": trainer.n_seen,
        "n_positions_in_store": sum(a.length - a.prompt_length for a in trainer.train),
        "n_optimiser_steps": trainer.n_steps,
        "training_seconds": round(trainer.seconds),
        "n_parameters": sum(p.numel() for p in trainer.net.parameters()),
        "config": trainer.config.to_dict(),
        "held_out": held_out[-1] if held_out else None,
        "held_out_coverage": coverage(trainer),
    }


def coverage(trainer: Trainer) -> float | None:
    """Share of the held-out labels whose best token is in the draft vocabulary; None without held-out answers."""
    rows = [
        trainer.store.shards[a.shard]["soft_id"][a.label_row : a.label_row + a.length - a.prompt_length, 0]
        for a in trainer.held_out
    ]
    return round(float((trainer.to_draft[np.concatenate(rows)] >= 0).mean()), 4) if rows else None
