"""The target's forward pass, lean: the weights of a Hugging Face Llama, Qwen2 or Qwen3 model, our own loop and cache.

One forward takes M rows that follow L cached ones. Rows may be a chunk of a prompt, the root, or the root and a draft
tree under its ancestor mask: only the positions and the mask differ. The cache is allocated once; rows are written
where they stand and accepted rows are moved to the front in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.errors import InputError
from workbench.linear import PackedLinear

FOLD_ROWS = 32  # up to here, query heads of one group are folded into rows: keys and values are read once per group


class Norm:
    """RMS norm over the last axis: in float64 for float64, else in float32, as the model's own does for its dtypes."""

    def __init__(self, module: Any):
        self.weight: Tensor = module.weight.detach()
        self.eps: float = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()  # half precision: rounded once before the gain, the order of the published models
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Layer:
    """One decoder layer's weights, packed for few rows."""

    def __init__(self, module: Any, is_consumed: bool):
        attention, mlp = module.self_attn, module.mlp
        self.input_norm, self.post_norm = Norm(module.input_layernorm), Norm(module.post_attention_layernorm)
        self.q_norm = Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.qkv = _pack([attention.q_proj, attention.k_proj, attention.v_proj], is_consumed)
        self.out = _pack([attention.o_proj], is_consumed)
        self.gate = _pack([mlp.gate_proj], is_consumed)
        self.up = _pack([mlp.up_proj], is_consumed)
        self.down = _pack([mlp.down_proj], is_consumed)

    def feed(self, x: Tensor) -> Tensor:
        """x plus its feed-forward, [M, H]."""
        h = self.post_norm(x)
        return self.down.plus(self.up.times(h, self.gate.silu(h)), x)


def _pack(linears: list[nn.Linear], is_consumed: bool) -> PackedLinear:
    """One map from several that share their input; with `is_consumed` the originals are freed."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    bias = torch.cat(biases) if biases else None
    packed = PackedLinear(weight, bias)
    if is_consumed:
        for linear in linears:
            linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return packed


class Cache:
    """Keys and values of one request, [n_layers, 2, n_kv, capacity, head_dim], allocated once."""

    def __init__(self, network: Network, capacity: int):
        shape = (len(network.layers), 2, network.n_kv, capacity, network.head_dim)
        self.data = torch.empty(shape, dtype=network.dtype, device=network.device)
        self.capacity = capacity
        network.rotary(capacity)  # now, not in the middle of a timed step
        self.layers = [(layer[0], layer[1]) for layer in self.data]  # (keys, values), each [n_kv, capacity, head_dim]

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Move the rows `start + rows[i]` of every layer to `start + i`, in place; rows ascend."""
        n = len(rows)
        if list(rows) == list(range(n)):
            return
        index = torch.tensor([start + row for row in rows], device=self.data.device)
        self.data[:, :, :, start : start + n] = self.data.index_select(3, index)


@dataclass(frozen=True)
class Rows:
    """What a forward leaves: each row's normed hidden state, and its taps side by side (None if not asked for)."""

    final: Tensor  # [M, H]
    features: Tensor | None  # [M, 3H]


