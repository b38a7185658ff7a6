"""Drafters on checkpoints in the published layouts, against numbers the original authors' code computed from them.

Their norms and RoPE tables round to float32 inside, so floats agree to 1e-5 of an array's largest value, not better.
Integers (trees, tokens, tiers) agree exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafting import ROOT, starts
from reference_nets import candidates_of

from workbench.drafters import load_drafter
from workbench.drafters.branching import BranchingDrafter
from workbench.tree import BeamPlan, grow, tree_of

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "reference" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"the golden numbers are absent ({GOLDEN})")
SPECBLOCKS, EAGLES = ("specblock_k4", "specblock_k3_rope"), ("eagle3", "eagle3_deep")


def load(name: str) -> tuple[BranchingDrafter, Any]:
    numbers = np.load(GOLDEN / name / "expected.npz")
    embed = torch.from_numpy(numbers["embed_tokens"]).double()
    target = SimpleNamespace(
        name="golden",
        hidden_size=embed.shape[1],
        vocab_size=embed.shape[0],
        feature_layers=(1, 2, 3),
        embed_weight=embed,
        head_weight=embed,
    )
    drafter = load_drafter(GOLDEN / name, target)
    assert isinstance(drafter, BranchingDrafter)
    return drafter, numbers


def assert_close(found: Any, expected: np.ndarray) -> None:
    worst = np.abs(np.asarray(found) - expected).max()
    assert worst <= 1e-5 * np.abs(expected).max()


def assert_block(drafter: BranchingDrafter, hidden: torch.Tensor, tier: np.ndarray, numbers: Any, name: str, i: int):
    """Hidden [K, H] and what the heads make of it, at position i of the golden arrays `name`_…"""
    normed = drafter.net.norm(hidden)
    logits = drafter.net.lm_head(normed)
    assert_close(hidden, numbers[f"{name}_hidden"][i])
    assert_close(logits, numbers[f"{name}_logits"][i])
    assert_close(drafter.net.rank_logits(normed, logits), numbers[f"{name}_rank_logits"][i])
    assert tier.tolist() == numbers[f"{name}_rank_logits"][i].argmax(-1).tolist()


@pytest.mark.parametrize("name", SPECBLOCKS)
def test_specblock_blocks_one_to_three_at_every_position(name: str) -> None:
    drafter, z = load(name)
    state = drafter.open([], 4)  # fewer pairs than are coming: the cache has to grow
    for i, token in enumerate(z["tokens"].tolist()):
        drafter.observe(state, torch.from_numpy(z["target_features"][i : i + 1]), torch.empty(0), [token])
        first = drafter.expand(state, 0, ROOT, 10)
        assert state.hidden is not None
        assert_block(drafter, state.hidden[0], first.tier[0, 0], z, "block1", i)
        leaves = [(int(z[f"block2_from_slot{s}_tokens"][i]), 0, 0, s) for s in range(drafter.n_slots)]
        second = drafter.expand(state, 1, starts(*leaves), 10)
        for s in range(drafter.n_slots):
            assert_block(drafter, state.hidden[1 + s], second.tier[0, s], z, f"block2_from_slot{s}", i)
        third = drafter.expand(state, 2, starts((int(z["block3_tokens"][i]), 1, 0, 1)), 10)
        assert_block(drafter, state.hidden[-1], third.tier[0, 0], z, "block3", i)


@pytest.mark.parametrize("name", SPECBLOCKS)
def test_specblock_candidates_are_the_golden_logits_sorted(name: str) -> None:
    drafter, z = load(name)
    state = drafter.open([], 16)
    drafter.observe(state, torch.from_numpy(z["target_features"]), torch.empty(0), z["tokens"].tolist())
    found = drafter.expand(state, 0, ROOT, 10)
    assert drafter.target_ids is not None
    ids = drafter.target_ids.tolist()
    expected = [candidates_of(row, ids, 10) for row in torch.from_numpy(z["block1_logits"][-1])]
    assert found.token[0, 0].tolist() == [[token for token, _ in row] for row in expected]
    assert found.logp[0, 0].tolist() == [[steps for _, steps in row] for row in expected]


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_rows_of_the_pairs(name: str) -> None:
    drafter, z = load(name)
    state = drafter.open([], 4)
    tokens = z["tokens_1"].tolist()
    for i in range(len(z["target_features_1"])):
        drafter.observe(state, torch.from_numpy(z["target_features_1"][i : i + 1]), torch.empty(0), [tokens[i + 1]])
        drafter.expand(state, 0, ROOT, 4)
        assert state.hidden is not None
        hidden = state.hidden[0, 0]
        assert_close(hidden, z["hidden_1"][i])
        assert_close(drafter.net.lm_head(drafter.net.norm(hidden)), z["logits_1"][i])


@pytest.mark.parametrize("name", EAGLES)
def test_eagle3_trees_node_for_node(name: str) -> None:
    """The first tree, and the next one after three committed tokens replaced its rows. Theirs lists the root first."""
    drafter, z = load(name)
    settings = json.loads((GOLDEN / name / "tree.json").read_text())
    plan = BeamPlan(settings["depth"], settings["top_k"], settings["total_tokens_with_root"] - 1)
    state, n_pairs = drafter.open([], 64), 0
    for turn in ("1", "2"):
        features, tokens = torch.from_numpy(z[f"target_features_{turn}"]), z[f"tokens_{turn}"].tolist()
        pairs = slice(n_pairs, n_pairs + len(features))
        drafter.observe(state, features, torch.empty(0), tokens[1:][pairs])
        n_pairs += len(features)
        forest = grow(plan, lambda level, begun, width: drafter.expand(state, level, begun, width))
        tree = tree_of(plan.finish(forest))
        assert tree.token.tolist() == z[f"tree_{turn}_tokens"][1:].tolist()
        assert (tree.parent + 1).tolist() == z[f"tree_{turn}_parent"][1:].tolist()
        assert tree.depth.tolist() == z[f"tree_{turn}_depth"][1:].tolist()
