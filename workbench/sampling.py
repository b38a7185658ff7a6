"""Sampling whose noise is keyed to the position, so that every drafter, tree and policy commits the same text.

The token at position t is argmax over the vocabulary of (processed log-probability + Gumbel noise), and the noise is a
counter-based hash of (sample seed, prompt content, turn, position, token id): no generator state, hence nothing for a
draft tree to disturb. Positions count generated tokens from 0 (what the prefill commits); the token wanted after the
root is position n_committed, the one after a node of depth d is n_committed + d.

Hash: SplitMix64 (Steele, Lea, Flood 2014; constants of Vigna's public-domain splitmix64.c) in wrapping int64
arithmetic, the same integers on numpy and torch, CPU and CUDA. The two logarithms of the Gumbel transform are the
library's own, so the noise itself may differ in its last bit between them.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import InputError

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WRAP = 1 << 64
_NUCLEUS_FIRST_LOOK = 256
LEAST_TEMPERATURE = 1e-6  # below, logits divided by it come near the end of float64


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is chosen. temperature 0 is greedy (top_p, top_k and seed then change nothing).

    The model's own `do_sample`, `temperature`, `top_p` and `top_k` are never applied: what is not said here is off.
    """

    temperature: float = 0.0
    top_p: float = 1.0  # keep the smallest set of most probable tokens whose probabilities add up to top_p
    top_k: int = 0  # keep the k most probable tokens; 0 = all
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, (int, float)) and 0 <= self.temperature < math.inf):
            raise InputError(f"temperature must be a finite number >= 0, got {self.temperature}.")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise InputError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {self.temperature}.")
        if not (isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1):
            raise InputError(f"top_p must lie in (0, 1], got {self.top_p}.")
        if not (_is_int(self.top_k) and self.top_k >= 0):
            raise InputError(f"top_k must be a whole number >= 0 (0 = off), got {self.top_k}.")
        if not (_is_int(self.seed) and -(_WRAP >> 1) <= self.seed < _WRAP >> 1):
            raise InputError(f"the sample seed must be a whole number of 64 bits with sign, got {self.seed}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def prompt_key(prompt_ids: Sequence[int]) -> int:
    """A stable 64-bit hash of a prompt's token ids, unsigned: the same everywhere, for ever."""
    content = np.asarray(prompt_ids, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def stream_key(seed: int, prompt: int, turn: int, position: int) -> int:
    """The 64-bit key of one position's noise: SplitMix64's finaliser over the four numbers in turn. Unsigned."""
    key = 0
    for word in (seed, prompt, turn, position):
        key = _mix_int(((key ^ (operator.index(word) % _WRAP)) + _GOLDEN) % _WRAP)
    return key


def token_bits(key: int, tokens: Any) -> Any:
    """64 random bits for each token id (int64, numpy or torch): output number id of the SplitMix64 stream `key`."""
    return _mix((tokens + 1) * _signed(_GOLDEN) + _signed(key))


def uniform(bits: Tensor) -> Tensor:
    """Odd multiples of 2^-53 from the upper 53 of 64 random bits, float64: in (0, 1), never at its ends."""
    return (_shifted(bits, 11) | 1).to(torch.float64).mul_(2.0**-53)


def gumbel(seed: int, prompt: int, turn: int, position: int, n_vocab: int, device: Any = "cpu") -> Tensor:
    """Standard Gumbel noise of one position for every token id, float64 [V], from uniforms in (0, 1) of 53 bits."""
    tokens = torch.arange(n_vocab, dtype=torch.int64, device=device)
    bits = token_bits(stream_key(seed, prompt, turn, position), tokens)
    return uniform(bits).log_().neg_().log_().neg_()


def processed_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities after temperature, then top-k, then top-p, float64 [V]; removed tokens are -inf.

    Order and edge rules are those of Hugging Face's processors (`TemperatureLogitsWarper`, `TopKLogitsWarper`,
    `TopPLogitsWarper`): top-k keeps ties of the k-th value, top-p at least one token. Where equal values straddle the
    top-p cut, all of them stay (there, the library's choice falls by sort order). temperature must be above 0.
    """
    scores = logits.to(torch.float64) / sampling.temperature  # [V]
    if 0 < sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < torch.topk(scores, sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1:
        scores = scores.masked_fill(scores < _nucleus_floor(scores, sampling.top_p), -math.inf)
    return torch.log_softmax(scores, -1)


def _nucleus_floor(scores: Tensor, top_p: float) -> Tensor:
    """The smallest score that top-p keeps: a token stays while the tokens above it hold less than top_p.

    Looks at the best scores only, and at more of them while the cut lies beyond: a full sort costs as much as a step.
    """
    log_total, n = torch.logsumexp(scores, -1), _NUCLEUS_FIRST_LOOK
    while True:
        n = min(n, scores.numel())
        best = torch.topk(scores, n).values
        held = (best - log_total).exp().cumsum(-1)
        n_kept = 1 + int((held[:-1] < top_p).sum())
        if n_kept < n or n == scores.numel():
            return best[n_kept - 1]
        n *= 8


class Chooser:
    """Chooses the tokens of one request: greedy, or sampled with the noise of (seed, prompt, turn, position)."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], turn: int):
        self.sampling, self.turn = sampling, turn
        self.prompt = prompt_key(prompt_ids)

    def __call__(self, logits: Tensor, position: int) -> int:
        """The token at `position`, given the target's logits [V] for it."""
        if self.sampling.is_greedy:
            return int(logits.argmax())
        noise = gumbel(self.sampling.seed, self.prompt, self.turn, position, logits.numel(), logits.device)
        return int(noise.add_(processed_logprobs(logits, self.sampling)).argmax())


def _signed(word: int) -> int:
    """The int64 with the same bits as the unsigned 64-bit `word`."""
    return word - _WRAP if word >= _WRAP >> 1 else word


def _mix_int(z: int) -> int:
    """SplitMix64's finaliser on a Python integer in [0, 2^64)."""
    z = (z ^ (z >> 30)) * _MIX_1 % _WRAP
    z = (z ^ (z >> 27)) * _MIX_2 % _WRAP
    return z ^ (z >> 31)


def _mix(z: Any) -> Any:
    """SplitMix64's finaliser on int64 arrays, wrapping; `>>` is arithmetic there, so the sign bits are masked off."""
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    return z ^ _shifted(z, 31)


def _shifted(z: Any, n_bits: int) -> Any:
    return (z >> n_bits) & ((1 << (64 - n_bits)) - 1)
