"""SpecBlock's drafter: float64 parity with a reference without caches, and a cache that only the committed text shapes.

Tolerance 1e-9 in float64: the two differ in the order of sums alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drafting import DRAFT_IDS, ROOT, branch_of, observe, random_embed, random_net, random_pairs, rows_of, starts
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_nets import candidates_of, logits_of, rank_logits_of, sizes_of, specblock_branch

from workbench.drafters import branching
from workbench.drafters.base import Forward
from workbench.drafters.branching import BranchState
from workbench.drafters.nets import SpecBlockNet
from workbench.drafters.specblock import SpecBlockDrafter
from workbench.tree import PRESETS, BlockPlan, Expansion, Starts, grow

EMBED = random_embed()
NETS: dict[str, dict[str, Any]] = {
    "whole": {"n_layers": 2},
    "three layers, three slots": {"n_layers": 3, "n_slots": 3},
    "one layer": {"n_layers": 1},
    "no layer shift": {"n_layers": 2, "has_layer_shift": False},
    "no prefix broadcast": {"n_layers": 2, "has_prefix_broadcast": False},
    "no rank head": {"n_layers": 2, "has_rank_head": False},
}


def make(**changes: Any) -> SpecBlockDrafter:
    return SpecBlockDrafter(random_net(SpecBlockNet, **changes), EMBED, torch.from_numpy(DRAFT_IDS))


def reference(drafter: SpecBlockDrafter, n_pairs: int, branch: list[tuple[int, int]]) -> list[torch.Tensor]:
    features, tokens = random_pairs(n_pairs)
    weights = dict(drafter.net.state_dict())
    if not drafter.net.config.has_prefix_broadcast:
        weights["no_broadcast"] = torch.ones(1)
    return specblock_branch(weights, sizes_of(drafter.net.config), features, tokens, EMBED, branch)


def drafted(drafter: SpecBlockDrafter, n_pairs: int) -> tuple[BranchState, Expansion]:
    """A state after the first block at the last of n pairs."""
    state = drafter.open([], n_pairs)
    observe(drafter, state, *random_pairs(n_pairs))
    return state, drafter.expand(state, 0, ROOT, 6)


def assert_offer(drafter: SpecBlockDrafter, offer: Expansion, start: int, hidden: torch.Tensor) -> None:
    """Candidates and tiers of one start, against the heads of the reference on its hidden states [K, H]."""
    weights, sizes = drafter.net.state_dict(), sizes_of(drafter.net.config)
    for slot, logits in enumerate(logits_of(weights, sizes, hidden)):
        expected = candidates_of(logits, DRAFT_IDS.tolist(), offer.token.shape[-1])
        got = zip(offer.token[0, start, slot].tolist(), offer.logp[0, start, slot].tolist())
        assert list(got) == expected
    tiers = [-1] * drafter.n_slots
    if drafter.has_tiers:
        tiers = rank_logits_of(weights, sizes, hidden).argmax(-1).tolist()
    assert offer.tier[0, start].tolist() == tiers


@pytest.mark.parametrize("changes", NETS.values(), ids=list(NETS))
def test_blocks_against_the_reference(changes: dict[str, Any]) -> None:
    """Blocks one, two (from every slot) and three, where pairs came in twos and threes."""
    drafter = make(**changes)
    k = drafter.n_slots
    features, tokens = random_pairs(7)
    state, n_seen = drafter.open([], 7), 0
    for n_new in (2, 3, 2):
        new = slice(n_seen, n_seen + n_new)
        observe(drafter, state, features[new], tokens[new])
        n_seen += n_new
        first = drafter.expand(state, 0, ROOT, 6)
        assert state.hidden is not None
        expected = reference(drafter, n_seen, [])[0]
        torch.testing.assert_close(state.hidden[0], expected[-k:], rtol=0, atol=1e-9)
        assert_offer(drafter, first, 0, expected[-k:])
        second = drafter.expand(state, 1, starts(*((3 + slot, 0, 0, slot) for slot in range(k))), 6)
        third = drafter.expand(state, 2, starts((8, 1, 2, 1), (9, 0, 0, 1), (1, 1, 0, k - 1)), 6)
        for slot in range(k):
            _, expected = reference(drafter, n_seen, [(slot, 3 + slot)])
            torch.testing.assert_close(state.hidden[1 + slot], expected, rtol=0, atol=1e-9)
            assert_offer(drafter, second, slot, expected)
        for start, branch in enumerate(([(2, 5), (1, 8)], [(1, 9)], [(0, 3), (k - 1, 1)])):
            expected = reference(drafter, n_seen, branch)[-1]  # the second started at level 2 under the first block
            torch.testing.assert_close(state.hidden[1 + k + start], expected, rtol=0, atol=1e-9)
            assert_offer(drafter, third, start, expected)


def test_every_block_of_a_merging_tree_against_the_reference() -> None:
    """Three levels of the preset: whatever starts the plan names, each block follows its creators' branch."""
    drafter = make(n_layers=2)
    plan = BlockPlan(root_width=4, tier_widths=(2, 2, 3, 0), n_blocks=3, budget=24)
    state = drafter.open([], 5)
    observe(drafter, state, *random_pairs(5))
    begun: list[Starts] = []
    offers: list[Expansion] = []

    def expand(level: int, at: Starts, width: int) -> Expansion:
        begun.append(at)
        offers.append(drafter.expand(state, level, at, width))
        return offers[-1]

    grow(plan, expand)
    assert len(begun) == 3 and sum(int(at.n[0]) for at in begun) == len(state.branches.chains) > 8
    for level, (at, offer) in enumerate(zip(begun, offers)):
        for start in range(int(at.n[0])):
            hidden = reference(drafter, 5, branch_of(begun, level, start))[-1][-drafter.n_slots :]
            assert_offer(drafter, offer, start, hidden)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 3), st.data())
