"""Write a feature store: the target's features, final hidden state and soft labels over a corpus it has written.

Done once; every training of every drafter reads it. Layout: `workbench.training.data`. About 4.9 KB a token plus 384
bytes a label at hidden size 576.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from workbench.errors import InputError
from workbench.sampling import Sampling
from workbench.target import Target
from workbench.training.data import loop_cut

N_SOFT = 64
SHARD_ANSWERS = 128


@dataclass(frozen=True)
class Exchange:
    """One prompt (chat template included) and the target's answer."""

    kind: str
    temperature: float
    prompt_ids: list[int]
    response_ids: list[int]


def read_corpus(folder: Path) -> list[Exchange]:
    """All exchanges of a corpus folder, in file order; answers cut where they begin to loop."""
    files = sorted(Path(folder).glob("*.parquet"))
    if not files:
        raise InputError(f"{folder} holds no corpus (no .parquet file)")
    out = []
    for file in files:
        for row in pq.read_table(file, columns=["kind", "temperature", "prompt_ids", "response_ids"]).to_pylist():
            answer = row["response_ids"][: loop_cut(np.asarray(row["response_ids"]))]
            if answer:
                out.append(Exchange(row["kind"], row["temperature"], row["prompt_ids"], answer))
    return out


def write_features(target: Target, corpus: list[Exchange], out: Path, seed: int = 0) -> None:
    """Write every shard that is not there yet; a shard appears whole or not at all, so a killed run resumes."""
    out.mkdir(parents=True, exist_ok=True)
    identity = {"target": target.weights_hash, "layers": list(target.feature_layers), "seed": seed, "n": len(corpus)}
    note = out / "store.json"
    if note.exists() and json.loads(note.read_text()) != identity:
        raise InputError(f"{out} holds features of another target or corpus")
    note.write_text(json.dumps(identity))
    order = np.random.default_rng(seed).permutation(len(corpus))
    shards = np.array_split(order, max(1, -(-len(order) // SHARD_ANSWERS)))
    for i, ids in enumerate(tqdm(shards, desc="features", unit="shard")):
        folder = out / f"{i:04d}"
        if not folder.exists():
            _write_shard(folder, (_row(target, corpus[j], int(j)) for j in ids))


def _row(target: Target, exchange: Exchange, answer_id: int) -> dict[str, np.ndarray]:
    """The arrays of one answer; soft labels at indices prompt_length - 1 .. length - 2."""
    tokens, n_prompt = exchange.prompt_ids + exchange.response_ids, len(exchange.prompt_ids)
    rows = target.session(len(tokens), Sampling()).prefill(tokens)
    with torch.inference_mode():
        logits = target.network.logits(rows.final[n_prompt - 1 : -1].to(target.dtype))
        top = logits.topk(min(N_SOFT, logits.shape[-1]), dim=-1)
        soft_p = (top.values - logits.logsumexp(-1, keepdim=True)).exp()
    return {
        "feat": rows.features.half().cpu().numpy(),
        "final": rows.final.half().cpu().numpy(),
        "tok": np.asarray(tokens, np.uint32),
        "length": np.asarray([len(tokens)]),
        "prompt_length": np.asarray([n_prompt]),
        "soft_id": top.indices.cpu().numpy().astype(np.uint32),
        "soft_p": soft_p.half().cpu().numpy(),
        "kind": np.asarray([exchange.kind]),
        "temperature": np.asarray([exchange.temperature], np.float32),
        "answer_id": np.asarray([answer_id]),
    }


def _write_shard(folder: Path, rows: Iterable[dict[str, np.ndarray]] | Iterator[dict[str, np.ndarray]]) -> None:
    parts = list(rows)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in parts[0]:
        np.save(temporary / f"{name}.npy", np.concatenate([p[name] for p in parts]))
    os.replace(temporary, folder)
