"""Write a feature store: the target's features, final hidden state and soft labels over a corpus it has written.

Done once; every training of every drafter reads it. Layout: `workbench.training.data`. About 4.9 KB a token plus 384
bytes a label at hidden size 576.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from workbench.errors import InputError
from workbench.sampling import Sampling
from workbench.target import Target
from workbench.trace import first_difference, write_durably
from workbench.training.corpus_files import COLUMNS, read_run
from workbench.training.data import NOTE, loop_cut, read_note

IDS = ("prompt_ids", "response_ids")
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
    """All exchanges of a corpus folder, in file order; answers cut where they begin to loop. Raises InputError."""
    files = sorted(Path(folder).glob("*.parquet"))
    if not files:
        raise InputError(f"{folder} holds no corpus (no .parquet file).")
    out = []
    for file in files:
        for row in _corpus_rows(file):
            answer = row["response_ids"][: loop_cut(np.asarray(row["response_ids"]))]
            if answer and row["prompt_ids"]:
                out.append(Exchange(row["kind"], row["temperature"], row["prompt_ids"], answer))
    if not out:
        raise InputError(f"{folder} holds a corpus without any answer.")
    return out


def _corpus_rows(file: Path) -> list[dict[str, Any]]:
    try:
        table = pq.read_table(file, columns=COLUMNS.names).select(COLUMNS.names).cast(COLUMNS)
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise InputError(f"{file}: not a corpus file with the columns {', '.join(COLUMNS.names)}.") from error
    if any(column.null_count for column in [*table.columns, *(table[name].combine_chunks().flatten() for name in IDS)]):
        raise InputError(f"{file}: the corpus has empty fields.")
    return table.to_pylist()


def check_corpus(folder: Path, corpus: list[Exchange], target: Target) -> None:
    """InputError where another target wrote the corpus, by its run.json where there is one, or by its token ids."""
    if (folder / "run.json").exists():
        written_by = read_run(folder).get("target") or {}
        if written_by.get("weights_hash") != target.weights_hash:
            name = written_by.get("name")
            raise InputError(f"{folder}: the target {name!r} wrote this corpus, and {target.name!r} is another one.")
    n_most = max(len(x.prompt_ids) + len(x.response_ids) for x in corpus)
    last = max(max(*x.prompt_ids, *x.response_ids) for x in corpus)
    if last >= target.vocab_size or n_most > target.max_context:
        raise InputError(
            f"{folder}: another target than {target.name!r} wrote this corpus (token {last} of {target.vocab_size}, "
            f"{n_most} tokens in a context of {target.max_context})."
        )


def write_features(target: Target, corpus: list[Exchange], out: Path, seed: int = 0) -> None:
    """Write every shard that is not there yet; a shard appears whole or not at all, so a killed run resumes.

    Raises InputError where `out` holds features of another target or corpus, or cannot be written.
    """
    identity = {
        "target": target.weights_hash,
        "layers": list(target.feature_layers),
        "seed": seed,
        "n": len(corpus),
        "corpus": _corpus_hash(corpus),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (note := read_note(out)) is not None and (key := first_difference(note, identity)):
            raise InputError(f"{out} holds features of another target or corpus ({key} differs).")
        write_durably(out / NOTE, json.dumps(identity).encode())
        order = np.random.default_rng(seed).permutation(len(corpus))
        shards = np.array_split(order, max(1, -(-len(order) // SHARD_ANSWERS)))
        for i, ids in enumerate(tqdm(shards, desc="features", unit="shard")):
            folder = out / f"{i:04d}"
            if not folder.exists():
                _write_shard(folder, (_row(target, corpus[j], int(j)) for j in ids))
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"{out}: cannot be written ({why}); the feature shards there are whole.") from error


def _corpus_hash(corpus: list[Exchange]) -> str:
    """SHA-256 over the token ids of all exchanges, in order."""
    digest = hashlib.sha256()
    for x in corpus:
        for ids in (x.prompt_ids, x.response_ids):
            digest.update(np.asarray([len(ids), *ids], "<i8").tobytes())
    return digest.hexdigest()


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


def _write_shard(folder: Path, rows: Iterable[dict[str, np.ndarray]]) -> None:
    parts = list(rows)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in parts[0]:
        np.save(temporary / f"{name}.npy", np.concatenate([p[name] for p in parts]))
    os.replace(temporary, folder)
