"""Keys and values of committed pairs, and behind them those of the tree being grown, one buffer a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.drafters.nets import Attend

FEW_ROWS = 64  # up to here plain products beat the fused kernel (measured on two CPU cores)


def attend_tail(q: Tensor, k: Tensor, v: Tensor, tail: Tensor | None) -> Tensor:
    """Softmax attention of q [1, h, L, d] over rows k, v [1, h_kv, R, d] -> [1, h, L, d].

    tail bool [L, R']: what each query sees of the last R' rows; it sees all before them. None: it sees all. The query
    heads that share a key head are folded into rows, so that the cache is never copied.
    """
    (_, n_h, n_q, d), (_, n_kv, n_rows, _) = q.shape, k.shape
    if n_q > FEW_ROWS:
        mask = torch.zeros(n_q, n_rows, dtype=q.dtype, device=q.device)
        if tail is not None:
            mask[:, n_rows - tail.shape[1] :].masked_fill_(~tail, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=n_h != n_kv)
    folded = (q * d**-0.5).reshape(1, n_kv, -1, d)  # [1, h_kv, group * L, d]
    score = (folded @ k.transpose(-1, -2)).view(1, n_kv, -1, n_q, n_rows)
    if tail is not None:
        score[..., n_rows - tail.shape[1] :].masked_fill_(~tail, float("-inf"))
    weight = torch.softmax(score, dim=-1).view(1, n_kv, -1, n_rows)
    return (weight @ v).view(1, n_h, n_q, d)


def causal_tail(n_new: int, device: torch.device) -> Tensor | None:
    """What `n_new` rows in sequence see of themselves; None for a single row."""
    return torch.ones(n_new, n_new, dtype=torch.bool, device=device).tril() if n_new > 1 else None


class RowCache:
    """A preallocated buffer of post-RoPE keys and values a layer, written in place; it grows only past `n_rows`."""

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, n_rows: int, like: Tensor) -> None:
        shape = (1, n_kv_heads, n_rows, head_dim)
        self.keys = [like.new_empty(shape) for _ in range(n_layers)]
        self.values = [like.new_empty(shape) for _ in range(n_layers)]

    def attends(self, start: int, n_new: int, tail: Tensor | None) -> list[Attend]:
        """A function a layer that stores `n_new` rows at `start` and attends to every row up to them, by `tail`."""
        self._reserve(start + n_new)
        return [self._attend(layer, slice(start, start + n_new), tail) for layer in range(len(self.keys))]

    def _attend(self, layer: int, new: slice, tail: Tensor | None) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[:, :, new], values[:, :, new] = k, v
            if new.start == 0:  # nothing before: plain causal, which has the fastest kernel
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return attend_tail(q, keys[:, :, : new.stop], values[:, :, : new.stop], tail)

        return attend

    def _reserve(self, n_rows: int) -> None:
        if n_rows <= self.keys[0].shape[2]:
            return
        for rows in (self.keys, self.values):
            for layer, old in enumerate(rows):
                rows[layer] = old.new_empty((1, old.shape[1], 2 * n_rows, old.shape[3]))
                rows[layer][:, :, : old.shape[2]] = old
