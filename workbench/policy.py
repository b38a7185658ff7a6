"""What a policy is: the rule that chooses, at every step, which drafter runs and how its tree grows. No torch.

A policy is deterministic given what it observes and its uniform draws, and sees nothing of the step it is about to
choose for. B streams walk in lockstep; a stream is an ordered list of episodes that share one policy state. Live
decoding is B = 1. A step's cost is modelled milliseconds from a stated source, never a clock's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.tree import Plan

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """One entry of a policy's menu: a drafter under a plan. `name` is what tables call it."""

    name: str
    drafter: str
    plan: Plan


@dataclass(frozen=True)
class Observation:
    """What B streams know before a step."""

    step: NDArray[np.int32]  # [B], step of the episode, 0-based
    position: NDArray[np.int32]  # [B], of the step's first token
    context_length: NDArray[np.int32]  # [B], prompt and committed tokens
    uniform: Floats  # [B, U], draws in (0, 1) keyed by (policy seed, prompt, step); U is what the policy asked for


@dataclass(frozen=True)
class Feedback:
    """What a step did, after the cuts at stop ids and length."""

    n_committed: NDArray[np.int32]  # [B]
    n_accepted: NDArray[np.int32]  # [B]
    n_nodes: NDArray[np.int32]  # [B]
    ms: Floats  # [B], modelled


class Policy(Protocol):
    """The rule. Its state is a NamedTuple of arrays whose first axis is B, so that ended streams can be dropped."""

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The menu."""
        ...

    @property
    def n_uniforms(self) -> int:
        """U, draws wanted a step."""
        ...

    def init(self, n_streams: int) -> Any:
        """The state of B fresh streams."""
        ...

    def choose(self, state: Any, obs: Observation) -> NDArray[np.int64]:
        """The arm of every stream's next step, [B]."""
        ...

    def update(self, state: Any, arm: NDArray[np.int64], feedback: Feedback) -> Any:
        """The state after the step; the given state may be reused."""
        ...


def kept(state: Any, is_kept: NDArray[np.bool_]) -> Any:
    """A policy's state of some of its streams alone."""
    return type(state)(*(array[is_kept] for array in state))


# ------------------------------------------------------------------------------------------------ draws

_STEP, _INDEX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


def prompt_draw_key(prompt_tokens: Sequence[int] | NDArray[np.int32], turn: int) -> int:
    """64 bits of a prompt's content and its turn: what keys a policy's draws."""
    content = np.asarray(prompt_tokens, "<i4").tobytes() + int(turn).to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def uniforms(policy_seed: NDArray[np.uint64], prompt: NDArray[np.uint64], step: NDArray[np.int32], n: int) -> Floats:
    """Draws in (0, 1), [B, n], a hash of (policy seed [B], prompt key [B], step [B], index)."""
    if n == 0:
        return np.empty((len(step), 0))
    with np.errstate(over="ignore"):
        key = _mixed(_mixed(policy_seed + _INDEX) ^ prompt) + step.astype(np.uint64) * _STEP
        bits = _mixed(_mixed(key)[:, None] + np.arange(1, n + 1, dtype=np.uint64) * _INDEX)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ------------------------------------------------------------------------------------------------ cost


class StepWork(NamedTuple):
    """What B steps cost, in counts."""

    drafter: NDArray[np.int32]  # [B], index into the drafters' names
    n_nodes: NDArray[np.int32]  # [B]
    n_forwards: NDArray[np.int64]  # [B], of the drafter
    n_rows: NDArray[np.int64]  # [B], rows of all those forwards
    context_length: NDArray[np.int32]  # [B]


class StepCost(Protocol):
    """Milliseconds of a step from its counts."""

    @property
    def name(self) -> str:
        """Where the milliseconds come from."""
        ...

    def step_ms(self, work: StepWork) -> Floats:
        """[B]."""
        ...


@dataclass(frozen=True)
class FlatCost:
    """A stand-in, until measured profiles are there: so much a verification, a node, a drafter forward.

    The numbers are those of no machine; they are of the order of a small target on a few CPU cores.
    """

    verification_ms: float = 30.0
    node_ms: float = 0.3
    forward_ms: float = 5.0

    @property
    def name(self) -> str:
        """What tables say beside modelled milliseconds."""
        return f"stand-in: {self.verification_ms:g} + {self.node_ms:g} a node + {self.forward_ms:g} a drafter forward"

    def step_ms(self, work: StepWork) -> Floats:
        """[B]."""
        return self.verification_ms + self.node_ms * work.n_nodes + self.forward_ms * work.n_forwards
