"""Drafting at many positions of a committed text at once, for recording: the same numbers as live drafting, in batches.

A drafter's `along(features, final, tokens)` runs a text's pairs once and gives a `TextDraft`; its `at(last)` is a
source of expansions for T positions, `last` the index of the last committed pair at each, with the call `grow` makes:
`expand(level, starts, width)`. Level 0 is one causal forward over all pairs; a later level is one forward over all
starts of the T positions, each seeing the pairs before its own position, its branch and itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from workbench.drafters.cache import RowCache, causal_tail
from workbench.drafters.nets import Attend
from workbench.tree import Expansion, Starts

N_CHUNK_ROWS = 1024  # most rows of a forward over pairs
N_OFFER_ROWS = 256  # most rows whose logits are held at once

Expand = Callable[[int, Starts, int], Expansion]


class TextDraft(Protocol):
    """A drafter on one committed text."""

    def at(self, last: np.ndarray) -> Expand:
        """A source of expansions at T positions; `last` int64 [T] is the last committed pair at each."""
        ...


def offer_many(offer: Callable[[Tensor, int], Expansion], hidden: Tensor, width: int, n_starts: int) -> Expansion:
    """Candidates [T, S, K, W] of hidden states [T * S, K, H], a few rows at a time by a drafter's own `offer`."""
    n_chunk = max(1, N_OFFER_ROWS // hidden.shape[1])
    parts = [offer(hidden[begin : begin + n_chunk], width) for begin in range(0, len(hidden), n_chunk)]

    def joined(name: str) -> np.ndarray:
        whole = np.concatenate([getattr(part, name)[0] for part in parts])
        return whole.reshape(-1, n_starts, *whole.shape[1:])

    return Expansion(joined("token"), joined("logp"), joined("tier"))


# ------------------------------------------------------------------------------------------------ attention


@lru_cache
def has_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's fused CPU attention, which also gives the log-sum-exp, works here (tried, not guessed)."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64):
        return False
    try:
        one = torch.zeros(1, 1, 1, 8, dtype=dtype)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(one, one, one)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def attend_prefix(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [h, L, d] to all rows k, v [h, C, d] -> output [h, L, d], log-sum-exp [h, L]."""
    if has_fused(q.device, q.dtype):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[None], k[None], v[None])[:2]
        return out[0], lse[0]
    score = (q @ k.transpose(-1, -2)).to(_wide(q)) * q.shape[-1] ** -0.5
    lse = score.logsumexp(-1)
    return (score - lse[..., None]).exp().to(q.dtype) @ v, lse


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attend_groups(
    q: Tensor,  # [T, h_kv, S, g, K, d]: g query heads a key head, S groups of K rows at each of T positions
    n_context: list[int],  # of each position, how many of the shared rows it sees
    k_context: Tensor,  # [h_kv, C, d] rows of the text's pairs
    v_context: Tensor,
    k_own: Tensor,  # [T, h_kv, S, O, d] rows of the group's branch and of itself
    v_own: Tensor,
    own_mask: Tensor,  # bool [T, S, K, O]; True = visible
) -> Tensor:
    """Softmax over the shared rows a position sees and a group's own together -> [T, h_kv, S, g, K, d]."""
    n_t, n_kv, n_s, n_g, n_k, d = q.shape
    flat = q.reshape(n_t, n_kv, n_s * n_g * n_k, d)
    out, lse = torch.zeros_like(flat), torch.full(flat.shape[:-1], float("-inf"), dtype=_wide(q), device=q.device)
    for t, n in enumerate(n_context):
        if n:
            out[t], lse[t] = attend_prefix(flat[t], k_context[:, :n], v_context[:, :n])
    score = (q.reshape(n_t, n_kv, n_s, n_g * n_k, d) @ k_own.transpose(-1, -2)).to(_wide(q)) * d**-0.5
    score = score.view(n_t, n_kv, n_s, n_g, n_k, -1).masked_fill(~own_mask[:, None, :, None], float("-inf"))
    lse = lse.view(n_t, n_kv, n_s, n_g, n_k)
    whole = torch.logaddexp(lse, score.logsumexp(-1))  # every row sees itself: finite
    share = (lse - whole).exp().to(q.dtype)
    weight = (score - whole[..., None]).exp().to(q.dtype)
    own = weight.view(n_t, n_kv, n_s, n_g * n_k, -1) @ v_own
    return out.view(q.shape) * share[..., None] + own.view(q.shape)


class GroupRows:
    """S groups of K new rows at each of T positions, laid out as the networks want them and back."""

    def __init__(self, n_positions: int, n_groups: int, n_rows: int, n_kv_heads: int) -> None:
        self.shape, self.n_kv = (n_positions, n_groups, n_rows), n_kv_heads

    def queries(self, q: Tensor) -> Tensor:
        """[1, h, T * S * K, d] -> [T, h_kv, S, g, K, d]."""
        return q.view(self.n_kv, -1, *self.shape, q.shape[-1]).permute(2, 0, 3, 1, 4, 5)

    def rows(self, x: Tensor) -> Tensor:
        """Keys or values [1, h_kv, T * S * K, d] -> [T, S, K, h_kv, d]."""
        return x.view(self.n_kv, *self.shape, x.shape[-1]).permute(1, 2, 3, 0, 4)

    def back(self, out: Tensor) -> Tensor:
        """[T, h_kv, S, g, K, d] -> [1, h, T * S * K, d]."""
        return out.permute(1, 3, 0, 2, 4, 5).reshape(1, -1, int(np.prod(self.shape)), out.shape[-1])


# ------------------------------------------------------------------------------------------------ a text's pairs


def run_pairs(run: Callable[[slice, list[Attend]], Tensor], cache: RowCache, n_pairs: int, n_slots: int) -> Tensor:
    """Every pair's rows in causal order into the cache -> hidden [n, K, H]; `run(pairs, attends)` runs some of them."""
    n_chunk, hidden = max(1, N_CHUNK_ROWS // n_slots), []
    for begin in range(0, n_pairs, n_chunk):
        n_new = (min(begin + n_chunk, n_pairs) - begin) * n_slots
        attends = cache.attends(begin * n_slots, n_new, causal_tail(n_new, cache.keys[0].device))
        hidden.append(run(slice(begin, min(begin + n_chunk, n_pairs)), attends))
    return torch.cat(hidden)


class BranchingText:
    """SpecBlock or EAGLE-3 on one text: all pairs' first blocks."""

    def __init__(self, drafter: Any, features: Tensor, tokens: list[int]) -> None:
        self.drafter, self.n_slots = drafter, drafter.n_slots
        config, weight = drafter.net.config, drafter.net.lm_head.weight
        self.n_kv_heads = config.n_kv_heads
        n_rows = len(tokens) * self.n_slots
        self.cache = RowCache(config.n_layers, config.n_kv_heads, config.head_dim, n_rows, weight)
        features, embed = features.to(weight), drafter._embed(tokens)
        position = torch.arange(len(tokens), device=weight.device)

        def run(pairs: slice, attends: list[Attend]) -> Tensor:
            return drafter._run(features[pairs], embed[pairs], position[pairs], attends, True)

        self.hidden = run_pairs(run, self.cache, len(tokens), self.n_slots)  # [n, K, H]

    def at(self, last: np.ndarray) -> Expand:
        """Expansions at T positions, level by level."""
        return BranchingRows(self, last).expand


class BranchingRows:
    """Blocks grown at T positions of a text, numbered alike at each; block 0 is the last pair's own.

    chain: int64 [T, B, D, 2], of each block its ancestors (block, slots visible), padded with (0, 0).
    """

    def __init__(self, text: BranchingText, last: np.ndarray) -> None:
        self.text, self.last = text, np.asarray(last, np.int64)
        device = text.hidden.device
        self.index = torch.from_numpy(self.last).to(device)
        self.position = torch.arange(len(last), device=device)
        own = self.index[:, None] * text.n_slots + torch.arange(text.n_slots, device=device)  # [T, K]
        cache = text.cache
        self.keys = [keys[0, :, own].permute(1, 2, 0, 3)[:, None] for keys in cache.keys]  # [T, B, K, h_kv, d]
        self.values = [values[0, :, own].permute(1, 2, 0, 3)[:, None] for values in cache.values]
        self.hidden = text.hidden[self.index][:, None]  # [T, B, K, H]
        self.firsts = [0]
        self.chain = np.zeros((len(last), 1, 0, 2), np.int64)

    @torch.inference_mode()
    def expand(self, level: int, starts: Starts, width: int) -> Expansion:
        """Candidates [T, S, K, width]; what stands in padded columns is meaningless."""
        hidden = self.hidden if level == 0 else self._next(level, starts)
        n_starts = hidden.shape[1]
        return offer_many(self.text.drafter._offer, hidden.flatten(0, 1), width, n_starts)

    def _next(self, level: int, starts: Starts) -> Tensor:
        """One block under every start of every position, in one forward -> hidden [T, S, K, H]."""
        if level != len(self.firsts):
            raise ValueError(f"level {level} was asked for after {len(self.firsts)} levels; they come in order")
        drafter, (n_t, n_s) = self.text.drafter, starts.node.shape
        creator = np.maximum(starts.level, 0)
        block = np.asarray(self.firsts)[creator] + np.maximum(starts.start, 0)  # [T, S]
        slot = np.maximum(starts.slot, 0).astype(np.int64)
        chain = self._chains(block, slot)
        position = drafter._positions(self.last[:, None], (chain[..., 1] > 0).sum(-1))  # [T, S]
        index = torch.from_numpy(np.stack([block, slot, position])).to(self.index.device)
        condition = self.hidden[self.position[:, None], index[0], index[1]].flatten(0, 1)
        embed = drafter._embed(np.maximum(starts.token, 0).ravel())
        attends = self._attends(torch.from_numpy(chain).to(self.index.device))
        hidden = drafter._run(condition, embed, index[2].flatten(), attends, False)
        hidden = hidden.unflatten(0, (n_t, n_s))
        self.firsts.append(self.hidden.shape[1])
        self.hidden = torch.cat([self.hidden, hidden], 1)
        padded = np.pad(self.chain, ((0, 0), (0, 0), (0, 1), (0, 0)))
        self.chain = np.concatenate([padded, chain], axis=1)
        return hidden

    def _chains(self, block: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """Chains of new blocks under (block, slot) [T, S] -> [T, S, D + 1, 2]."""
        above = self.chain[np.arange(len(block))[:, None], block]  # [T, S, D, 2]
        return np.concatenate([above, np.stack([block, slot + 1], -1)[:, :, None]], axis=2)

    def _attends(self, chain: Tensor) -> list[Attend]:
        """A function a layer: shared rows of earlier pairs, visible slots of the branch, own slots up to each."""
        n_t, n_s, n_above, _ = chain.shape
        k = self.text.n_slots
        above = torch.arange(k, device=chain.device) < chain[..., 1:]  # [T, S, D, K]
        above = above.view(n_t, n_s, 1, n_above * k).expand(-1, -1, k, -1)
        own = torch.ones(k, k, dtype=torch.bool, device=chain.device).tril().expand(n_t, n_s, -1, -1)
        mask = torch.cat([above, own], -1)  # [T, S, K, (D + 1) * K]
        rows = GroupRows(n_t, n_s, k, self.text.n_kv_heads)
        return [self._attend(layer, chain[..., 0], mask, rows) for layer in range(len(self.keys))]

    def _attend(self, layer: int, blocks: Tensor, mask: Tensor, rows: GroupRows) -> Attend:
        n_context = (self.last * self.text.n_slots).tolist()
        cache = self.text.cache

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = []
            for bank, new in ((self.keys, rows.rows(k)), (self.values, rows.rows(v))):
                above = bank[layer][self.position[:, None, None], blocks].flatten(2, 3)  # [T, S, D * K, h_kv, d]
                own.append(torch.cat([above, new], 2).permute(0, 3, 1, 2, 4).contiguous())
                bank[layer] = torch.cat([bank[layer], new], 1)
            context = cache.keys[layer][0], cache.values[layer][0]
            return rows.back(attend_groups(rows.queries(q), n_context, *context, own[0], own[1], mask))

        return attend


class ParallelText:
    """ParallelSpec on one text: all pairs' real rows."""

    def __init__(self, drafter: Any, features: Tensor, tokens: list[int]) -> None:
        self.drafter, self.net = drafter, drafter._fast
        config, weight = drafter.net.config, drafter.net.fc.weight
        self.n_masks, self.n_kv_heads = config.n_slots - 1, config.n_kv_heads
        self.cache = RowCache(1, config.n_kv_heads, config.head_dim, len(tokens), weight)
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=drafter.embed_weight.device)
        stream, embed = self.net.fc(features.to(weight)), drafter.embed_weight[ids].to(weight)
        position = torch.arange(len(tokens), device=weight.device)

        def run(pairs: slice, attends: list[Attend]) -> Tensor:
            return self.net(stream[None, pairs], embed[None, pairs], position[None, pairs], attends[0])[0, :, None]

        self.hidden = run_pairs(run, self.cache, len(tokens), 1)  # [n, 1, H]

    def at(self, last: np.ndarray) -> Expand:
        """Expansions at T positions; there is but level 0."""

        @torch.inference_mode()
        def expand(level: int, starts: Starts, width: int) -> Expansion:
            real = self.hidden[torch.as_tensor(last, device=self.hidden.device)]
            hidden = torch.cat([real, self._masks(last)], 1) if self.n_masks else real
            return offer_many(self.drafter._offer, hidden, width, 1)

        return expand

    def _masks(self, last: np.ndarray) -> Tensor:
        """The mask rows behind each position's last pair -> hidden [T, K - 1, H]."""
        n_t, n, net, device = len(last), self.n_masks, self.net, self.hidden.device
        rows = GroupRows(n_t, 1, n, self.n_kv_heads)
        mask = torch.ones(n, n, dtype=torch.bool, device=device).tril().expand(n_t, 1, -1, -1)
        n_context = (np.asarray(last) + 1).tolist()
        context = self.cache.keys[0][0], self.cache.values[0][0]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = [rows.rows(x).permute(0, 3, 1, 2, 4).contiguous() for x in (k, v)]
            return rows.back(attend_groups(rows.queries(q), n_context, *context, own[0], own[1], mask))

        position = torch.as_tensor(last, device=device)[:, None] + torch.arange(1, n + 1, device=device)
        stream, embed = net.mask_stream.repeat(n_t, 1), net.mask_embed.repeat(n_t, 1)
        return net(stream[None], embed[None], position.flatten()[None], attend)[0].unflatten(0, (n_t, n))


class HeadsText:
    """Medusa on one text: its heads look at the last pair's final hidden state alone."""

    def __init__(self, drafter: Any, final: Tensor) -> None:
        self.drafter, self.final = drafter, final.to(drafter.weight.device, drafter.weight.dtype)

    def at(self, last: np.ndarray) -> Expand:
        """Expansions at T positions; there is but level 0."""

        @torch.inference_mode()
        def expand(level: int, starts: Starts, width: int) -> Expansion:
            rows = self.final[torch.as_tensor(last, device=self.final.device)]  # [T, H]
            return offer_many(lambda x, w: self.drafter._offer(x[:, 0], w), rows[:, None], width, 1)

        return expand
