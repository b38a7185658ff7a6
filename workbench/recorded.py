"""A target that answers from a recorded text: verification without the large model.

Verification is lossless, so the committed text does not depend on the policy: what the target wants after an accepted
path is the next recorded token. `RecordedTarget` serves the same sessions as `Target`; a drafter runs for real on the
recorded features. Past the recorded text it has no answer and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.poolreader import read_text
from workbench.pools import Text
from workbench.sampling import Sampling
from workbench.target import Prefill, Target, Verdict
from workbench.trace import Trace, part_path, read_groups
from workbench.tree import Tree, accept


@dataclass(frozen=True)
class Recording:
    """One answer: the prompt, its committed tokens (position 0 first), and rows for every index but the last token's.

    features [S + L - 1, 3H] and final [S + L - 1, H] for S prompt and L committed tokens.
    """

    prompt_ids: list[int]
    tokens: list[int]
    features: Tensor
    final: Tensor


PAST_END = -1  # what the target wants where the recording has ended: no drafted token equals it


def record_answer(
    target: Target, prompt_ids: Sequence[int], sampling: Sampling, turn: int, max_new_tokens: int, stop_ids: set[int]
) -> Recording:
    """Decode plainly and keep what a drafter is given: one prefill over prompt and answer yields all rows."""
    prompt = list(prompt_ids)
    session = target.session(len(prompt) + max_new_tokens + 1, sampling, turn)
    tokens = [session.prefill(prompt).token]
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        tokens.append(session.step())
    text = prompt + tokens[:-1]
    rows = target.session(len(text) + 1, Sampling()).prefill(text)
    return Recording(prompt, tokens, rows.features, rows.final)


STORED: dict[str, np.dtype] = {  # how bytes of features are read; numpy has no bfloat16, so its two bytes
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<i2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}


def read_recordings(trace: Trace, text: Text | None = None) -> Iterator[tuple[int, Recording]]:
    """Every episode of a trace recorded with features, with its number in the trace's text; rows as they are stored.

    InputError where there are no features, or they do not fit the text.
    """
    text = read_text(trace) if text is None else text
    about = trace.run.get("target")
    if not trace.run.get("features") or not isinstance(about, dict):
        raise InputError(f"{trace.folder}: was recorded without features.")
    name, size = about.get("feature_dtype") or about.get("dtype"), about.get("hidden_size")
    if name not in STORED or type(size) is not int or not 0 < size <= 1 << 20:
        raise InputError(f"{trace.folder}: run.json does not say how features are stored.")
    episode = 0
    for prompt in dict.fromkeys(text.prompt):
        path = part_path(trace.folder, "features", prompt)
        rows = _stored_rows(path, STORED[name], size)
        while episode < text.n_episodes and text.prompt[episode] == prompt:
            tokens = text.token[text.offset[episode] : text.offset[episode + 1]].tolist()
            prompt_ids = text.prompt_tokens[episode].tolist()
            key, n_rows = (prompt, text.turn[episode]), len(prompt_ids) + len(tokens) - 1
            found = list(islice(rows, n_rows))
            if [at for at, _ in found] != [(*key, i) for i in range(n_rows)]:
                raise InputError(f"{path}: its rows are not the indices of the text.")
            whole = torch.from_numpy(np.stack([row for _, row in found])).view(getattr(torch, name))
            yield episode, Recording(prompt_ids, tokens, whole[:, : 3 * size], whole[:, 3 * size :])
            episode += 1
        if next(rows, None) is not None:
            raise InputError(f"{path}: goes on behind the text.")


def _stored_rows(path: Path, dtype: np.dtype, size: int) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
    """Place (prompt, turn, index) and values [4H] of every row of a features part."""
    for data in read_groups(path, "features"):
        places = zip(*(data.column(name).to_pylist() for name in ("prompt", "turn", "index")))
        values = zip(*(data.column(name).to_pylist() for name in ("features", "final")))
        for place, (features, final) in zip(places, values):
            if (len(features), len(final)) != (3 * size * dtype.itemsize, size * dtype.itemsize):
                raise InputError(f"{path}: a row holds features of another width.")
            yield place, np.frombuffer(features + final, dtype)


class RecordedTarget:
    """Serves sessions that replay one recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def session(self, capacity_tokens: int, sampling: Sampling, turn: int = 0) -> RecordedSession:
        """A session; capacity, sampling and turn are those the recording was made with."""
        return RecordedSession(self.recording)


class RecordedSession:
    """Walks the recorded text. `n_committed` positions are committed; the root is the last of them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.n_committed = 0

    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        """Commit position 0 and hand over the prompt's rows."""
        r = self.recording
        if list(prompt_ids) != r.prompt_ids:
            raise ValueError("the recording is of another prompt")
        self.n_committed = 1
        n = len(r.prompt_ids)
        return Prefill(r.tokens[0], r.features[:n], r.final[:n])

    def verify(self, tree: Tree) -> Verdict:
        """Accept along the recorded text. A bonus past its end is `PAST_END`; the caller's cut never keeps it."""
        r, start = self.recording, self.n_committed
        if start >= len(r.tokens):
            raise ValueError("the recorded text has ended: there is nothing to verify against")
        wanted = r.tokens[start:]

        def token_at(node: int) -> int:
            depth = int(tree.depth[node]) if node >= 0 else 0
            return wanted[depth] if depth < len(wanted) else PAST_END

        path, bonus = accept(tree, token_at)
        first = len(r.prompt_ids) + start - 1  # index of the root
        rows = slice(first, min(first + len(path) + 1, len(r.features)))
        self.n_committed += len(path) + 1
        tokens = [int(tree.token[i]) for i in path]
        return Verdict(list(path), tokens, int(bonus), r.features[rows], r.final[rows])

    def step(self) -> int:
        """The next recorded token."""
        self.n_committed += 1
        return self.recording.tokens[self.n_committed - 1]


def as_float(recording: Recording, dtype: torch.dtype) -> Recording:
    """The recording with its rows in a drafter's dtype (rows are stored rounded to half precision)."""
    return Recording(recording.prompt_ids, recording.tokens, recording.features.to(dtype), recording.final.to(dtype))
