"""ParallelSpec: float64 parity with a slow reference without a cache, prefix purity, slot 0 real, masks never kept."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.drafters import load_drafter
from workbench.drafters.base import Forward
from workbench.drafters.checkpoint import Checkpoint, Published, load_checkpoint, save_checkpoint
from workbench.drafters.fit import fit_drafter
from workbench.drafters.nets import NetConfig, ParallelSpecNet
from workbench.drafters.parallelspec import ParallelSpecDrafter, ParallelSpecState
from workbench.errors import InputError
from workbench.tree import PRESETS, Starts, accept, grow, product_chain, tree_of

H, HEADS, KV_HEADS, D, V = 8, 4, 2, 6, 24  # head size 6, so that heads * head size is not the hidden size
DRAFT_IDS = np.array([1, 2, 5, 6, 9, 11, 12, 17, 20, 23])
N_PAIRS = 9


def root() -> Starts:
    plan = product_chain(1)
    return plan.starts(plan.seed(1), 0)


def make_config(n_slots: int, is_norm_before_residual: bool = False) -> NetConfig:
    return NetConfig(
        hidden_size=H,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        head_dim=D,
        intermediate_size=12,
        vocab_size=V,
        draft_vocab_size=len(DRAFT_IDS),
        n_slots=n_slots,
        is_norm_before_residual=is_norm_before_residual,
    )


def random_net(config: NetConfig, seed: int = 0) -> ParallelSpecNet:
    """Weights that fp16 holds exactly, norms away from 1."""
    net = ParallelSpecNet(config).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.6).half().double()
        if "norm" in name:
            parameter.data += 1
    return net


def make_target() -> SimpleNamespace:
    embed = torch.randn(V, H, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    return SimpleNamespace(name="tiny", hidden_size=H, vocab_size=V, embed_weight=embed, feature_layers=(1, 2, 3))


def fitted(
    checkpoint: Checkpoint, target: SimpleNamespace, layers: tuple[int, ...] | None = None, name: str = "parallelspec"
) -> ParallelSpecDrafter:
    return fit_drafter(ParallelSpecDrafter, Published(checkpoint, None, layers), target, name)


def make_drafter(net: ParallelSpecNet) -> ParallelSpecDrafter:
    return fitted(Checkpoint("parallelspec", net.config, net.state_dict(), DRAFT_IDS), make_target())


def pairs(n: int = N_PAIRS) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(12)
    features = torch.randn(n, 3 * H, generator=generator, dtype=torch.float64)
    return features, torch.randint(0, V, (n,), generator=generator).tolist()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-5).sqrt() * weight


def rope(x: Tensor, position: int) -> Tensor:
    """x [d]: element i turns with element i + d/2 by position * 10000^(-2i/d)."""
    out, half = x.clone(), D // 2
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / D)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def reference(net: ParallelSpecNet, features: Tensor, tokens: list[int]) -> Tensor:
    """Logits [K, V_d] at the last pair: every row from scratch, one at a time, keys in a list of (head, row)."""
    w, n, n_slots = net.state_dict(), len(tokens), net.config.n_slots
    embed = make_target().embed_weight
    rows = [(w["fc.weight"] @ features[i], embed[tokens[i]], i) for i in range(n)]
    rows += [(w["mask_stream"][j - 1], w["mask_embed"][j - 1], n - 1 + j) for j in range(1, n_slots)]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []
    m = "midlayer."
    for r, (stream, token_embed, position) in enumerate(rows):
        normed = norm(stream, w[m + "hidden_norm.weight"])
        x = torch.cat([norm(token_embed, w[m + "input_layernorm.weight"]), normed])
        q, k, v = (w[f"{m}self_attn.{name}_proj.weight"] @ x for name in "qkv")
        keys.append(torch.stack([rope(part, position) for part in k.split(D)]))
        values.append(torch.stack(v.split(D)))
        out = []
        for head, query in enumerate(q.split(D)):
            shared = head // (HEADS // KV_HEADS)
            score = torch.stack([rope(query, position) @ keys[s][shared] / D**0.5 for s in range(r + 1)])
            weight = torch.softmax(score, dim=0)
            out.append(torch.stack([weight[s] * values[s][shared] for s in range(r + 1)]).sum(0))
        residual = normed if net.config.is_norm_before_residual else stream
        x = residual + w[m + "self_attn.o_proj.weight"] @ torch.cat(out)
        z = norm(x, w[m + "post_attention_layernorm.weight"])
        gate, up = w[m + "mlp.gate_proj.weight"] @ z, w[m + "mlp.up_proj.weight"] @ z
        x = x + w[m + "mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
        logits.append(w["lm_head.weight"] @ norm(x, w["norm.weight"]))
    return torch.stack(logits[n - 1 :])


def logits_of(drafter: ParallelSpecDrafter, state: ParallelSpecState) -> Tensor:
    assert state.hidden is not None
    return drafter._fast.lm_head(drafter._fast.norm(state.hidden))


def rows_of(state: ParallelSpecState) -> tuple[Tensor, Tensor]:
    """Cached keys and values of the committed pairs."""
    return state.cache.keys[0][:, :, : state.n_pairs], state.cache.values[0][:, :, : state.n_pairs]


def drafted(drafter: ParallelSpecDrafter, cuts: list[int], n: int = N_PAIRS) -> tuple[ParallelSpecState, Tensor]:
    """The state after drafting at every cut (numbers of committed pairs) and at the end, and the last logits."""
    features, tokens = pairs(n)
    state = drafter.open([1], capacity=n)
    edges = [0, *cuts, n]
    for a, b in zip(edges, edges[1:]):
        drafter.observe(state, features[a:b], torch.zeros(b - a, H), tokens[a:b])
        drafter.expand(state, 0, root(), 3)
    return state, logits_of(drafter, state)


@pytest.mark.parametrize("is_norm_before_residual", [False, True])
@pytest.mark.parametrize("n_slots", [1, 2, 3, 4, 5])
def test_equals_the_reference_at_every_prefix(n_slots: int, is_norm_before_residual: bool) -> None:
    net = random_net(make_config(n_slots, is_norm_before_residual))
    drafter = make_drafter(net)
    features, tokens = pairs()
    state = drafter.open([1], capacity=N_PAIRS)
    for n in range(1, N_PAIRS + 1):
        drafter.observe(state, features[n - 1 : n], torch.zeros(1, H), tokens[n - 1 : n])
        got = drafter.expand(state, 0, root(), 4)
        expected = reference(net, features[:n], tokens[:n])
        # 1e-9: float64 throughout, sums of at most 48 terms in another order.
        assert torch.allclose(logits_of(drafter, state), expected, rtol=0, atol=1e-9)
        steps = (torch.log_softmax(expected, -1) * 1024).round().int().tolist()
        best = [sorted(zip([-s for s in row], DRAFT_IDS.tolist()))[:4] for row in steps]
        assert got.token.tolist() == [[[[token for _, token in row] for row in best]]]
        assert got.logp.tolist() == [[[[-minus for minus, _ in row] for row in best]]]
        assert got.tier.tolist() == [[[-1] * n_slots]]


def test_single_precision_runs_on_reordered_weights() -> None:
    """float32, where the CPU reorders weights, against float64: 1e-4 of logits of some units is float32's own error."""
    net, target = random_net(make_config(4)), make_target()
    wide = make_drafter(net)
    target.embed_weight = target.embed_weight.float()
    narrow = fitted(Checkpoint("parallelspec", net.config, net.state_dict(), DRAFT_IDS), target)
    state, _ = drafted(narrow, [4, 5])
    assert state.hidden is not None and state.hidden.dtype == torch.float32
    assert torch.allclose(logits_of(narrow, state).double(), drafted(wide, [])[1], rtol=0, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, N_PAIRS - 1)), st.integers(1, 5))
