"""EAGLE-3's drafter: float64 parity with a reference without caches (1e-9, sums in another order), a pure cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drafting import DRAFT_IDS, ROOT, branch_of, observe, random_embed, random_net, random_pairs, rows_of, starts
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_nets import candidates_of, eagle3_path, logits_of, rms, sizes_of

from workbench.drafters import branching
from workbench.drafters.base import Forward, best_candidates
from workbench.drafters.branching import BranchState
from workbench.drafters.eagle3 import Eagle3Drafter
from workbench.drafters.nets import Eagle3Net
from workbench.tree import BeamPlan, Expansion, Starts, grow, tree_of

EMBED = random_embed()
NETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual of the normalised stream": {"is_norm_before_residual": True},
    "one key head": {"n_kv_heads": 1},
}


def make(**changes: Any) -> Eagle3Drafter:
    return Eagle3Drafter(random_net(Eagle3Net, **changes), EMBED, torch.from_numpy(DRAFT_IDS))


def reference(drafter: Eagle3Drafter, n_pairs: int, path: list[int]) -> torch.Tensor:
    config = drafter.net.config
    features, tokens = random_pairs(n_pairs)
    weights = drafter.net.state_dict()
    return eagle3_path(weights, sizes_of(config), features, tokens, EMBED, path, config.is_norm_before_residual)


def drafted(drafter: Eagle3Drafter, n_pairs: int) -> tuple[BranchState, Expansion]:
    state = drafter.open([], n_pairs)
    observe(drafter, state, *random_pairs(n_pairs))
    return state, drafter.expand(state, 0, ROOT, 5)


def grown(drafter: Eagle3Drafter, state: BranchState, plan: BeamPlan) -> tuple[list[Starts], list[Expansion]]:
    """Starts and expansions of every level of a plan's tree."""
    begun: list[Starts] = []
    offers: list[Expansion] = []

    def expand(level: int, at: Starts, width: int) -> Expansion:
        begun.append(at)
        offers.append(drafter.expand(state, level, at, width))
        return offers[-1]

    grow(plan, expand)
    return begun, offers


def assert_offer(drafter: Eagle3Drafter, offer: Expansion, start: int, hidden: torch.Tensor) -> None:
    logits = logits_of(drafter.net.state_dict(), sizes_of(drafter.net.config), hidden)
    expected = candidates_of(logits, DRAFT_IDS.tolist(), offer.token.shape[-1])
    assert list(zip(offer.token[0, start, 0].tolist(), offer.logp[0, start, 0].tolist())) == expected
    assert offer.tier[0, start].tolist() == [-1]


@pytest.mark.parametrize("changes", NETS.values(), ids=list(NETS))
def test_every_node_of_a_beam_against_the_reference(changes: dict[str, Any]) -> None:
    """Recycling and branches: each node's row equals the last row of its path run from scratch as a plain sequence."""
    drafter = make(**changes)
    state = drafter.open([], 6)
    features, tokens = random_pairs(6)
    for new in (slice(0, 4), slice(4, 6)):
        observe(drafter, state, features[new], tokens[new])
        begun, offers = grown(drafter, state, BeamPlan(depth=3, top_k=3, budget=12))
        assert [int(at.n[0]) for at in begun] == [1, 3, 3, 3]
        assert state.hidden is not None
        n_rows = 0
        for level, (at, offer) in enumerate(zip(begun, offers)):
            for start in range(int(at.n[0])):
                path = [token for _, token in branch_of(begun, level, start)]
                expected = reference(drafter, new.stop, path)[-1]
                torch.testing.assert_close(state.hidden[n_rows, 0], expected, rtol=0, atol=1e-9)
                assert_offer(drafter, offer, start, expected)
                n_rows += 1


