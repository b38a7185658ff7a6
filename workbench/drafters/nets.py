"""The four drafter networks, with the tensor names of the published checkpoints.

Shared by drafting and training. A network decides nothing: it maps streams to hidden states, and the caller says what
each row may attend to by passing an `attend` function per layer. Sources: SpecBlock arXiv:2605.07243, EAGLE-3
arXiv:2503.01840, Medusa arXiv:2401.10774, ParallelSpec arXiv:2410.05589.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_RANK_TIERS = 4
N_RANK_FEATURES = 15  # 10 log-probs, 3 logit gaps, top-1 probability, entropy
RANK_TOP = 20  # the log-probs and the entropy are normalised over this many best logits
RANK_HIDDEN = 256


class ColumnsLinear(Protocol):
    """A bias-free linear of a form of its own, which also multiplies by some of its columns alone."""

    def columns(self, x: Tensor, first: int, last: int) -> Tensor:
        """x [..., last - first] times the transpose of weight[:, first:last]."""
        ...


def product(linear: nn.Module, x: Tensor, first: int, last: int) -> Tensor:
    """x [..., last - first] times the transpose of columns first..last of a linear's weight."""
    if isinstance(linear, nn.Linear):
        return F.linear(x, linear.weight[:, first:last])
    return cast(ColumnsLinear, linear).columns(x, first, last)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [..., h, L, d], k [..., h_kv, L, d], v) -> output [..., h, L, d]; q and k carry RoPE already."""


@dataclass(frozen=True)
class NetConfig:
    """Sizes and switches of a drafter network; lengths in elements.

    The three `has_…` switches of SpecBlock are the paper's ablations: without layer shift the hidden state passes
    between layers unchanged; without prefix broadcast only slot 0 sees the condition and the token; without the rank
    head no tier is predicted.
    """

    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int = 0  # 0: as hidden_size
    n_layers: int = 1
    n_slots: int = 4
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    n_ttt_blocks: int = 3
    is_norm_before_residual: bool = False
    has_layer_shift: bool = True
    has_prefix_broadcast: bool = True
    has_rank_head: bool = True

    @property
    def feature_size(self) -> int:
        """Width of the target's three concatenated features."""
        return 3 * (self.target_hidden_size or self.hidden_size)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def rope_table(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., head_dim] of RoPE at integer positions [...]; angles in at least float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=position.device, dtype=wide) / head_dim)
    angle = position.to(wide)[..., None] * inverse
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [..., h, L, d] with tables [..., L, d] (the half-split layout of Llama)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.unsqueeze(-3) + turned * sin.unsqueeze(-3)


def repeat_kv(x: Tensor, n_heads: int) -> Tensor:
    """Share key or value heads [..., h_kv, L, d] among query heads -> [..., h, L, d]."""
    n = n_heads // x.shape[-3]
    return x if n == 1 else x.repeat_interleave(n, dim=-3)