def test_any_accept_pattern_gives_the_draft_from_scratch(cuts: set[int], n_slots: int) -> None:
    """Prefix purity: logits and every cached row, whatever the steps were."""
    drafter = make_drafter(random_net(make_config(n_slots)))
    at_once, one = drafted(drafter, [])
    in_steps, other = drafted(drafter, sorted(cuts))
    assert at_once.n_pairs == in_steps.n_pairs == N_PAIRS
    assert torch.allclose(one, other, rtol=0, atol=1e-9)
    for a, b in zip(rows_of(at_once), rows_of(in_steps)):
        assert torch.allclose(a, b, rtol=0, atol=1e-9)


def test_mask_rows_are_never_kept() -> None:
    """Cached rows do not hang on the mask parameters, though a draft ran after every pair."""
    net = random_net(make_config(4))
    state, _ = drafted(make_drafter(net), list(range(1, N_PAIRS)))
    with torch.no_grad():
        net.mask_embed.add_(3.0)
        net.mask_stream.mul_(-2.0)
    other, _ = drafted(make_drafter(net), [])
    for a, b in zip(rows_of(state), rows_of(other)):
        assert torch.allclose(a, b, rtol=0, atol=1e-9)


def test_slot_0_is_the_real_row() -> None:
    """Slot 0 ignores every mask parameter and equals the drafter with one slot; slot j sees masks 1..j alone."""
    net, single = random_net(make_config(4)), random_net(make_config(1))
    single.load_state_dict(
        {k: v if "mask" not in k else v[:0] for k, v in net.state_dict().items()}, strict=True, assign=True
    )
    before = drafted(make_drafter(net), [])[1]
    assert torch.allclose(before[:1], drafted(make_drafter(single), [])[1], rtol=0, atol=1e-9)
    with torch.no_grad():
        net.mask_embed[1].add_(1.0)
        net.mask_stream[1].add_(1.0)
    after = drafted(make_drafter(net), [])[1]
    is_same = ((before - after).abs() < 1e-9).all(-1).tolist()
    assert is_same == [True, True, False, False]


