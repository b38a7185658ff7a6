"""Drafters that extend a tree block by block, each block from the hidden state of the one it grows from.

SpecBlock's blocks have K slots, EAGLE-3's one; the rest is the same and stands here. The cache holds K rows a committed
pair (h_i, t_{i+1}), computed from that pair and earlier ones alone, so what was accepted on the way leaves no trace;
behind them the rows of the tree, which the next first level overwrites. That level runs the newly committed pairs and
offers candidates at the last of them in one forward; every later level is one forward over all its starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.drafters.along import BranchingText, TextDraft
from workbench.drafters.base import DraftState, Forward, TopLogits, offer, top_logits
from workbench.drafters.cache import RowCache, causal_tail
from workbench.drafters.nets import Attend
from workbench.drafters.packing import pack
from workbench.tree import Expansion, Starts

N_CHUNK_ROWS = 1024  # most rows of a prompt's forward
N_SPARE_ROWS = 256  # room for a tree beside the committed pairs before the cache grows
NO_LIMIT = 1 << 14  # levels

Chain = tuple[tuple[int, int], ...]


@dataclass
class Branches:
    """Blocks grown since the last commit, numbered as they come; block 0 is the last pair's own.

    A block's chain lists (ancestor block, how many of its slots are visible) from block 0 on: what the block sees of
    the tree beside itself.
    """

    n_slots: int  # K
    firsts: list[int] = field(default_factory=lambda: [0])  # number of the first block of every level
    chains: list[Chain] = field(default_factory=lambda: [()])

    def reset(self) -> None:
        """Back to block 0 alone."""
        self.firsts, self.chains = [0], [()]

    def creators(self, level: int, starts: Starts) -> tuple[np.ndarray, np.ndarray]:
        """(block, slot) that created each start's node, int64 [S] each. Levels must come in order."""
        if level != len(self.firsts):
            raise ValueError(f"level {level} was asked for after {len(self.firsts)} levels; they come in order")
        n = int(starts.n[0])
        block = np.asarray(self.firsts)[starts.level[0, :n]] + starts.start[0, :n]
        return block, starts.slot[0, :n].astype(np.int64)

    def extend(self, block: np.ndarray, slot: np.ndarray) -> tuple[list[Chain], np.ndarray]:
        """Add a block under every (block, slot) -> their chains, and what their rows see of all blocks' rows.

        The mask is bool [S * K, (blocks before + S) * K].
        """
        n_before, n_new, k = len(self.chains), len(block), self.n_slots
        new = [(*self.chains[b], (b, s + 1)) for b, s in zip(block.tolist(), slot.tolist())]
        mask = np.zeros((n_new, k, n_before + n_new, k), dtype=np.bool_)
        for i, chain in enumerate(new):
            for ancestor, n_visible in chain:
                mask[i, :, ancestor, :n_visible] = True
        own = np.arange(n_new)
        mask[own, :, n_before + own] = np.tri(k, dtype=np.bool_)
        self.firsts.append(n_before)
        self.chains += new
        return new, mask.reshape(n_new * k, -1)


@dataclass
class BranchState(DraftState):
    """One request: its cache, the pairs that have not run, and the blocks grown from the last pair."""

    cache: RowCache = field(kw_only=True)
    branches: Branches = field(kw_only=True)
    n_pairs: int = 0  # pairs whose rows are in the cache
    features: list[Tensor] = field(default_factory=list)  # queued, [n, 3H] each
    tokens: list[int] = field(default_factory=list)  # queued
    hidden: Tensor | None = None  # [blocks, K, H] before the final norm


