"""Many prompts decoded side by side, for text in bulk: writing a corpus, not verifying drafts.

Prompts are left-padded and advance in lockstep; what a row says hangs on its own prompt and draws alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.network import Network

PREFILL_ROWS = 8192  # rows of one forward over prompts


class Lockstep:
    """Left-padded prompts decoded in lockstep; keys and values lie in one slab, allocated once, written in place.

    Letters: B rows (prompts still running), L new columns, C columns of the slab.
    """

    def __init__(self, network: Network, prompts: Sequence[Sequence[int]], n_new: int) -> None:
        self.network, self.length = network, 0
        device, width = network.device, max(map(len, prompts))
        pad = [width - len(prompt) for prompt in prompts]
        self.ids = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(pad, prompts)], device=device)  # [B, C']
        self.pad = torch.tensor(pad, device=device)  # [B]
        self.is_real = torch.arange(width + n_new, device=device) >= self.pad[:, None]  # [B, C]
        shape = (len(network.layers), 2, len(prompts), network.n_kv, width + n_new, network.head_dim)
        self.slab = torch.empty(shape, dtype=network.dtype, device=device)

    def prefill(self) -> Tensor:
        """Run the prompts a few columns at a time -> final hidden state of the last column [B, H]."""
        n_columns = max(1, PREFILL_ROWS // len(self.pad))
        return [self.forward(ids) for ids in self.ids.split(n_columns, dim=1)][-1]

    def forward(self, ids: Tensor) -> Tensor:
        """Run new columns `ids` [B, L] -> final hidden state of the last one [B, H]."""
        network, (n_b, n_new) = self.network, ids.shape
        end = self.length + n_new
        index = torch.arange(self.length, end, device=ids.device)
        position = (index - self.pad[:, None]).clamp(min=0)
        cos, sin = (table[position.flatten()] for table in network.rotary(end))  # each [B * L, 1, d]
        mask = self._mask(index, end)
        x = F.embedding(ids.flatten(), network.embed_weight)  # [B * L, H]
        for layer, (keys, values) in zip(network.layers, self.slab):
            rows = network.project(layer, x, cos, sin)
            x = layer.feed(layer.out.plus(self._attend(rows, keys[:n_b], values[:n_b], mask), x))
        self.length = end
        return network.norm(x.view(n_b, n_new, -1)[:, -1])

    def _mask(self, index: Tensor, end: int) -> Tensor:
        """bool [B, 1, L, end]: real columns up to a row's own; padding sees itself, to stay finite."""
        column = torch.arange(end, device=index.device)
        is_seen = (column <= index[:, None]) & self.is_real[:, None, :end]
        return (is_seen | (column == index[:, None]))[:, None]

    def _attend(self, rows: Sequence[Tensor], keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention [B * L, heads * d] of the new columns, by their q, k, v [B * L, h, d].

        Keys and values go into [B, h_kv, C, d].
        """
        network, (n_b, _, n_new, end) = self.network, mask.shape
        q, k, v = (x.view(n_b, n_new, -1, network.head_dim).transpose(1, 2) for x in rows)
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        k, v = keys[:, :, :end], values[:, :, :end]
        if n_new == 1:  # the query heads of a group become its rows: keys and values are read once
            q = q.reshape(n_b, network.n_kv, -1, network.head_dim)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(n_b, -1)
        is_grouped = network.n_heads != network.n_kv
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)
        return mixed.transpose(1, 2).reshape(n_b * n_new, -1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, moved to the front of the slab."""
        for part in self.slab.flatten(0, 1):
            part[: len(rows), :, : self.length] = part[rows, :, : self.length]
        self.pad, self.is_real = self.pad[rows], self.is_real[rows]


class Picker:
    """The next token of every running row: greedy at temperature 0, else sampled by inverting the distribution.

    Each step draws one uniform number for every prompt, running or not, so that a row's text does not hang on when
    others end. (Corpus text is never replayed; it needs no noise keyed to the position.)
    """

    def __init__(self, temperature: np.ndarray, rng: np.random.Generator, top_k: int = 0) -> None:
        self.temperature, self.rng, self.top_k = torch.from_numpy(temperature), rng, top_k

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Tokens [R] for logits [R, V] of the prompts `rows` [R], int64 on the CPU as is `rows`."""
        draw = torch.from_numpy(self.rng.random(len(self.temperature)))[rows]
        temperature, token = self.temperature[rows], logits.argmax(-1).cpu()
        hot = (temperature > 0).nonzero().flatten()
        if len(hot):
            scores = logits[hot.to(logits.device)].double() / temperature[hot, None].to(logits.device)
            token[hot] = sampled(scores, draw[hot].to(logits.device), self.top_k).cpu()
        return token


def sampled(scores: Tensor, draw: Tensor, top_k: int = 0) -> Tensor:
    """Tokens [R] where the cumulative probability of scores [R, V] passes draw [R] in [0, 1); best `top_k` only."""
    if 0 < top_k < scores.shape[-1]:
        scores, ids = scores.topk(top_k, dim=-1)
        return ids.gather(-1, sampled(scores, draw)[:, None])[:, 0]
    cumulative = torch.softmax(scores, -1).cumsum(-1)
    place = torch.searchsorted(cumulative, draw[:, None] * cumulative[:, -1:], right=True)
    return place[:, 0].clamp(max=scores.shape[-1] - 1)


@torch.inference_mode()
def generate(
    network: Network,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    stop_ids: Sequence[int],
    pick: Callable[[Tensor, Tensor], Tensor],
) -> list[list[int]]:
    """The continuation of every prompt: to its first stop id, which is kept, or `n_new` tokens."""
    if not prompts:
        return []
    texts: list[list[int]] = [[] for _ in prompts]
    stops, running = set(stop_ids), torch.arange(len(prompts))  # the prompt of every row
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    rows = Lockstep(network, prompts, n_new)
    final = rows.prefill()
    for step in range(n_new):
        token = pick(network.logits(final), running)
        for i, (prompt, t) in enumerate(zip(running.tolist(), token.tolist())):
            if not is_done[i]:
                texts[prompt].append(t)
                is_done[i] = t in stops
        if step == n_new - 1 or bool(is_done.all()):
            break
        if int(is_done.sum()) * 8 >= len(is_done):  # an eighth has ended: the others close up
            going = (~is_done).nonzero().flatten()
            rows.keep(going.to(network.device))
            running, token, is_done = running[going], token[going], is_done[going]
        final = rows.forward(token[:, None].to(network.device))
    return texts
