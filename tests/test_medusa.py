"""Medusa: float64 parity with a reference of a few lines, slot order, the published layout and its broken forms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.drafters.base import Forward
from workbench.drafters.checkpoint import Checkpoint, MedusaConfig, load_checkpoint, save_checkpoint
from workbench.drafters.medusa import (
    MedusaDrafter,
    load_medusa_published,
    medusa_drafter,
    published_shapes,
    read_medusa_published,
)
from workbench.drafters.nets import MedusaNet
from workbench.errors import InputError
from workbench.tree import PRESETS, Starts, accept, grow, product_chain, tree_of

H, V = 8, 24
DRAFT_IDS = np.array([1, 2, 5, 6, 9, 11, 12, 17, 20, 23])


def root() -> Starts:
    plan = product_chain(1)
    return plan.starts(plan.seed(1), 0)


def make_target(seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(V, H, generator=generator, dtype=torch.float64)
    return SimpleNamespace(name="tiny", hidden_size=H, vocab_size=V, head_weight=head)


def random_net(n_heads: int, n_blocks: int, vocab_size: int | None, seed: int = 1) -> MedusaNet:
    """Heads with weights that fp16 holds exactly."""
    net = MedusaNet(n_heads, n_blocks, H, vocab_size).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).half().double() / 2
    return net


def as_checkpoint(net: MedusaNet, n_blocks: int, draft_ids: np.ndarray | None = None) -> Checkpoint:
    vocab_size = V if net.has_full_heads else None
    return Checkpoint("medusa", MedusaConfig(net.n_heads, n_blocks, H, vocab_size), net.state_dict(), draft_ids)


def reference(state: dict[str, Tensor], n_heads: int, n_blocks: int, x: list[float], head: Tensor | None) -> Tensor:
    """Logits [heads, V_d] by loops over numbers: x + SiLU(W x + b) per block, then a vocabulary matrix."""
    out = []
    for i in range(n_heads):
        h = list(x)
        for j in range(n_blocks):
            w, b = state[f"heads.{i}.{j}.linear.weight"].tolist(), state[f"heads.{i}.{j}.linear.bias"].tolist()
            z = [sum(w[r][c] * h[c] for c in range(H)) + b[r] for r in range(H)]
            h = [h[r] + z[r] / (1 + math.exp(-z[r])) for r in range(H)]
        rows = (state[f"heads.{i}.{n_blocks}.weight"] if head is None else head).tolist()
        out.append([sum(row[c] * h[c] for c in range(H)) for row in rows])
    return torch.tensor(out, dtype=torch.float64)


def ranked(logits: Tensor, ids: list[int], width: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and rounded log-probabilities of every slot, sorted by (log-probability falling, token id)."""
    tokens, steps = [], []
    for row in logits.tolist():
        log_sum = math.log(sum(math.exp(z - max(row)) for z in row)) + max(row)
        best = sorted((-round((z - log_sum) * 1024), token) for z, token in zip(row, ids))[:width]
        tokens.append([token for _, token in best])
        steps.append([-minus for minus, _ in best])
    return tokens, steps


