"""Feature stores, the draft vocabulary, splits and batches.

A feature store is a folder of shards; a shard is a folder of `.npy` files (memory-mapped, so that trainings side by
side share the page cache), rows concatenated over answers:

    feat [N, 3H] fp16, final [N, H] fp16   the target's tapped layers and final normed hidden state
    tok [N] uint32, length [A], prompt_length [A]
    soft_id [R, J] uint32, soft_p [R, J] fp16  the target's J most likely next tokens at the R label indices
    (index prompt_length - 1 .. length - 2 of every answer), temperature 1
    kind [A] str, temperature [A] float32, answer_id [A] int64
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.metrics import LOOP_NGRAM

NOTE = "store.json"  # of which target and corpus the features are; a store without one is taken on trust
ARRAYS = ("feat", "final", "tok", "length", "prompt_length", "soft_id", "soft_p", "kind", "temperature", "answer_id")
LOOP_RUN = 32  # an answer is cut once this many tokens in a row repeat earlier 9-grams of it


@dataclass(frozen=True)
class Answer:
    """Where one answer lies in the store; `length` counts prompt and answer tokens, the answer after its loop cut."""

    shard: int
    row: int
    label_row: int
    length: int
    prompt_length: int
    answer_id: int


@dataclass(frozen=True)
class Batch:
    """Right-padded answers. Index i holds the feature h_i and the token t_i; label index j predicts t_{j+1}."""

    feat: Tensor  # [B, S, 3H] divided by the store's per-dimension scale
    final: Tensor  # [B, S, H]
    tok: Tensor  # [B, S] int64
    is_label: Tensor  # bool [B, S] the target's distribution at this index is a label
    in_vocab: Tensor  # bool [B, S] the target's best token is in the draft vocabulary
    soft_id: Tensor  # [B, S, J] draft ids
    soft_p: Tensor  # [B, S, J] renormalised over the draft vocabulary; 0 where outside
    n_positions: int  # label positions

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def loop_cut(tokens: np.ndarray) -> int:
    """How many leading tokens of an answer to keep: all, or up to the end of the first long repeated run."""
    seen: set[bytes] = set()
    run = 0
    tokens = np.ascontiguousarray(tokens, dtype=np.int64)
    for i in range(len(tokens) - LOOP_NGRAM + 1):
        gram = tokens[i : i + LOOP_NGRAM].tobytes()
        run = run + 1 if gram in seen else 0
        seen.add(gram)
        if run >= LOOP_RUN:
            return i + LOOP_NGRAM
    return len(tokens)


class FeatureStore:
    """Memory-mapped shards and the list of answers in them."""

    def __init__(self, root: Path, n_shards: int | None = None) -> None:
        """Open all shards, or the first `n_shards`. Raises InputError where there are none, or not so many."""
        self.root = Path(root)
        if not self.root.is_dir():
            raise InputError(f"{root}: there is no feature store (no such folder).")
        folders = sorted(p for p in self.root.iterdir() if p.is_dir() and not p.name.endswith(".tmp"))
        if len(folders) < max(1, n_shards or 0):
            raise InputError(f"{root} holds {len(folders)} feature shards; {max(1, n_shards or 0)} or more are needed.")
        self.note = read_note(self.root)
        self.shards = [_open_shard(p) for p in folders[:n_shards]]
        self.answers = [answer for i in range(len(self.shards)) for answer in self._answers(i)]
        self.feature_size = int(self.shards[0]["feat"].shape[1])  # 3H
        self.n_tokens = 1 + max(int(shard["tok"].max()) for shard in self.shards)  # the least vocabulary it fits

    def _answers(self, i: int) -> Iterator[Answer]:
        shard = self.shards[i]
        row = label_row = 0
        tok = np.asarray(shard["tok"])
        for length, prompt, answer_id in zip(shard["length"], shard["prompt_length"], shard["answer_id"], strict=True):
            keep = int(prompt) + loop_cut(tok[row + prompt : row + length])
            yield Answer(i, row, label_row, keep, int(prompt), int(answer_id))
            row, label_row = row + int(length), label_row + int(length - prompt)

    def split(self, held_out_share: float = 0.04) -> tuple[list[Answer], list[Answer]]:
        """(training, held-out) answers; an answer's side depends on its id alone.

        A store so small that one side would be empty gives it the one answer nearest to it. Raises InputError for
        fewer than two answers (unless none is to be held out).
        """
        place = [(a.answer_id * 2654435761 % 2**32) / 2**32 for a in self.answers]
        n_held = sum(x < held_out_share for x in place)
        if held_out_share > 0:
            if len(place) < 2:
                raise InputError(f"{self.root} holds {len(place)} answer(s); two are needed, one of them held out.")
            n_held = min(max(1, n_held), len(place) - 1)
        held_out = set(sorted(range(len(place)), key=place.__getitem__)[:n_held])
        train = [a for i, a in enumerate(self.answers) if i not in held_out]
        return train, [a for i, a in enumerate(self.answers) if i in held_out]

    def feature_scale(self, answers: list[Answer], n: int = 64) -> np.ndarray:
        """Per-dimension root mean square of the features [3H] over the first n answers; 1 where there is no signal."""
        parts = [np.asarray(self.shards[a.shard]["feat"][a.row : a.row + a.length], np.float32) for a in answers[:n]]
        rms = np.sqrt(np.mean(np.concatenate(parts) ** 2, axis=0))
        return np.where(rms > 0, rms + 1e-6, np.float32(1))

    def draft_vocabulary(self, answers: list[Answer], size: int, vocab_size: int) -> np.ndarray:
        """The `size` most frequent response tokens, ties by id, as sorted target ids [V_d]."""
        count = np.zeros(vocab_size, np.int64)
        for a in answers:
            tokens = self.shards[a.shard]["tok"][a.row + a.prompt_length : a.row + a.length]
            count += np.bincount(np.asarray(tokens, np.int64), minlength=vocab_size)
        return np.sort(np.lexsort((np.arange(vocab_size), -count))[:size])

    def batch(self, answers: list[Answer], scale: Tensor, to_draft: np.ndarray) -> Batch:
        """Load answers; `to_draft` [V] maps target ids to draft ids, -1 outside the draft vocabulary."""
        n_b, n_s = len(answers), max(a.length for a in answers)
        first = self.shards[0]
        size, n_soft = first["final"].shape[1], first["soft_id"].shape[1]
        feat, final = np.zeros((n_b, n_s, 3 * size), np.float32), np.zeros((n_b, n_s, size), np.float32)
        tok, is_label = np.zeros((n_b, n_s), np.int64), np.zeros((n_b, n_s), bool)
        soft_id, soft_p = np.zeros((n_b, n_s, n_soft), np.int64), np.zeros((n_b, n_s, n_soft), np.float32)
        for b, a in enumerate(answers):
            shard, rows = self.shards[a.shard], slice(a.row, a.row + a.length)
            feat[b, : a.length], final[b, : a.length] = shard["feat"][rows], shard["final"][rows]
            tok[b, : a.length] = shard["tok"][rows]
            label = slice(a.prompt_length - 1, a.length - 1)
            n_label = a.length - a.prompt_length
            is_label[b, label] = True
            soft_id[b, label] = shard["soft_id"][a.label_row : a.label_row + n_label]
            soft_p[b, label] = shard["soft_p"][a.label_row : a.label_row + n_label]
        soft_id = to_draft[soft_id]
        in_vocab = (soft_id[..., 0] >= 0) & is_label
        soft_p = np.where(soft_id >= 0, soft_p, 0.0)
        soft_p /= np.maximum(soft_p.sum(-1, keepdims=True), 1e-9)
        t = torch.from_numpy
        return Batch(
            feat=t(feat) / scale,  # scale on the CPU
            final=t(final),
            tok=t(tok),
            is_label=t(is_label),
            in_vocab=t(in_vocab),
            soft_id=t(np.maximum(soft_id, 0)),
            soft_p=t(soft_p),
            n_positions=int(is_label.sum()),
        )


def read_note(root: Path) -> dict[str, Any] | None:
    """store.json of a feature store; None where there is none. Raises InputError for a damaged one."""
    path = root / NOTE
    if not path.exists():
        return None
    try:
        note = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        note = None
    if not isinstance(note, dict):
        raise InputError(f"{path}: damaged; remove the folder and write the features anew.")
    return note


def _open_shard(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a shard, memory-mapped. Raises InputError for a damaged one."""
    try:
        return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{folder}: not a whole feature shard; remove it and write the features again.") from error


def batches(answers: list[Answer], n_tokens: int, seed: int, epoch: int) -> list[list[Answer]]:
    """One pass over the answers in random order, answers of like length together, padded size about `n_tokens`."""
    if not answers:
        return []
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(answers))
    out: list[list[Answer]] = []
    for chunk in np.array_split(order, max(1, len(order) // 128)):
        group: list[Answer] = []
        for i in sorted(chunk, key=lambda j: answers[j].length):
            if group and (len(group) + 1) * answers[i].length > n_tokens:
                out.append(group)
                group = []
            group.append(answers[i])
        out.append(group)
    return [out[i] for i in rng.permutation(len(out))]