class Network:
    """A Llama, Qwen2 or Qwen3 decoder: embedding, layers, final norm, head."""

    def __init__(self, model: Any, is_consumed: bool = False):
        """Take the weights of a Hugging Face causal LM; with `is_consumed` its linear layers are freed on the way."""
        config, decoder = model.config, model.model
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.n_heads, self.n_kv = config.num_attention_heads, config.num_key_value_heads
        self.embed_weight: Tensor = decoder.embed_tokens.weight.detach()
        self.head_weight: Tensor = model.lm_head.weight.detach()
        self.dtype, self.device = self.embed_weight.dtype, self.embed_weight.device
        self.layers = [Layer(layer, is_consumed) for layer in decoder.layers]
        self.norm = Norm(decoder.norm)
        self.head = PackedLinear(self.head_weight, model.lm_head.bias)
        self._rotary = decoder.rotary_emb
        self._table: tuple[Tensor, Tensor] | None = None
        self._check(config)

    def _check(self, config: Any) -> None:
        if config.hidden_act not in ("silu", "swish"):
            raise InputError(f"The target's activation is {config.hidden_act!r}; only silu is supported.")
        if (kind := getattr(self._rotary, "rope_type", "default")) not in ("default", "linear", "llama3", "yarn"):
            raise InputError(f"The target's rotary scaling {kind!r} depends on the text's length; it is not supported.")
        if self.rotary(1)[0].shape[-1] != self.head_dim:
            raise InputError("The target rotates a part of each head only; that is not supported.")
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise InputError(
                f"The target has attention layers of kinds {sorted(kinds)}; only full attention is supported."
            )

    def rotary(self, n_positions: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions 0..n-1 or more, each [n, 1, head_dim], from the model's own rotary module."""
        if self._table is None or len(self._table[0]) < n_positions:
            n_known = 0 if self._table is None else len(self._table[0])
            positions = torch.arange(max(n_positions, 2 * n_known), device=self.device)[None]
            cos, sin = self._rotary(torch.empty(0, dtype=self.dtype, device=self.device), positions)
            half = cos.shape[-1] // 2
            signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
            self._table = (cos[0, :, None].contiguous(), signed[:, None].contiguous())
        return self._table

    def forward(
        self,
        tokens: Tensor,
        cache: Cache,
        start: int,
        depths: Tensor | None,
        visible: Tensor | None,
        taps: Sequence[int],
    ) -> Rows:
        """Run rows `tokens` [M], written at cache rows start..start+M-1, all of which see the first `start` rows.

        depths: [M] position less `start`; None = 0, 1, 2, ... visible: bool [M, M] among the rows, None = causal.
        taps: hidden_states entries (inputs of those layers) to keep; none = no features.
        """
        n = len(tokens)
        cos, sin = self._angles(start, n, depths)
        mask = self._mask(start, n, visible)
        x = F.embedding(tokens, self.embed_weight)  # [M, H]
        kept = {}
        for i, (layer, (keys, values)) in enumerate(zip(self.layers, cache.layers)):
            if i in taps:
                kept[i] = x
            x = self._attend(layer, x, keys, values, start, cos, sin, mask)
            x = layer.feed(x)
        features = torch.cat([kept[i] for i in taps], -1) if taps else None
        return Rows(self.norm(x), features)

    def logits(self, final: Tensor) -> Tensor:
        """The head on normed hidden states [M, H] → [M, V]."""
        return self.head(final)

    def project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [M, heads, D], keys and values [M, n_kv, D] of rows x [M, H]; angle tables of the rows [M, 1, D]."""
        n_qk = self.n_heads + self.n_kv
        heads = layer.qkv(layer.input_norm(x)).view(len(x), n_qk + self.n_kv, self.head_dim)
        qk = heads[:, :n_qk]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, : self.n_heads]), layer.k_norm(qk[:, self.n_heads :])), 1)
        qk = torch.addcmul(qk * cos, torch.roll(qk, self.head_dim // 2, -1), sin)
        return qk[:, : self.n_heads], qk[:, self.n_heads :], heads[:, n_qk:]

    def _angles(self, start: int, n: int, depths: Tensor | None) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(start + n)
        if depths is None:
            return cos[start : start + n], sin[start : start + n]
        positions = depths + start
        return cos[positions], sin[positions]  # [M, 1, D]

    def _mask(self, start: int, n: int, visible: Tensor | None) -> Tensor | None:
        """Additive mask [rows, start + M] for the attention below; None where it needs none."""
        if n == 1 or (visible is None and start == 0 and n > FOLD_ROWS):
            return None
        if visible is None:
            visible = torch.ones(n, n, dtype=torch.bool, device=self.device).tril_()
        mask = torch.zeros(n, start + n, dtype=self.dtype, device=self.device)
        mask[:, start:].masked_fill_(~visible, float("-inf"))
        return mask.repeat(self.n_heads // self.n_kv, 1) if n <= FOLD_ROWS else mask

    def _attend(
        self,
        layer: Layer,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        start: int,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """x plus its attention, [M, H]; the rows' keys and values are written into the cache."""
        n, end = len(x), start + len(x)
        q, k, v = self.project(layer, x, cos, sin)
        keys[:, start:end], values[:, start:end] = k.transpose(0, 1), v.transpose(0, 1)
        q = q.transpose(0, 1)  # [heads, M, D]
        k, v = keys[None, :, :end], values[None, :, :end]
        if n <= FOLD_ROWS:
            q = q.reshape(1, self.n_kv, -1, self.head_dim)  # [1, n_kv, group x M, D]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            mixed = F.scaled_dot_product_attention(
                q[None], k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.n_heads != self.n_kv
            )
        mixed = mixed.reshape(self.n_heads, n, self.head_dim).transpose(0, 1).reshape(n, -1)
        return layer.out.plus(mixed, x)
