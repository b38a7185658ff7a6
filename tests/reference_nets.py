"""Short, slow reference forwards of SpecBlock and EAGLE-3 in float64: no caches, every row computed anew.

Written from the papers and the facts sheets, apart from the code under test. Weights come as a state dict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """What the weights alone do not say."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    theta: float


def sizes_of(config: Any) -> Sizes:
    return Sizes(config.n_heads, config.n_kv_heads, config.head_dim, config.rms_norm_eps, config.rope_theta)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, position: list[int], theta: float) -> Tensor:
    """One head's rows x [L, d], each turned to its position: pairs (j, j + d/2) by position * theta^(-2j/d)."""
    half = x.shape[1] // 2
    out = x.clone()
    for j in range(half):
        angle = torch.tensor(position, dtype=x.dtype) * theta ** (-2 * j / x.shape[1])
        out[:, j] = x[:, j] * angle.cos() - x[:, j + half] * angle.sin()
        out[:, j + half] = x[:, j + half] * angle.cos() + x[:, j] * angle.sin()
    return out


def attention(state: State, name: str, sizes: Sizes, x: Tensor, position: list[int], sees: list[list[int]]) -> Tensor:
    """Rows x [L, in] -> [L, H]; row r attends to the rows sees[r]."""
    d, share = sizes.head_dim, sizes.n_heads // sizes.n_kv_heads
    q, k, v = (x @ state[f"{name}.{p}_proj.weight"].T for p in "qkv")
    out = torch.zeros(len(x), sizes.n_heads * d, dtype=x.dtype)
    for h in range(sizes.n_heads):
        mine, theirs = slice(h * d, (h + 1) * d), slice(h // share * d, (h // share + 1) * d)
        queries, keys = rope(q[:, mine], position, sizes.theta), rope(k[:, theirs], position, sizes.theta)
        for r, seen in enumerate(sees):
            weight = torch.softmax(keys[seen] @ queries[r] / math.sqrt(d), dim=0)
            out[r, mine] = weight @ v[seen][:, theirs]
    return out @ state[f"{name}.o_proj.weight"].T


def swiglu(state: State, name: str, x: Tensor) -> Tensor:
    gate = x @ state[f"{name}.gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ state[f"{name}.up_proj.weight"].T)) @ state[f"{name}.down_proj.weight"].T


# SpecBlock


def specblock_branch(
    state: State, sizes: Sizes, features: Tensor, tokens: list[int], embed: Tensor, branch: list[tuple[int, int]]
) -> list[Tensor]:
    """Hidden states before the final norm: first of all pairs [S * K, H], then of each block of the branch [K, H].

    features [S, 3H], tokens [S]: pair i is (h_i, t_{i+1}). branch: (slot left, token) of each further block at the last
    pair.
    """
    n_slots = state["input_layer.position_queries.weight"].shape[0]
    last = len(tokens) - 1
    rows = [(0, i, k) for i in range(len(tokens)) for k in range(n_slots)]  # (block, pair, slot)
    inputs = [(features[i] @ state["input_layer.condition_proj.weight"].T, tokens[i], k) for _, i, k in rows]
    found: list[Tensor] = []
    for block in range(len(branch) + 1):
        if block:
            slot, token = branch[block - 1]
            condition = found[-1][-n_slots:][slot]  # of the block before, at the slot left
            rows += [(block, last, k) for k in range(n_slots)]
            inputs += [(condition, token, k) for k in range(n_slots)]
        cuts = [slot for slot, _ in branch]
        sees = [[s for s, key in enumerate(rows) if _sees(row, key, last, cuts)] for row in rows]
        x = torch.stack([_fused(state, sizes, embed, *one) for one in inputs])
        hidden = _specblock_layers(state, sizes, x, [i + 1 + k for _, i, k in rows], sees, n_slots)
        found.append(hidden if block == 0 else hidden[-n_slots:])
    return found


def _sees(row: tuple[int, int, int], key: tuple[int, int, int], last: int, cuts: list[int]) -> bool:
    (block, pair, slot), (key_block, key_pair, key_slot) = row, key
    if block == 0:
        return key_block == 0 and (key_pair < pair or (key_pair == pair and key_slot <= slot))
    if key_block == 0 and key_pair < last:
        return True
    return key_slot <= (slot if key_block == block else cuts[key_block]) if key_block <= block else False


def _fused(state: State, sizes: Sizes, embed: Tensor, condition: Tensor, token: int, slot: int) -> Tensor:
    parts = (
        rms(condition, state["input_layer.condition_norm.weight"], sizes.eps),
        rms(embed[token], state["input_layer.token_norm.weight"], sizes.eps),
        rms(state["input_layer.position_queries.weight"][slot], state["input_layer.query_norm.weight"], sizes.eps),
    )
    if slot and state.get("no_broadcast") is not None:
        parts = (torch.zeros_like(parts[0]), torch.zeros_like(parts[1]), parts[2])
    return torch.cat(parts) @ state["input_layer.fuse.weight"].T


def _specblock_layers(
    state: State, sizes: Sizes, x: Tensor, position: list[int], sees: list[list[int]], n_slots: int
) -> Tensor:
    n_layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    for layer in range(n_layers):
        if layer and "shift_proj.0.weight" in state:
            before = [r if r % n_slots == 0 else r - 1 for r in range(len(x))]
            x = torch.cat([x, x[before]], dim=-1) @ state[f"shift_proj.{layer - 1}.weight"].T
        name = f"layers.{layer}"
        normed = rms(x, state[f"{name}.input_layernorm.weight"], sizes.eps)
        x = x + attention(state, f"{name}.self_attn", sizes, normed, position, sees)
        x = x + swiglu(state, f"{name}.mlp", rms(x, state[f"{name}.post_attention_layernorm.weight"], sizes.eps))
    return x


def logits_of(state: State, sizes: Sizes, hidden: Tensor) -> Tensor:
    return rms(hidden, state["norm.weight"], sizes.eps) @ state["lm_head.weight"].T


def rank_logits_of(state: State, sizes: Sizes, hidden: Tensor) -> Tensor:
    """Rank-tier logits [..., 4] of hidden [..., H]; features of the top 20: 10 log-probs, 3 gaps, first p, entropy."""
    top = logits_of(state, sizes, hidden).sort(dim=-1, descending=True).values[..., :20]
    p = torch.exp(top - torch.logsumexp(top, -1, keepdim=True))
    gaps = torch.stack([top[..., 0] - top[..., j] for j in (1, 2, 4)], dim=-1)
    entropy = -(p * p.log()).sum(-1, keepdim=True)
    features = torch.cat([p.log()[..., :10], gaps, p[..., :1], entropy], dim=-1)
    x = torch.cat([rms(hidden, state["norm.weight"], sizes.eps), features], dim=-1) @ state["rank_head.0.weight"].T
    return (x * torch.sigmoid(x)) @ state["rank_head.2.weight"].T


# EAGLE-3


def eagle3_path(
    state: State,
    sizes: Sizes,
    features: Tensor,
    tokens: list[int],
    embed: Tensor,
    path: list[int],
    is_norm_before_residual: bool = False,
) -> Tensor:
    """Layer outputs [S + len(path), H]: pairs (h_i, t_{i+1}) on `fc` of features [S, 3H], then the path's tokens.

    Each token of the path runs on the output of the row before it. Every row sees itself and all rows before it.
    """
    streams = list(features @ state["fc.weight"].T)
    words = [*tokens, *path]
    while True:
        stream = torch.stack(streams)
        normed = rms(stream, state["midlayer.hidden_norm.weight"], sizes.eps)
        word = rms(embed[words[: len(streams)]], state["midlayer.input_layernorm.weight"], sizes.eps)
        position = list(range(len(streams)))
        sees = [list(range(r + 1)) for r in position]
        x = attention(state, "midlayer.self_attn", sizes, torch.cat([word, normed], -1), position, sees)
        x = x + (normed if is_norm_before_residual else stream)
        weight = state["midlayer.post_attention_layernorm.weight"]
        x = x + swiglu(state, "midlayer.mlp", rms(x, weight, sizes.eps))
        if len(streams) == len(words):
            return x
        streams.append(x[-1])


# Candidates


def candidates_of(logits: Tensor, draft_ids: list[int], width: int) -> list[tuple[int, int]]:
    """The best (target token, log-probability in steps of 1/1024 nat) of one row of logits, in the design's order."""
    logp = logits.double() - torch.logsumexp(logits.double(), dim=-1)
    scored = [(-round(float(p) * 1024), token) for p, token in zip(logp, draft_ids)]
    return [(token, -minus) for minus, token in sorted(scored)[:width]]