def causal_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention inside the rows given."""
    return F.scaled_dot_product_attention(q, repeat_kv(k, q.shape[-3]), repeat_kv(v, q.shape[-3]), is_causal=True)


def group_attention(
    q: Tensor,  # [B, h, G, Q, d]: G groups of Q query rows
    k_context: Tensor,  # [B, h_kv, C, d] rows that groups share
    v_context: Tensor,
    k_own: Tensor,  # [B, h_kv, G, O, d] rows that belong to one group alone
    v_own: Tensor,
    own_mask: Tensor,  # bool, broadcastable to [B, G, Q, O]; True = visible
    context_mask: Tensor | None = None,  # bool, broadcastable to [B, G, C]; None = all visible
) -> Tensor:
    """Softmax over shared context rows and a group's own rows together -> [B, h, G, Q, d].

    One rule for all drafters: a SpecBlock block sees the committed rows plus its own branch, an EAGLE node the
    committed rows plus its ancestors, a ParallelSpec mask row the real rows plus its own group.
    """
    n_b, n_h, n_g, n_q, d = q.shape
    scale = d**-0.5
    k_c, v_c = repeat_kv(k_context, n_h), repeat_kv(v_context, n_h)
    group = n_h // k_own.shape[1]
    k_o, v_o = k_own.repeat_interleave(group, dim=1), v_own.repeat_interleave(group, dim=1)
    to_context = (q.reshape(n_b, n_h, n_g * n_q, d) @ k_c.transpose(-1, -2)).view(n_b, n_h, n_g, n_q, -1)
    if context_mask is not None:
        to_context = to_context.masked_fill(~context_mask[:, None, :, None, :], float("-inf"))
    to_own = (q @ k_o.transpose(-1, -2)).masked_fill(~own_mask.unsqueeze(1), float("-inf"))
    weight = torch.softmax(torch.cat([to_context, to_own], dim=-1) * scale, dim=-1)
    w_c, w_o = weight.split([k_c.shape[-2], k_o.shape[-2]], dim=-1)
    from_context = w_c.reshape(n_b, n_h, n_g * n_q, -1) @ v_c
    return from_context.view(n_b, n_h, n_g, n_q, d) + w_o @ v_o


class Attention(nn.Module):
    """Grouped-query attention; what a row may see is the caller's `attend`."""

    def __init__(self, config: NetConfig, in_size: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.q_proj = nn.Linear(in_size, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(in_size, config.n_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(in_size, config.n_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [..., L, in], tables [..., L, d] -> [..., L, H]."""
        q = self._heads(self.q_proj(x), self.n_heads)
        k, v = (self._heads(proj(x), self.n_kv_heads) for proj in (self.k_proj, self.v_proj))
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(-2, -3).flatten(-2))

    def _heads(self, x: Tensor, n: int) -> Tensor:
        return x.unflatten(-1, (n, self.head_dim)).transpose(-2, -3)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate, bias=False)
        self.up_proj = nn.Linear(size, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Llama's pre-norm layer."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class InputLayer(nn.Module):
    """SpecBlock's three-way fusion of condition, token and slot query, with prefix broadcast (arXiv:2605.07243)."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_broadcast = config.has_prefix_broadcast
        self.condition_proj = nn.Linear(config.feature_size, size, bias=False)
        self.condition_norm = RMSNorm(size, eps)
        self.token_norm = RMSNorm(size, eps)
        self.position_queries = nn.Embedding(config.n_slots, size)
        self.query_norm = RMSNorm(size, eps)
        self.fuse = nn.Linear(3 * size, size, bias=False)
        nn.init.normal_(self.position_queries.weight, std=0.02)

    def forward(self, condition: Tensor, token_embed: Tensor, is_first: bool) -> Tensor:
        """Condition [..., 3H_target] in the first block, [..., H] later; token_embed [..., H] -> slots [..., K, H].

        Every slot sees the same condition and token and its own query; `fuse` is linear, so the shared part is
        computed once a row and not once a slot.
        """
        condition = self.condition_norm(self.condition_proj(condition) if is_first else condition)
        size = condition.shape[-1]
        prefix = torch.cat([condition, self.token_norm(token_embed)], dim=-1)
        prefix = product(self.fuse, prefix, 0, 2 * size)  # [..., H]
        query = product(self.fuse, self.query_norm(self.position_queries.weight), 2 * size, 3 * size)  # [K, H]
        if not self.is_broadcast:
            first = torch.zeros(query.shape[0], 1, dtype=query.dtype, device=query.device)
            first[0] = 1.0
            return prefix.unsqueeze(-2) * first + query
        return prefix.unsqueeze(-2) + query


def rank_features(logits: Tensor) -> Tensor:
    """The rank head's 15 features of logits [..., V]: 10 log-probs, gaps 1-2, 1-3, 1-5, top probability, entropy.

    Log-probabilities and entropy are normalised over the best 20 logits. Shorter vocabularies are padded.
    """
    top = logits.topk(min(RANK_TOP, logits.shape[-1]), dim=-1).values
    if top.shape[-1] < 10:
        top = F.pad(top, (0, 10 - top.shape[-1]), value=-1e4)
    logp = torch.log_softmax(top, dim=-1)
    p = logp.exp()
    gaps = top[..., :1] - top[..., [1, 2, 4]]
    entropy = -(p * logp).sum(-1, keepdim=True)
    return torch.cat([logp[..., :10], gaps, p[..., :1], entropy], dim=-1)


class SpecBlockNet(nn.Module):
    """One forward yields K dependent slots per row: fusion, decoder layers with the layer-wise shift between them."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.input_layer = InputLayer(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
        if config.has_layer_shift:
            self.shift_proj = nn.ModuleList(nn.Linear(2 * size, size, bias=False) for _ in range(config.n_layers - 1))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.has_rank_head:
            self.rank_head = nn.Sequential(
                nn.Linear(size + N_RANK_FEATURES, RANK_HIDDEN, bias=False),
                nn.SiLU(),
                nn.Linear(RANK_HIDDEN, N_RANK_TIERS, bias=False),
            )

    def forward(
        self, condition: Tensor, token_embed: Tensor, position: Tensor, attends: Sequence[Attend], is_first: bool
    ) -> Tensor:
        """Hidden states before the final norm [B, R, K, H] of one block at R rows.

        condition [B, R, 3H_target or H], token_embed [B, R, H]; position [B, R] is the pair index i of the committed
        row the block grows from (slot k sits at RoPE id i + 1 + k, in every block). `attends[l]` gets q, k, v flattened
        position-major, L = R * K.
        """
        x = self.input_layer(condition, token_embed, is_first)  # [B, R, K, H]
        n_slots = x.shape[-2]
        slot = torch.arange(n_slots, device=position.device)
        ids = (position[..., None] + 1 + slot).flatten(-2)
        cos, sin = rope_table(ids, self.config.head_dim, self.config.rope_theta, x.dtype)
        for i, layer in enumerate(self.layers):
            if i > 0 and self.config.has_layer_shift:
                x = self.shift(x, i - 1)
            x = layer(x.flatten(-3, -2), cos, sin, attends[i]).unflatten(-2, (-1, n_slots))
        return x

    def shift(self, x: Tensor, i: int) -> Tensor:
        """W [h_k ; h_{k-1}] at every slot (slot 0 takes itself), x [..., K, H]."""
        size = x.shape[-1]
        carried = product(self.shift_proj[i], x, size, 2 * size)
        carried = torch.cat([carried[..., :1, :], carried[..., :-1, :]], dim=-2)
        return product(self.shift_proj[i], x, 0, size) + carried

    def rank_logits(self, normed: Tensor, logits: Tensor) -> Tensor:
        """Rank-tier logits [..., 4] from the normed hidden and the draft logits; no gradient reaches the drafter."""
        return self.rank_head(torch.cat([normed.detach(), rank_features(logits.detach())], dim=-1))


class Eagle3Layer(nn.Module):
    """The EAGLE-3 midlayer: attention over [embedding ; stream] of width 2H, residual on the stream."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_norm_before_residual = config.is_norm_before_residual
        self.hidden_norm = RMSNorm(size, eps)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)

    def forward(self, stream: Tensor, token_embed: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(stream)
        residual = normed if self.is_norm_before_residual else stream
        x = torch.cat([self.input_layernorm(token_embed), normed], dim=-1)
        x = residual + self.self_attn(x, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Net(nn.Module):
    """EAGLE-3: `fc` folds the target's features into the stream; the layer's output is recycled before `norm`."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    def forward(self, stream: Tensor, token_embed: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Stream [B, L, H] (`fc` of target features, or recycled hidden), RoPE positions [B, L] -> hidden [B, L, H]."""
        cos, sin = rope_table(position, self.config.head_dim, self.config.rope_theta, stream.dtype)
        return self.midlayer(stream, token_embed, cos, sin, attend)


class ParallelSpecNet(nn.Module):
    """One EAGLE-3-shaped layer that drafts K tokens in one pass: a real row, then K - 1 learned mask rows.

    The real row of pair i predicts the token at i + 2; mask row j (1-based) the token at i + 2 + j, at RoPE i + j.
    """

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.mask_embed = nn.Parameter(torch.empty(config.n_slots - 1, size))
        self.mask_stream = nn.Parameter(torch.empty(config.n_slots - 1, size))
        nn.init.normal_(self.mask_embed, std=0.02)
        nn.init.normal_(self.mask_stream, std=0.02)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def forward(self, stream: Tensor, token_embed: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """As Eagle3Net.forward: rows are real or mask rows as the caller built them."""
        cos, sin = rope_table(position, self.config.head_dim, self.config.rope_theta, stream.dtype)
        return self.midlayer(stream, token_embed, cos, sin, attend)


class ResBlock(nn.Module):
    """Medusa's residual block x + SiLU(Wx + b); zero weights make it x + SiLU(0) = x at the start."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaNet(nn.Module):
    """Medusa heads on the target's final hidden state; head i predicts the token i + 1 places after the root.

    `heads[i]` is its residual blocks and, where the checkpoint has full heads, a last linear to the vocabulary. Without
    one the target's frozen head serves all heads.
    """

    def __init__(self, n_heads: int, n_blocks: int, hidden_size: int, vocab_size: int | None) -> None:
        super().__init__()
        self.n_heads, self.has_full_heads = n_heads, vocab_size is not None
        self.heads = nn.ModuleList()
        for _ in range(n_heads):
            parts: list[nn.Module] = [ResBlock(hidden_size) for _ in range(n_blocks)]
            if vocab_size is not None:
                parts.append(nn.Linear(hidden_size, vocab_size, bias=False))
            self.heads.append(nn.ModuleList(parts))

    def hidden(self, x: Tensor) -> Tensor:
        """Final hidden [..., H] -> each head's residual-block output [..., n_heads, H]."""
        return torch.stack([self._blocks(i, x) for i in range(self.n_heads)], dim=-2)

    def logits(self, x: Tensor, head_weight: Tensor | None = None) -> Tensor:
        """Final hidden [..., H] -> logits [..., n_heads, V] by each head's own linear or the shared `head_weight`."""
        if not self.has_full_heads:
            if head_weight is None:
                raise ValueError("heads without a linear of their own need the target's head_weight")
            return self.hidden(x) @ head_weight.T
        return torch.stack([self._parts(i)[-1](self._blocks(i, x)) for i in range(self.n_heads)], dim=-2)

    def _parts(self, i: int) -> list[nn.Module]:
        return list(self.heads[i].children())

    def _blocks(self, i: int, x: Tensor) -> Tensor:
        for part in self._parts(i)[: -1 if self.has_full_heads else None]:
            x = part(x)
        return x
