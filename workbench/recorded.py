"""A target that answers from a recorded text: verification without the large model.

Verification is lossless, so the committed text does not depend on the policy: what the target wants after an accepted
path is the next recorded token. `RecordedTarget` serves the same sessions as `Target`; a drafter runs for real on the
recorded features. Past the recorded text it has no answer and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.sampling import Sampling
from workbench.target import Prefill, Target, Verdict
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