@pytest.mark.parametrize("n_blocks", [1, 2])
@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 5])
def test_shared_head_equals_the_reference(n_heads: int, n_blocks: int) -> None:
    target, net = make_target(), random_net(n_heads, n_blocks, None)
    drafter = medusa_drafter(as_checkpoint(net, n_blocks, DRAFT_IDS), target)
    final = torch.randn(3, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits = reference(net.state_dict(), n_heads, n_blocks, final[-1].tolist(), target.head_weight[DRAFT_IDS])
    # 1e-9: float64 sums of eight products in another order.
    assert torch.allclose(net.logits(final[-1], drafter.head_weight), logits, rtol=0, atol=1e-9)
    state = drafter.open([1, 2], capacity=20)
    drafter.observe(state, torch.zeros(3, 3 * H), final, [3, 4, 5])
    got = drafter.expand(state, 0, root(), 4)
    tokens, steps = ranked(logits, DRAFT_IDS.tolist(), 4)
    assert got.token.tolist() == [[tokens]]
    assert got.logp.tolist() == [[steps]]
    assert got.tier.tolist() == [[[-1] * n_heads]]
    assert (drafter.n_slots, drafter.n_levels, drafter.max_width) == (n_heads, 1, len(DRAFT_IDS))


def test_full_heads_equal_the_reference(tmp_path: Path) -> None:
    net = random_net(3, 2, V)
    drafter = medusa_drafter(as_checkpoint(net, 2), make_target())
    final = torch.randn(1, H, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    state = drafter.open([1], capacity=20)
    drafter.observe(state, torch.zeros(1, 3 * H), final, [3])
    got = drafter.expand(state, 0, root(), 5)
    tokens, steps = ranked(reference(net.state_dict(), 3, 2, final[0].tolist(), None), list(range(V)), 5)
    assert got.token.tolist() == [[tokens]]
    assert got.logp.tolist() == [[steps]]


@pytest.mark.parametrize("vocab_size", [None, V])
def test_single_precision_runs_on_reordered_weights(vocab_size: int | None) -> None:
    """float32, where the CPU reorders weights, against float64: 2e-5 of logits of some units is float32's own error."""
    target, net = make_target(), random_net(3, 2, vocab_size)
    ids = DRAFT_IDS if vocab_size is None else None
    wide = medusa_drafter(as_checkpoint(net, 2, ids), target)
    target.head_weight = target.head_weight.float()
    drafter = medusa_drafter(as_checkpoint(net, 2, ids), target)
    final = torch.randn(1, H, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = []
    for either in (wide, drafter):
        state = either.open([1], capacity=20)
        either.observe(state, torch.zeros(1, 3 * H), final, [3])
        either.expand(state, 0, root(), 5)
        assert state.logits is not None
        found.append(state.logits.double())
    assert torch.allclose(found[0], found[1], rtol=0, atol=2e-5)


def test_head_i_is_slot_i() -> None:
    """Head i adds a bias that makes token 3 + i the best: SiLU(40) = 40 to 1e-15, on a one-hot vocabulary matrix."""
    net = MedusaNet(3, 1, H, None).double()
    for i in range(3):
        net.get_parameter(f"heads.{i}.0.linear.bias").data[3 + i] = 40.0
    drafter = MedusaDrafter(net, torch.eye(H, dtype=torch.float64))
    state = drafter.open([1], capacity=9)
    drafter.observe(state, torch.zeros(1, 3 * H), torch.zeros(1, H, dtype=torch.float64), [2])
    assert drafter.expand(state, 0, root(), 1).token.tolist() == [[[[3], [4], [5]]]]


def test_only_the_last_committed_pair_counts() -> None:
    target, net = make_target(), random_net(4, 1, None)
    drafter = medusa_drafter(as_checkpoint(net, 1, DRAFT_IDS), target)
    final = torch.randn(6, H, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    at_once, in_steps = drafter.open([1], 9), drafter.open([1], 9)
    drafter.observe(at_once, torch.zeros(6, 3 * H), final, [1, 2, 3, 4, 5, 6])
    for cut in (slice(0, 3), slice(3, 4), slice(4, 6)):
        drafter.observe(in_steps, torch.zeros(6, 3 * H)[cut], final[cut], [1, 2, 3, 4, 5, 6][cut])
        drafter.expand(in_steps, 0, root(), 3)
    one, two = drafter.expand(at_once, 0, root(), 3), drafter.expand(in_steps, 0, root(), 3)
    assert (one.token == two.token).all() and (one.logp == two.logp).all()
    # One forward a step, of one row; a second look at the same place costs none.
    assert at_once.forwards == [Forward("first", 1, 1)]
    assert in_steps.forwards == [Forward("first", 1, 1)] * 3


def test_padding_is_never_a_token() -> None:
    """Twelve draft tokens that exclude 0, asked for more than there are, under the 63-node tree: no node is padding."""
    target, net = make_target(), random_net(4, 1, None)
    drafter = medusa_drafter(as_checkpoint(net, 1, DRAFT_IDS[:6]), target)
    state = drafter.open([1], 9)
    drafter.observe(state, torch.zeros(1, 3 * H), torch.ones(1, H, dtype=torch.float64), [2])
    got = drafter.expand(state, 0, root(), 10)
    assert (got.token[..., 6:] == -1).all() and (got.token[..., :6] > 0).all()
    for plan in (PRESETS["medusa"], product_chain(4)):
        forest = grow(plan, lambda level, starts, width: drafter.expand(state, level, starts, width))
        tree = tree_of(plan.finish(forest))
        assert 0 < len(tree.token) <= plan.budget
        assert set(tree.token.tolist()) <= set(DRAFT_IDS[:6].tolist())
        assert accept(tree, lambda node: 0) == ([], 0)


def test_one_level_only() -> None:
    drafter = MedusaDrafter(random_net(2, 1, None), torch.eye(H, dtype=torch.float64))
    with pytest.raises(InputError, match="one level only"):
        drafter.expand(drafter.open([1], 9), 1, root(), 3)
    with pytest.raises(ValueError, match="no pair"):
        drafter.expand(drafter.open([1], 9), 0, root(), 3)


# Our own layout


def test_own_checkpoint_round_trip(tmp_path: Path) -> None:
    net = random_net(4, 2, None)
    save_checkpoint(tmp_path / "heads", "medusa", net, None)
    found = load_checkpoint(tmp_path / "heads")
    assert (found.kind, found.config, found.draft_ids) == ("medusa", MedusaConfig(4, 2, H, None), None)
    assert {k: v.double().tolist() for k, v in found.state.items()} == {k: v.tolist() for k, v in _named(net)}
    drafter = medusa_drafter(found, make_target(), "heads")
    assert (drafter.name, drafter.kind, drafter.n_slots, drafter.max_width) == ("heads", "medusa", 4, V)
    assert len(drafter.weights_hash) == 64


def test_own_checkpoint_with_a_draft_vocabulary(tmp_path: Path) -> None:
    """The map is written as `t2d` and `d2t`, and the head's rows are cut to it."""
    net, target = random_net(3, 1, None), make_target()
    save_checkpoint(tmp_path / "heads", "medusa", net, DRAFT_IDS, {"target_vocab_size": V})
    found = load_checkpoint(tmp_path / "heads")
    assert found.draft_ids is not None and found.draft_ids.tolist() == DRAFT_IDS.tolist()
    drafter = medusa_drafter(found, target)
    assert drafter.head_weight is not None and torch.equal(drafter.head_weight, target.head_weight[DRAFT_IDS])
    assert (drafter.n_slots, drafter.max_width) == (3, len(DRAFT_IDS))


def _named(net: MedusaNet) -> list[tuple[str, Tensor]]:
    return list(net.state_dict().items())


def test_heads_that_do_not_fit_the_target() -> None:
    shared = as_checkpoint(random_net(2, 1, None), 1, DRAFT_IDS)
    full = as_checkpoint(random_net(2, 1, V), 1)
    wide, small = make_target(), make_target()
    wide.hidden_size, small.vocab_size = 16, 20
    with pytest.raises(InputError, match="hidden size of 8, but tiny has 16"):
        medusa_drafter(shared, wide)
    with pytest.raises(InputError, match="drafts token 23, but tiny has 20 tokens"):
        medusa_drafter(shared, small)
    with pytest.raises(InputError, match="vocabulary of 24 tokens, but tiny has 20"):
        medusa_drafter(full, small)


# The published layout

CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "someone/tiny-chat"}
NAMES = [
    *("0.0.linear.weight", "0.0.linear.bias", "0.1.weight"),
    *("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"),
]


def published(folder: Path, change: Callable[[dict[str, Tensor], dict[str, object]], object] | None = None) -> Path:
    """A small folder under exactly the published names, with one thing changed."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(H, H), (H,), (V, H)] * 2
    tensors = {name: torch.randn(shape, generator=generator).half() for name, shape in zip(NAMES, shapes)}
    config: dict[str, object] = dict(CONFIG)
    if change is not None:
        change(tensors, config)
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_published_folder_loads_and_drafts(tmp_path: Path) -> None:
    folder = published(tmp_path / "medusa-tiny")
    target = make_target()
    drafter = load_medusa_published(folder, target)
    assert (drafter.name, drafter.n_slots, drafter.max_width) == ("medusa-tiny", 2, V)
    state = drafter.open([1], 9)
    final = torch.randn(1, H, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    drafter.observe(state, torch.zeros(1, 3 * H), final, [2])
    weights = {f"heads.{k}": v.double() for k, v in torch.load(folder / "medusa_lm_head.pt").items()}
    tokens, steps = ranked(reference(weights, 2, 1, final[0].tolist(), None), list(range(V)), 3)
    got = drafter.expand(state, 0, root(), 3)
    assert got.token.tolist() == [[tokens]] and got.logp.tolist() == [[steps]]


def test_residual_blocks_that_are_one_module_load(tmp_path: Path) -> None:
    """The original repeats one module, so its file holds a block once and names it once a layer."""

    def three_layers(tensors: dict[str, Tensor], config: dict[str, object]) -> None:
        config["medusa_num_layers"] = 3
        for head in "01":
            tensors[f"{head}.3.weight"] = tensors.pop(f"{head}.1.weight")
            for part in ("weight", "bias"):
                for layer in "12":
                    tensors[f"{head}.{layer}.linear.{part}"] = tensors[f"{head}.0.linear.{part}"]

    folder = published(tmp_path / "three", three_layers)
    drafter = load_medusa_published(folder, make_target())
    weights = {f"heads.{k}": v.double() for k, v in torch.load(folder / "medusa_lm_head.pt").items()}
    state, final = drafter.open([1], 9), torch.linspace(-1, 1, H, dtype=torch.float64)[None]
    drafter.observe(state, torch.zeros(1, 3 * H), final, [2])
    tokens, steps = ranked(reference(weights, 2, 3, final[0].tolist(), None), list(range(V)), 3)
    got = drafter.expand(state, 0, root(), 3)
    assert got.token.tolist() == [[tokens]] and got.logp.tolist() == [[steps]]
    places = {p.data_ptr() for p in drafter.net.parameters()}
    assert len(places) == 6  # nor does memory hold it more often: a small file cannot ask for much


def test_published_folder_survives_our_layout(tmp_path: Path) -> None:
    first = load_medusa_published(published(tmp_path / "theirs"), make_target())
    save_checkpoint(tmp_path / "ours", "medusa", first.net, None)
    second = medusa_drafter(load_checkpoint(tmp_path / "ours"), make_target())
    assert all(torch.equal(a, b) for a, b in zip(first.net.parameters(), second.net.parameters()))
    assert first.weights_hash == second.weights_hash


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t, c: t.pop("1.0.linear.bias"), "missing tensor '1.0.linear.bias'"),
        (lambda t, c: t.pop("0.1.weight"), "missing tensor '0.1.weight'"),
        (lambda t, c: t.update({"lm_head.weight": torch.ones(V, H)}), "unexpected tensor 'lm_head.weight'"),
        (lambda t, c: c.update(medusa_num_heads=1), "unexpected tensor '1.0.linear.weight' .the file has 2 heads"),
        (lambda t, c: c.update(medusa_num_heads=5), "missing tensor '2.0.linear.weight'"),
        (lambda t, c: c.update(medusa_num_layers=2), "missing tensor '0.2.weight'"),
        (lambda t, c: t.update({"1.1.weight": torch.ones(V, H + 1)}), r"'1.1.weight' has the shape \(24, 9\)"),
        (lambda t, c: t.update({"0.1.weight": torch.ones(V, H + 1)}), r"'0.1.weight' has the shape \(24, 9\)"),
        (lambda t, c: t.update({"0.0.linear.bias": torch.ones(1)}), r"'0.0.linear.bias' has the shape \(1,\)"),
        (lambda t, c: t.update({"0.1.weight": torch.ones(V)}), "expected a matrix"),
        (lambda t, c: t.update({"1.1.weight": torch.ones(V, H).long()}), "'1.1.weight' has the dtype torch.int64"),
        (lambda t, c: t["1.1.weight"].fill_(float("nan")), "'1.1.weight' holds values that are not finite"),
        (lambda t, c: c.pop("medusa_num_heads"), "'medusa_num_heads' must be an integer from 1 to 64, not None"),
        (lambda t, c: c.update(medusa_num_layers=True), "'medusa_num_layers' must be an integer"),
        (lambda t, c: c.update(medusa_num_heads=0), "'medusa_num_heads' must be an integer"),
        (lambda t, c: c.pop("base_model_name_or_path"), "'base_model_name_or_path' must name the target"),
    ],
)
def test_broken_published_folders_are_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, object]], object], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        load_medusa_published(published(tmp_path / "broken", change), make_target())


def test_published_files_that_are_not_weights(tmp_path: Path) -> None:
    folder = published(tmp_path / "broken")
    (folder / "medusa_lm_head.pt").write_bytes(b"not a zip file")
    with pytest.raises(InputError, match="cannot be read as PyTorch weights"):
        load_medusa_published(folder, make_target())
    torch.save({"0.1.weight": print}, folder / "medusa_lm_head.pt")  # a pickle that names a function
    with pytest.raises(InputError, match="cannot be read as PyTorch weights"):
        load_medusa_published(folder, make_target())
    (folder / "medusa_lm_head.pt").unlink()
    with pytest.raises(InputError, match="medusa_lm_head.pt is missing"):
        load_medusa_published(folder, make_target())


def test_published_heads_of_another_target(tmp_path: Path) -> None:
    folder = published(tmp_path / "heads")
    other = make_target()
    other.name, other.vocab_size = "other", 32000
    with pytest.raises(InputError, match="drafter heads predicts a vocabulary of 24 tokens, but other has 32000"):
        load_medusa_published(folder, other)


def test_shapes_at_seven_billion() -> None:
    """Vicuna-7B's five heads: names and shapes without a byte of weights."""
    config = MedusaConfig(n_heads=5, n_blocks=1, hidden_size=4096, vocab_size=32000)
    with torch.device("meta"):
        net = MedusaNet(5, 1, 4096, 32000)
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(5):
        expected[f"{i}.0.linear.weight"] = (4096, 4096)
        expected[f"{i}.0.linear.bias"] = (4096,)
        expected[f"{i}.1.weight"] = (32000, 4096)
    assert published_shapes(config) == expected
    assert {k: tuple(v.shape) for k, v in net.state_dict().items()} == {f"heads.{k}": v for k, v in expected.items()}
    assert all(p.is_meta for p in net.parameters())


def test_names_in_the_small_folder_are_the_published_ones(tmp_path: Path) -> None:
    found = read_medusa_published(published(tmp_path / "heads"))
    assert list(found.state) == [f"heads.{name}" for name in NAMES]
    assert found.config == MedusaConfig(2, 1, H, V)