def test_what_is_recycled_is_not_normalised() -> None:
    """The child's row runs on its parent's output before the final norm; after the norm it would be another row."""
    drafter = make()
    state, _ = drafted(drafter, 3)
    drafter.expand(state, 1, starts((7, 0, 0, 0)), 5)
    assert state.hidden is not None
    right = reference(drafter, 3, [7])[-1]
    torch.testing.assert_close(state.hidden[1, 0], right, rtol=0, atol=1e-9)
    net, parent = drafter.net, reference(drafter, 3, [])[-1]
    normed = rms(parent, net.norm.weight, 1e-5)
    with torch.inference_mode():
        attends = state.cache.attends(3, 1, None)
        wrong = net(normed[None, None], EMBED[[7]][None], torch.tensor([[3]]), attends[0])
    assert (wrong[0, 0] - right).abs().max() > 1e-3


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_the_cache_holds_the_committed_text_alone(steps: list[int], data: st.DataObject) -> None:
    """Rows of drafts that were refused leave nothing behind: after any steps, rows equal one pass from scratch."""
    n_pairs = sum(steps)
    features, tokens = random_pairs(n_pairs)
    state, n_seen = DRAFTER.open([], 2), 0
    for n_new in steps:
        new = slice(n_seen, n_seen + n_new)
        observe(DRAFTER, state, features[new], tokens[new])
        n_seen += n_new
        last = DRAFTER.expand(state, 0, ROOT, 4)
        for level in range(1, data.draw(st.integers(1, 4))):
            DRAFTER.expand(state, level, starts((n_seen, level - 1, 0, 0), (1, level - 1, 0, 0)), 4)
    scratch = DRAFTER.open([], n_pairs)
    observe(DRAFTER, scratch, features, tokens)
    again = DRAFTER.expand(scratch, 0, ROOT, 4)
    assert (last.token == again.token).all() and (last.logp == again.logp).all()
    for found, expected in zip(rows_of(state, 1), rows_of(scratch, 1)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


DRAFTER = make()


def test_forwards_of_a_step() -> None:
    """A beam of depth 3 is four forwards, the refresh of five pairs riding with the first."""
    drafter = make()
    state, _ = drafted(drafter, 2)
    state.forwards.clear()
    observe(drafter, state, *random_pairs(5, seed=3))
    grow(BeamPlan(depth=3, top_k=4, budget=20), lambda level, at, width: drafter.expand(state, level, at, width))
    assert state.forwards == [Forward("first", 5, 1)] + [Forward("next", 4, 4)] * 3


def test_long_prompts_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make()
    whole, expected = drafted(drafter, 11)
    monkeypatch.setattr(branching, "N_CHUNK_ROWS", 4)
    parts, found = drafted(drafter, 11)
    assert parts.forwards == [Forward("prompt", 4, 0), Forward("prompt", 4, 0), Forward("first", 3, 1)]
    assert (found.token == expected.token).all() and (found.logp == expected.logp).all()
    for a, b in zip(rows_of(parts, 1), rows_of(whole, 1)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_wider_tree_contains_the_chain() -> None:
    """The chain of rank-1 candidates stands in the beam's tree, so a tree accepts whatever its chain accepts."""
    drafter = make()
    state, _ = drafted(drafter, 5)

    def expand(level: int, at: Starts, width: int) -> Expansion:
        return drafter.expand(state, level, at, width)

    chain = BeamPlan(depth=3, top_k=1, budget=4)
    line = tree_of(chain.finish(grow(chain, expand))).token.tolist()
    wide = BeamPlan(depth=3, top_k=5, budget=80)
    tree, node = tree_of(wide.finish(grow(wide, expand))), -1
    for token in line:
        (found,) = np.flatnonzero((tree.parent == node) & (tree.token == token))
        node = int(found)


def test_candidates_by_hand() -> None:
    """Three of five draft tokens, ids 10..14. exp of the logits: 4 2 2 1 1, sum 10; ln .4 = -.9163 = 938.3 steps of
    1/1024, ln .2 = -1.6094 = 1648.1. The two tied at .2 fall by target id, which here runs against the draft id.
    """
    logits = torch.tensor([[4.0, 2.0, 2.0, 1.0, 1.0]]).log()
    token, logp = best_candidates(logits, 3, torch.tensor([10, 14, 11, 12, 13]))
    assert token.tolist() == [[10, 11, 14]] and logp.tolist() == [[-938, -1648, -1648]]
    token, logp = best_candidates(logits, 7, None)
    assert token.tolist() == [[0, 1, 2, 3, 4, -1, -1]]
    assert (token.dtype, logp.dtype) == (np.int32, np.int16)


def test_equal_logits_fall_by_token_id() -> None:
    """Six equal logits: ln(1/6) = -1.7918 nat = 1834.8 steps."""
    token, logp = best_candidates(torch.zeros(1, 6), 4, None)
    assert token.tolist() == [[0, 1, 2, 3]] and logp.tolist() == [[-1835] * 4]


def test_hopeless_candidates_stop_at_the_least_step() -> None:
    """100 nat below the top is past what int16 holds; -32767 is the floor."""
    token, logp = best_candidates(torch.tensor([[0.0, -100.0, -200.0]]), 3, None)
    assert token.tolist() == [[0, 1, 2]] and logp.tolist() == [[0, -32767, -32767]]