class BranchingDrafter:
    """What SpecBlock and EAGLE-3 share. Forwards are of kind "prompt" (offers nothing), "first" or "next"."""

    kind: str
    n_slots: int
    n_levels = NO_LIMIT
    has_tiers = False

    def __init__(
        self,
        net: Any,  # SpecBlockNet or Eagle3Net
        embed_weight: Tensor,  # [V, H] of the target
        target_ids: Tensor | None = None,  # [V_d] target id of each draft id; None: the same ids
        name: str = "",
        weights_hash: str = "none",
    ) -> None:
        self.net, self.embed_weight = net.eval().requires_grad_(False), embed_weight
        self.target_ids, self.name, self.weights_hash = target_ids, name or self.kind, weights_hash
        self.max_width = net.config.draft_vocab_size
        self.repack()

    def repack(self) -> None:
        """Take over the weights of `net`; to be called after every change of them. The first use is paid for here."""
        self._fast = pack(self.net)
        state = self.open([], 1)
        self.observe(state, self.embed_weight.new_zeros(1, self.net.config.feature_size), self.embed_weight, [0])
        with torch.inference_mode():
            self._offer(self._first(state), 1)

    def _run(
        self, condition: Tensor, embed: Tensor, position: Tensor, attends: Sequence[Attend], is_first: bool
    ) -> Tensor:
        """The network: condition [R, 3H or H], embed [R, H], position [R] -> hidden [R, K, H] before the final norm."""
        raise NotImplementedError

    def _positions(self, last: Any, n_ancestors: np.ndarray) -> np.ndarray:
        """Position of new blocks, int64, given the last pair's index and how many blocks stand above each."""
        raise NotImplementedError

    def _tiers(self, normed: Tensor, top: TopLogits) -> Tensor | None:
        """Predicted rank tiers [S, K], where there is a head for it."""
        return None

    def open(self, prompt_ids: list[int], capacity: int) -> BranchState:
        """An empty cache with room for `capacity` committed pairs and a tree."""
        c = self.net.config
        n_rows = capacity * self.n_slots + N_SPARE_ROWS
        cache = RowCache(c.n_layers, c.n_kv_heads, c.head_dim, n_rows, self.net.lm_head.weight)
        return BranchState(cache=cache, branches=Branches(self.n_slots))

    def observe(self, state: DraftState, features: Tensor, final: Tensor, tokens: list[int]) -> None:
        """Queue the pairs; their rows run with the next first level."""
        assert isinstance(state, BranchState)
        state.features.append(features)
        state.tokens.extend(tokens)

    @torch.inference_mode()
    def along(self, features: Tensor, final: Tensor, tokens: list[int]) -> TextDraft:
        """Draft at many positions of a text whose n pairs are given: features [n, 3H], final hidden, tokens."""
        return BranchingText(self, features, tokens)

    @torch.inference_mode()
    def expand(self, state: DraftState, level: int, starts: Starts, width: int) -> Expansion:
        """Candidates [1, S, K, width] of the blocks under the starts; level 0 is the block at the last pair."""
        assert isinstance(state, BranchState)
        return self._offer(self._first(state) if level == 0 else self._next(state, level, starts), width)

    def _offer(self, hidden: Tensor, width: int) -> Expansion:
        """Candidates of hidden states [S, K, H] through the heads."""
        normed = self._fast.norm(hidden)
        logits = self._fast.lm_head(normed)  # [S, K, V_d]
        top = top_logits(logits, width)
        return offer(logits, top, width, self.target_ids, self._tiers(normed, top))

    def _first(self, state: BranchState) -> Tensor:
        """Run the queued pairs, if any, and forget the last tree -> hidden [1, K, H] at the last pair."""
        n_queued, n_chunk = len(state.tokens), max(1, N_CHUNK_ROWS // self.n_slots)
        if n_queued:
            features = torch.cat(state.features).to(self.net.lm_head.weight)  # [n, 3H]
            embed = self._embed(state.tokens)  # [n, H]
            for begin in range(0, n_queued, n_chunk):
                rows = slice(begin, begin + n_chunk)
                self._run_pairs(state, features[rows], embed[rows], begin + n_chunk >= n_queued)
            state.features, state.tokens = [], []
        if state.hidden is None:
            raise ValueError("no pair was observed yet, so there is nothing to draft from")
        state.branches.reset()
        state.hidden = state.hidden[:1]
        return state.hidden

    def _run_pairs(self, state: BranchState, features: Tensor, embed: Tensor, is_last: bool) -> None:
        """Append the rows of consecutive pairs to the cache."""
        n_new, k, device = len(features), self.n_slots, features.device
        attends = state.cache.attends(state.n_pairs * k, n_new * k, causal_tail(n_new * k, device))
        position = torch.arange(state.n_pairs, state.n_pairs + n_new, device=device)
        state.hidden = self._run(features, embed, position, attends, True)[-1:]
        state.n_pairs += n_new
        state.forwards.append(Forward("first" if is_last else "prompt", n_new * k, int(is_last)))

    def _next(self, state: BranchState, level: int, starts: Starts) -> Tensor:
        """One block under every start, in one forward -> hidden [S, K, H]."""
        assert state.hidden is not None
        device, k, last = self.net.lm_head.weight.device, self.n_slots, state.n_pairs - 1
        block, slot = state.branches.creators(level, starts)
        n_before, n_new = len(state.branches.chains), len(block)
        chains, mask = state.branches.extend(block, slot)
        n_above = np.array([len(chain) for chain in chains], np.int64)
        index = torch.from_numpy(np.stack([block, slot, self._positions(last, n_above)])).to(device)  # [3, S]
        attends = state.cache.attends((last + n_before) * k, n_new * k, torch.from_numpy(mask).to(device))
        embed = self._embed(starts.token[0, :n_new])
        hidden = self._run(state.hidden[index[0], index[1]], embed, index[2], attends, False)
        state.hidden = torch.cat([state.hidden, hidden])
        state.forwards.append(Forward("next", n_new * k, n_new))
        return hidden

    def _embed(self, tokens: Sequence[int] | np.ndarray) -> Tensor:
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.embed_weight.device)
        return self.embed_weight[ids].to(self.net.lm_head.weight)