def test_the_cache_holds_the_committed_text_alone(steps: list[int], slot: int, data: st.DataObject) -> None:
    """However many pairs each step committed and whatever tree it grew, rows equal those of one pass from scratch."""
    drafter = DRAFTER
    n_pairs = sum(steps)
    features, tokens = random_pairs(n_pairs)
    state, n_seen = drafter.open([], 2), 0
    for n_new in steps:
        new = slice(n_seen, n_seen + n_new)
        observe(drafter, state, features[new], tokens[new])
        n_seen += n_new
        last = drafter.expand(state, 0, ROOT, 4)
        for level in range(1, data.draw(st.integers(1, 3))):
            drafter.expand(state, level, starts((n_seen, level - 1, 0, slot), (1, level - 1, 0, 0)), 4)
    scratch = drafter.open([], n_pairs)
    observe(drafter, scratch, features, tokens)
    again = drafter.expand(scratch, 0, ROOT, 4)
    assert (last.token == again.token).all() and (last.logp == again.logp).all() and (last.tier == again.tier).all()
    for found, expected in zip(rows_of(state, drafter.n_slots), rows_of(scratch, drafter.n_slots)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


DRAFTER = make(n_layers=2)


def test_a_plan_of_m_blocks_costs_m_forwards() -> None:
    """The refresh of three new pairs rides with the first block; the second runs all its starts at once."""
    drafter = make(n_layers=2)
    state, _ = drafted(drafter, 9)
    state.forwards.clear()
    features, tokens = random_pairs(3, seed=2)
    observe(drafter, state, features, tokens)
    forest = grow(PRESETS["specblock"], lambda level, at, width: drafter.expand(state, level, at, width))
    assert forest.n[0] > 10
    first, second = state.forwards
    assert first == Forward("first", 12, 1)
    assert (second.kind, second.n_rows) == ("next", 4 * second.n_starts)


def test_asking_again_costs_nothing_and_changes_nothing() -> None:
    """Another plan at the same position: no new pair, no forward, the same candidates, also after a tree."""
    drafter = make(n_layers=2)
    state, first = drafted(drafter, 4)
    drafter.expand(state, 1, starts((2, 0, 0, 1)), 6)
    state.forwards.clear()
    again = drafter.expand(state, 0, ROOT, 6)
    assert (again.token == first.token).all() and (again.logp == first.logp).all()
    assert state.forwards == []
    assert drafter.expand(state, 0, ROOT, 2).token.tolist() == first.token[..., :2].tolist()


def test_long_prompts_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make(n_layers=2)
    whole, expected = drafted(drafter, 11)
    monkeypatch.setattr(branching, "N_CHUNK_ROWS", 20)  # five pairs of four slots
    parts, found = drafted(drafter, 11)
    assert parts.forwards == [Forward("prompt", 20, 0), Forward("prompt", 20, 0), Forward("first", 4, 1)]
    assert (found.token == expected.token).all() and (found.logp == expected.logp).all()
    for a, b in zip(rows_of(parts, 4), rows_of(whole, 4)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_wide_forwards_take_the_fused_kernel_to_the_same_numbers() -> None:
    """Thirty starts are 120 rows, past the switch of attention kernels; each start alone stays below it."""
    drafter = make(n_layers=2)
    state, _ = drafted(drafter, 6)
    rows = [(token, 0, 0, token % 4) for token in range(30)]
    together = drafter.expand(state, 1, starts(*rows), 6)
    assert state.hidden is not None
    hidden = state.hidden[1:].clone()
    for start, row in enumerate(rows):
        drafter.expand(state, 0, ROOT, 6)
        alone = drafter.expand(state, 1, starts(row), 6)
        assert (alone.token[0, 0] == together.token[0, start]).all()
        torch.testing.assert_close(state.hidden[1], hidden[start], rtol=0, atol=1e-12)


def test_reordered_weights_compute_the_same() -> None:
    """Float32 takes reordered weights where the processor has them: 1e-4, some fifty roundings of values below 10."""
    exact = make(n_layers=2)
    single = SpecBlockDrafter(random_net(SpecBlockNet, n_layers=2).float(), EMBED.float(), torch.from_numpy(DRAFT_IDS))
    a, b = drafted(exact, 6)[0], drafted(single, 6)[0]
    for drafter, state in ((exact, a), (single, b)):
        drafter.expand(state, 1, starts((3, 0, 0, 1), (4, 0, 0, 3)), 6)
    assert a.hidden is not None and b.hidden is not None
    torch.testing.assert_close(b.hidden.double(), a.hidden, rtol=0, atol=1e-4)


def test_changed_weights_are_taken_over() -> None:
    drafter = SpecBlockDrafter(random_net(SpecBlockNet).float(), EMBED.float(), torch.from_numpy(DRAFT_IDS))
    _, before = drafted(drafter, 4)
    with torch.no_grad():
        drafter.net.lm_head.weight.neg_()
    drafter.repack()
    _, after = drafted(drafter, 4)
    assert (before.token != after.token).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_offers_sorted_candidates(dtype: torch.dtype) -> None:
    net = random_net(SpecBlockNet, n_layers=2).to(dtype)
    drafter = SpecBlockDrafter(net, EMBED.to(dtype), torch.from_numpy(DRAFT_IDS))
    _, offer = drafted(drafter, 5)
    assert (np.diff(offer.logp.astype(int), axis=-1) <= 0).all() and np.isin(offer.token, DRAFT_IDS).all()
    assert ((offer.tier >= 0) & (offer.tier < 4)).all()


def test_widths_beyond_the_vocabulary_are_padded() -> None:
    drafter = make(n_layers=2)
    state, _ = drafted(drafter, 3)
    offer = drafter.expand(state, 0, ROOT, 40)
    assert (np.sort(offer.token[0, 0, :, :28], axis=-1) == DRAFT_IDS).all()
    assert (offer.token[..., 28:] == -1).all()
    assert drafter.max_width == 28


def test_a_whole_vocabulary_needs_no_map() -> None:
    net = random_net(SpecBlockNet, draft_vocab_size=40)
    bare, mapped = SpecBlockDrafter(net, EMBED), SpecBlockDrafter(net, EMBED, torch.arange(40))
    assert (drafted(bare, 3)[1].token == drafted(mapped, 3)[1].token).all()


def test_wrong_order_is_refused() -> None:
    drafter = make()
    with pytest.raises(ValueError, match="no pair was observed"):
        drafter.expand(drafter.open([], 4), 0, ROOT, 4)
    state, _ = drafted(drafter, 2)
    with pytest.raises(ValueError, match="level 2 was asked for after 1 levels"):
        drafter.expand(state, 2, starts((1, 0, 0, 0)), 4)