def test_forwards_and_rows() -> None:
    """One forward a step: the queued rows and K - 1 mask rows; a second look at the same place costs none."""
    drafter = make_drafter(random_net(make_config(4)))
    state, _ = drafted(drafter, [5, 6])
    drafter.expand(state, 0, root(), 2)
    assert state.forwards == [Forward("first", n + 3, 1) for n in (5, 1, 3)]


def test_padding_is_never_a_token() -> None:
    """Token 0 is outside the draft vocabulary and more candidates are asked for than there are: no node is padding."""
    drafter = make_drafter(random_net(make_config(4)))
    state, _ = drafted(drafter, [])
    got = drafter.expand(state, 0, root(), 14)
    assert (got.token[..., 10:] == -1).all() and (got.token[..., :10] > 0).all()
    for plan in (PRESETS["parallelspec"], PRESETS["medusa"]):
        forest = grow(plan, lambda level, starts, width: drafter.expand(state, level, starts, width))
        tree = tree_of(plan.finish(forest))
        assert 0 < len(tree.token) <= plan.budget
        assert set(tree.token.tolist()) <= set(DRAFT_IDS.tolist())
        assert accept(tree, lambda node: 0) == ([], 0)


def test_one_level_and_something_to_draft_from() -> None:
    drafter = make_drafter(random_net(make_config(2)))
    with pytest.raises(InputError, match="one level only"):
        drafter.expand(drafter.open([1], 5), 1, root(), 3)
    with pytest.raises(ValueError, match="no pair"):
        drafter.expand(drafter.open([1], 5), 0, root(), 3)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    net = random_net(make_config(4))
    save_checkpoint(tmp_path / "drafter", "parallelspec", net, DRAFT_IDS)
    found = load_checkpoint(tmp_path / "drafter")
    assert found.kind == "parallelspec" and found.draft_ids is not None
    drafter = fitted(found, make_target(), name="mine")
    assert (drafter.name, drafter.n_slots, drafter.n_levels, drafter.max_width) == ("mine", 4, 1, 10)
    assert len(drafter.weights_hash) == 64
    # Weights are chosen so that fp16 holds them (norms to 2^-10), hence the loose 1e-2 on logits.
    assert torch.allclose(drafted(drafter, [])[1], drafted(make_drafter(net), [])[1], rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 16}, "features of width 24, tiny has 48"),
        ({"vocab_size": 25}, "a vocabulary of 24, tiny has 25"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target(change: dict[str, int], sentence: str) -> None:
    net = random_net(make_config(2))
    target = make_target()
    vars(target).update(change)
    checkpoint = Checkpoint("parallelspec", net.config, net.state_dict(), DRAFT_IDS)
    with pytest.raises(InputError, match=sentence):
        fitted(checkpoint, target)


def test_the_layers_a_checkpoint_names_must_be_those_the_target_taps(tmp_path: Path) -> None:
    """Named in config.json by number of the layer whose input is tapped; none named: the target's are taken."""
    net, target = random_net(make_config(2)), make_target()
    target.head_weight = target.embed_weight
    for layers in ([1, 2, 3], None):
        extra = {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
        save_checkpoint(tmp_path / "fits", "parallelspec", net, DRAFT_IDS, extra)
        assert load_drafter(tmp_path / "fits", target).n_slots == 2
    save_checkpoint(tmp_path / "other", "parallelspec", net, DRAFT_IDS, {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]})
    with pytest.raises(InputError, match=r"made for features of the layers \(1, 2, 4\), tiny has \(1, 2, 3\)"):
        load_drafter(tmp_path / "other", target)


def test_shapes_at_eight_billion() -> None:
    """The Llama-3.1-8B size on the meta device: names and shapes without a byte of weights."""
    config = NetConfig(
        hidden_size=4096,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        draft_vocab_size=32000,
        n_slots=4,
    )
    with torch.device("meta"):
        net = ParallelSpecNet(config)
    assert {k: tuple(v.shape) for k, v in net.state_dict().items()} == {
        "fc.weight": (4096, 12288),
        "mask_embed": (3, 4096),
        "mask_stream": (3, 4096),
        "midlayer.hidden_norm.weight": (4096,),
        "midlayer.input_layernorm.weight": (4096,),
        "midlayer.self_attn.q_proj.weight": (4096, 8192),
        "midlayer.self_attn.k_proj.weight": (1024, 8192),
        "midlayer.self_attn.v_proj.weight": (1024, 8192),
        "midlayer.self_attn.o_proj.weight": (4096, 4096),
        "midlayer.post_attention_layernorm.weight": (4096,),
        "midlayer.mlp.gate_proj.weight": (14336, 4096),
        "midlayer.mlp.up_proj.weight": (14336, 4096),
        "midlayer.mlp.down_proj.weight": (4096, 14336),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
    }
