"""Prompt lookup: a drafter without weights that copies what followed the latest earlier occurrence of the suffix.

The longest suffix n-gram (`max_ngram` tokens down to one) of prompt + committed text that occurs earlier is looked up,
and up to K of the tokens that followed it are offered, one a slot. Of several earlier occurrences the MOST RECENT one
is copied (an occurrence may overlap the suffix). A copy ends where the text ends.
Source of the idea: prompt lookup decoding; n-gram drafting in vLLM and transformers (which copy the earliest).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from workbench.drafters.base import LOGP_MIN, DraftState
from workbench.errors import InputError
from workbench.ngrams import NgramIndex
from workbench.tree import Expansion, Starts


@dataclass
class LookupState(DraftState):
    """The text so far, indexed."""

    index: NgramIndex = field(kw_only=True)
    n_pairs: int = 0  # pairs observed; pair i brings the token at index i + 1


@dataclass
class LookupDrafter:
    """Prompt lookup as a drafter: one level, K slots, one candidate a slot with log-probability 0 and no tier.

    It runs no network, so `DraftState.forwards` stays empty.
    """

    max_ngram: int = 3
    n_slots: int = 10
    name: str = "lookup"
    kind: str = "lookup"
    n_levels: int = 1
    has_tiers: bool = False
    max_width: int = 1
    weights_hash: str = "none"

    def __post_init__(self) -> None:
        if self.max_ngram < 1 or self.n_slots < 1:
            raise InputError(
                f"prompt lookup needs max_ngram and n_slots of at least 1, not {self.max_ngram} and {self.n_slots}"
            )

    def open(self, prompt_ids: list[int], capacity: int) -> LookupState:
        """Index the prompt; `capacity` bounds nothing here."""
        state = LookupState(index=NgramIndex(self.max_ngram))
        state.index.extend(prompt_ids)
        return state

    def observe(self, state: DraftState, features: Tensor | None, final: Tensor | None, tokens: list[int]) -> None:
        """Append the pairs' tokens. The prompt's own pairs repeat tokens already there; features are not looked at."""
        assert isinstance(state, LookupState)
        known = state.index.tokens
        for token in tokens:
            place = state.n_pairs + 1
            state.n_pairs += 1
            if place == len(known):
                state.index.extend([int(token)])
            elif known[place] != token:
                raise ValueError(f"token {token} at index {place} contradicts the prompt's {known[place]}")

    def expand(self, state: DraftState, level: int, starts: Starts, width: int) -> Expansion:
        """Level 0: the copy after the root, `token` [1, 1, K, width] with the first candidate alone filled."""
        assert isinstance(state, LookupState)
        if level != 0:
            raise InputError(f"{self.name} drafts one level only, but the plan asks for level {level}")
        token = np.full((1, 1, self.n_slots, width), -1, dtype=np.int32)
        logp = np.full(token.shape, LOGP_MIN, dtype=np.int16)
        copied = state.index.copy(self.n_slots)
        token[0, 0, : len(copied), 0] = copied
        logp[0, 0, : len(copied), 0] = 0
        return Expansion(token=token, logp=logp, tier=np.full(token.shape[:3], -1, dtype=np.int8))
