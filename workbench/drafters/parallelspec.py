"""ParallelSpec (arXiv:2410.05589): K tokens in one pass, by one real row and K - 1 learned mask rows.

One forward a step. The queued pairs run as real rows (`fc` of the features at index i, embedding of the token at
i + 1, RoPE i, plain causal) and leave one K/V row each in the cache. Behind the last pair i stand its mask rows
(`mask_stream`, `mask_embed`, RoPE i + j, j = 1..K-1): mask row j sees every real row up to i and mask rows 1..j. In
this order the whole visibility rule is the causal one. Mask rows are never kept: the next pairs overwrite them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.drafters.along import ParallelText, TextDraft
from workbench.drafters.base import DraftState, Forward, offer, top_logits
from workbench.drafters.cache import RowCache, causal_tail
from workbench.drafters.nets import ParallelSpecNet
from workbench.drafters.packing import pack
from workbench.errors import InputError
from workbench.tree import Expansion, Starts


@dataclass
class ParallelSpecState(DraftState):
    """One request: a cache row per committed pair, and the pairs that have not run yet."""

    cache: RowCache = field(kw_only=True)  # rows of pairs in [0, n_pairs); what lies behind is scratch
    n_pairs: int = 0  # pairs whose rows are in the cache
    features: list[Tensor] = field(default_factory=list)  # queued, [n, 3H] each
    tokens: list[int] = field(default_factory=list)  # queued
    hidden: Tensor | None = None  # [K, H] of the last pair's group, before the final norm


class ParallelSpecDrafter:
    """K candidates' slots from one forward: slot 0 is the last real row's prediction, slot j that of mask row j."""

    kind = "parallelspec"
    n_levels = 1
    has_tiers = False

    def __init__(
        self,
        net: ParallelSpecNet,
        embed_weight: Tensor,  # [V, H] of the target
        target_ids: Tensor | None = None,  # [V_d] target id of each draft id; None: the same ids
        name: str = "parallelspec",
        weights_hash: str = "none",
    ) -> None:
        self.net, self.embed_weight = net.eval().requires_grad_(False), embed_weight
        self.target_ids, self.name, self.weights_hash = target_ids, name, weights_hash
        self.n_slots = net.config.n_slots
        self.max_width = net.config.draft_vocab_size
        self.repack()

    def repack(self) -> None:
        """Take over the weights of `net`; to be called after every change of them."""
        self._fast = pack(self.net)

    def open(self, prompt_ids: list[int], capacity: int) -> ParallelSpecState:
        """An empty cache for `capacity` committed pairs."""
        c = self.net.config
        n_rows = capacity + c.n_slots - 1
        return ParallelSpecState(cache=RowCache(1, c.n_kv_heads, c.head_dim, n_rows, self.net.fc.weight))

    def observe(self, state: DraftState, features: Tensor, final: Tensor, tokens: list[int]) -> None:
        """Queue the pairs; their rows run with the next draft."""
        assert isinstance(state, ParallelSpecState)
        state.features.append(features)
        state.tokens.extend(tokens)

    @torch.inference_mode()
    def expand(self, state: DraftState, level: int, starts: Starts, width: int) -> Expansion:
        """Level 0: candidates [1, 1, K, width] at the last committed pair."""
        assert isinstance(state, ParallelSpecState)
        if level != 0:
            raise InputError(f"{self.name} drafts one level only, but the plan asks for level {level}")
        if state.tokens:
            self._run(state)
        if state.hidden is None:
            raise ValueError("no pair was observed yet, so there is nothing to draft from")
        return self._offer(state.hidden[None], width)

    @torch.inference_mode()
    def along(self, features: Tensor, final: Tensor, tokens: list[int]) -> TextDraft:
        """Draft at many positions of a text whose n pairs are given: features [n, 3H], final hidden, tokens."""
        return ParallelText(self, features, tokens)

    def _offer(self, hidden: Tensor, width: int) -> Expansion:
        """Candidates [1, R, K, width] of hidden states [R, K, H]."""
        logits = self._fast.lm_head(self._fast.norm(hidden))  # [R, K, V_d]
        return offer(logits, top_logits(logits, width), width, self.target_ids, None)

    def _run(self, state: ParallelSpecState) -> None:
        """The one forward of a step: queued pairs, then the mask rows of the last of them."""
        net, like, n_new = self._fast, self.net.fc.weight, len(state.tokens)
        ids = torch.tensor(state.tokens, device=self.embed_weight.device)
        stream = torch.cat([net.fc(torch.cat(state.features).to(like)), net.mask_stream])  # [n + K - 1, H]
        embed = torch.cat([self.embed_weight[ids].to(like), net.mask_embed])
        n_rows = len(stream)
        position = torch.arange(state.n_pairs, state.n_pairs + n_rows, device=like.device)
        tail = causal_tail(n_rows, like.device) if state.n_pairs else None  # the first forward is causal by itself
        (attend,) = state.cache.attends(state.n_pairs, n_rows, tail)
        hidden = net(stream[None], embed[None], position[None], attend)[0]
        state.hidden = hidden[n_new - 1 :].clone()  # the last real row and its mask rows
        state.n_pairs += n_new
        state.features, state.tokens = [], []
        state.forwards.append(Forward(kind="first", n_rows=n_rows, n_starts=1))
