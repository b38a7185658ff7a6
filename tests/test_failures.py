"""Kinds of fault that other projects have had and no other file here tries; `docs/failures.md` lists them all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tree_from
from scipy import stats
from scripted import CountingClock
from tiny_drafters import KINDS, draft_ids_of, random_drafter, random_net

from workbench.decode import decode
from workbench.drafters.base import Drafter
from workbench.sampling import Sampling, gumbel, processed_logprobs, prompt_key, stream_key, token_bits, uniform
from workbench.target import Target
from workbench.training.data import Batch
from workbench.training.objectives import (
    ObjectiveConfig,
    Readings,
    eagle3_objective,
    medusa_objective,
    parallelspec_objective,
    specblock_objective,
)
from workbench.tree import (
    BeamPlan,
    BlockPlan,
    Expansion,
    Plan,
    ProductPlan,
    Starts,
    StaticPlan,
    Tree,
    accept,
    beam_chain,
    block_chain,
    grow,
    product_chain,
    tree_of,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SMALL_PLANS: dict[str, tuple[str, Plan]] = {
    "block": ("specblock", BlockPlan(root_width=2, tier_widths=(1, 2, 2, 0), budget=6)),
    "beam": ("eagle3", BeamPlan(depth=1, top_k=2, budget=5)),
    "static": ("medusa", StaticPlan(((0,), (1,), (0, 0)))),
    "product": ("parallelspec", ProductPlan(budget=5, max_depth=3, width=3)),
    "chain": ("lookup", product_chain(2)),
}


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    return make_target(vocab_size=16, sharpness=2.0)


# ---------------------------------------------------------------------------------------- losslessness


@pytest.mark.parametrize("name", SMALL_PLANS)
def test_the_law_of_drafted_text_by_enumeration(make_target: Any, name: str) -> None:
    """V = 4, positions 1 and 2: 120 texts of the whole loop against the 16 enumerated probabilities, each plan kind.

    That such text equals plain decoding's seed by seed, and its choices the law at 6,000 seeds, is tested elsewhere.
    """
    kind, plan = SMALL_PLANS[name]
    target, prompt, n = make_target(vocab_size=4, n_layers=3), [1, 2, 3, 1, 2], 120
    root = target.session(6, Sampling()).prefill(prompt).token
    law = np.zeros((4, 4))
    first = law_after(target, [*prompt, root])
    for a in range(4):
        law[a] = first[a] * law_after(target, [*prompt, root, a])
    drafter, counts, n_accepted = random_drafter(kind, target), np.zeros((4, 4)), 0
    for seed in range(10 * n):
        if counts.sum() == n:
            break
        episode = run(target, drafter, plan, prompt, Sampling(1.0, seed=seed), 3)
        if episode.tokens[0] == root:  # the law above is of texts that begin so
            counts[episode.tokens[1], episode.tokens[2]] += 1
            n_accepted += sum(row["n_accepted"] for row in episode.steps)
    likely = n * law >= 4
    observed, expected = [*counts[likely], counts[~likely].sum()], [*(n * law[likely]), n * law[~likely].sum()]
    assert counts.sum() == n and n_accepted > n / 20
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def law_after(target: Target, text: Sequence[int]) -> np.ndarray:
    """The target's probabilities [V] after a text."""
    final = target.session(len(text), Sampling()).prefill(text).final[-1:]
    return processed_logprobs(target.network.logits(final)[0], Sampling(1.0)).exp().numpy()


def run(target: Target, drafter: Any, plan: Any, prompt: Sequence[int], sampling: Sampling, n: int) -> Any:
    return decode(
        target, drafter, plan, prompt, sampling=sampling, max_new_tokens=n, stop_ids=(), clock=CountingClock()
    )


def test_a_hundred_thousand_draws_follow_the_law() -> None:
    """V = 64, one position under 100,000 seeds: the noise of all seeds at once, a few rows checked against `gumbel`."""
    n, n_vocab, sampling = 100_000, 64, Sampling(0.9, 0.97, 40)
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, n_vocab))
    logp = processed_logprobs(logits, sampling)
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # output i of stream k is output i + k / golden of stream 0
    prompt, counts = prompt_key(PROMPT), np.zeros(n_vocab)
    for begin in range(0, n, 10_000):
        keys = [stream_key(seed, prompt, 0, 5) for seed in range(begin, begin + 10_000)]
        shift = torch.tensor([(key * inverse + (1 << 63)) % (1 << 64) - (1 << 63) for key in keys])
        noise = -(-uniform(token_bits(0, torch.arange(n_vocab) + shift[:, None])).log()).log()
        # the logarithms of a table and of a row may round differently in their last bit
        torch.testing.assert_close(noise[7], gumbel(begin + 7, prompt, 0, 5, n_vocab), rtol=0, atol=1e-12)
        counts += np.bincount((noise + logp).argmax(-1).numpy(), minlength=n_vocab)
    law = logp.exp().numpy()
    assert counts[law == 0].sum() == 0 and n * law[law > 0].min() > 5
    assert stats.chisquare(counts[law > 0], n * law[law > 0]).pvalue > 1e-3


def test_the_rule_for_drafts_that_were_drawn_fails_for_drafts_that_were_not(target: Target) -> None:
    """A drafter that always takes its best token, verified by min(1, p / q), writes another law; ours writes p.

    The same test of 4,000 draws must refuse the one and pass the other, or it could not tell them apart.
    """
    law, rng, n = law_after(target, PROMPT), np.random.default_rng(3), 4_000
    q = np.random.default_rng(4).dirichlet(np.full(16, 0.5))
    best = int(q.argmax())
    rest = np.maximum(law - q, 0) / np.maximum(law - q, 0).sum()
    wrong = [best if rng.random() < min(1, law[best] / q[best]) else int(rng.choice(16, p=rest)) for _ in range(n)]
    logp, prompt, tree = torch.from_numpy(law).log(), prompt_key(PROMPT), tree_from([-1], [best])
    drawn = []
    for seed in range(n):
        choice = int((logp + gumbel(seed, prompt, 0, 0, 16)).argmax())
        path, bonus = accept(tree, lambda node, choice=choice: choice if node < 0 else 0)
        drawn.append(best if path else bonus)
    assert abs(np.mean(np.array(drawn) == best) - law[best]) < 0.05
    p_right, p_wrong = (stats.chisquare(np.bincount(draws, minlength=16), n * law).pvalue for draws in (drawn, wrong))
    assert p_wrong < 1e-9 and p_right > 1e-3


# ---------------------------------------------------------------------------------------- drafters


class Spy:
    """A drafter that notes what it offered, a list of expansions a step (level 0 begins one)."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.steps = drafter, list[list[Expansion]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def expand(self, state: Any, level: int, starts: Starts, width: int) -> Expansion:
        expansion = self.drafter.expand(state, level, starts, width)
        self.steps += [[]] if level == 0 else []
        self.steps[-1].append(expansion)
        return expansion


def drafted_at(target: Target, drafter: Drafter, plan: Plan, text: Sequence[int]) -> tuple[Tree, list[Expansion]]:
    """What a fresh request offers after a text whose last token is the root: nothing was ever drafted before."""
    spy, rows = Spy(drafter), target.session(len(text), Sampling()).prefill(text[:-1])
    state = drafter.open(list(text[: len(PROMPT)]), len(text))
    drafter.observe(state, rows.features, rows.final, list(text[1:]))
    forest = grow(plan, lambda level, starts, width: spy.expand(state, level, starts, width))
    return tree_of(plan.finish(forest)), spy.steps[0]


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("specblock", (BlockPlan(root_width=4, budget=24), BlockPlan(n_blocks=3, root_width=2, budget=9))),
        ("eagle3", (BeamPlan(depth=3, top_k=3, budget=14), beam_chain(2))),
        ("medusa", (ProductPlan(budget=12), StaticPlan(((0,), (1,), (0, 0))))),
        ("parallelspec", (ProductPlan(budget=12), product_chain(3))),
        ("lookup", (product_chain(10), product_chain(2))),
    ],
)
def test_what_is_offered_depends_on_the_text_alone(target: Target, kind: str, plans: tuple[Plan, Plan]) -> None:
    """At every step of a live run, whatever was accepted and refused before it: all that a fresh request would offer.

    The plans accept different numbers of tokens, so they reach the same text by different ways.
    """
    drafter, sampling = random_drafter(kind, target), Sampling(1.0, seed=3)
    texts, n_accepted = [], 0
    for plan in plans:
        spy = Spy(drafter)
        episode = run(target, spy, plan, PROMPT, sampling, 24)
        assert len(spy.steps) == len(episode.steps) + 1  # the first one ran the prompt
        for row, offered in zip(episode.steps, spy.steps[1:]):
            text = [*PROMPT, *episode.tokens[: row["position"]]]
            _, fresh = drafted_at(target, drafter, plan, text)
            assert len(fresh) == len(offered)
            for a, b in zip(fresh, offered):
                assert (a.token == b.token).all() and (a.logp == b.logp).all() and (a.tier == b.tier).all()
        texts.append(episode.tokens)
        n_accepted += sum(row["n_accepted"] for row in episode.steps)
    assert texts[0] == texts[1] and n_accepted > 0


@pytest.mark.parametrize(
    ("kind", "wide", "chain"),
    [
        ("specblock", BlockPlan(root_width=3, budget=200), block_chain(4)),
        ("eagle3", BeamPlan(depth=3, top_k=4, budget=60), beam_chain(4)),
        ("medusa", ProductPlan(budget=400, max_depth=4, width=3), product_chain(4)),
        ("parallelspec", ProductPlan(budget=400, max_depth=4, width=3), product_chain(4)),
    ],
)
def test_a_tree_with_the_chain_in_it_accepts_no_less(target: Target, kind: str, wide: Plan, chain: Plan) -> None:
    """At every position of the greedy text, from the same state: trees that hold all of the drafter's own chain."""
    drafter = random_drafter(kind, target)
    text = [*PROMPT, *run(target, None, None, PROMPT, Sampling(), 40).tokens]
    n_held = n_more = 0
    for end in range(len(PROMPT) + 1, len(text) - 8):
        trees = [drafted_at(target, drafter, plan, text[:end])[0] for plan in (wide, chain)]
        if not paths_of(trees[1]) <= paths_of(trees[0]):
            continue  # a beam may crowd out its own chain
        n_wide, n_chain = (accepted(tree, text[end:]) for tree in trees)
        assert n_wide >= n_chain
        n_held, n_more = n_held + 1, n_more + (n_wide > n_chain)
    assert n_held > 10 and n_more > 0


def paths_of(tree: Tree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parent.tolist(), tree.token.tolist()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def accepted(tree: Tree, wanted: Sequence[int]) -> int:
    return len(accept(tree, lambda node: wanted[int(tree.depth[node]) if node >= 0 else 0])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_probabilities_of_a_tree_are_those_the_drafter_offered(target: Target, kind: str) -> None:
    """Over the whole draft vocabulary they add up to 1; a node's value is the sum of what its path was offered at.

    Each is rounded by at most half a step of 1/1024 nat, a relative 0.0005, and so is their sum.
    """
    drafter, text = random_drafter(kind, target), [*PROMPT, 7]
    n_draft = len(draft_ids_of(target.vocab_size))
    narrow: dict[str, Plan] = {
        "specblock": BlockPlan(root_width=n_draft, tier_widths=(n_draft,) * 4, budget=300),
        "eagle3": BeamPlan(depth=2, top_k=n_draft, budget=100),
    }
    plan = narrow.get(kind, ProductPlan(budget=200, max_depth=4, width=n_draft))
    tree, offers = drafted_at(target, drafter, plan, text)
    for offer in offers:
        assert (offer.token >= 0).all() and offer.token.shape[-1] == n_draft
        total = np.exp(offer.logp.astype(np.float64) / 1024).sum(-1)
        assert np.abs(total - 1).max() < 0.0006
    sums = [0] * len(tree.token)
    for i in range(len(sums)):
        at = (0, tree.start[i], tree.slot[i], tree.rank[i] - 1)
        offer, parent = offers[tree.level[i]], int(tree.parent[i])
        assert offer.token[at] == tree.token[i]
        sums[i] = int(offer.logp[at]) + (sums[parent] if parent >= 0 else 0)
    assert sums == tree.cum.tolist() and len(set(tree.depth.tolist())) > 1


# ---------------------------------------------------------------------------------------- batching


def ragged_batch(lengths: Sequence[int], hidden: int, vocab: int, n_draft: int) -> Batch:
    """Answers of these lengths, the first three tokens of each its prompt; what pads them is not zero but noise."""
    rng, n, longest = np.random.default_rng(0), len(lengths), max(lengths)
    index = torch.arange(longest)
    is_label = (index >= 2) & (index < torch.tensor(lengths)[:, None] - 1)
    soft_p = torch.from_numpy(rng.dirichlet(np.ones(3), (n, longest)))
    soft_id = torch.from_numpy(rng.permuted(np.tile(np.arange(n_draft), (n, longest, 1)), axis=-1)[..., :3].copy())
    return Batch(
        feat=torch.from_numpy(rng.normal(size=(n, longest, 3 * hidden))),
        final=torch.from_numpy(rng.normal(size=(n, longest, hidden))),
        tok=torch.from_numpy(rng.integers(0, vocab, (n, longest))),
        is_label=is_label,
        in_vocab=is_label & torch.from_numpy(rng.random((n, longest)) < 0.8),
        soft_id=soft_id,
        soft_p=soft_p,
        n_positions=int(is_label.sum()),
    )


def alone(batch: Batch, i: int, length: int) -> Batch:
    """Answer i without the others and without padding."""
    fields = {k: v[i : i + 1, :length] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return Batch(**fields, n_positions=int(batch.is_label[i].sum()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_reads_as_its_answers_one_by_one(kind: str) -> None:
    """Training of three answers of lengths 60, 5 and 33: the first pass's hits and rows are the sums of each alone."""
    hidden, vocab, lengths = 16, 16, (60, 5, 33)
    n_draft = len(draft_ids_of(vocab))
    net = random_net(kind, hidden, vocab, n_draft).requires_grad_(False)
    embed = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    config = ObjectiveConfig(n_steps=1, n_blocks=1)
    make: Any = {
        "specblock": specblock_objective,
        "eagle3": eagle3_objective,
        "medusa": medusa_objective,
        "parallelspec": parallelspec_objective,
    }[kind]
    objective = make(net, embed[draft_ids_of(vocab)] if kind == "medusa" else embed, config)
    batch, sums = ragged_batch(lengths, hidden, vocab, n_draft), Readings()
    together = objective(batch, torch.Generator().manual_seed(0))[1]
    for i, length in enumerate(lengths):
        sums.merge(objective(alone(batch, i, length), torch.Generator().manual_seed(0))[1])
    first_pass = {"specblock": [f"b1s{k}" for k in range(4)], "medusa": [f"s{k}" for k in range(4)]}.get(kind, ["s0"])
    for name in first_pass:  # ParallelSpec's mask rows are drawn at random, and differently
        assert together.rows[name] == sums.rows[name] and together.hit[name] == sums.hit[name]
    assert together.rows[first_pass[0]] > 50 and sum(together.hit[name] for name in first_pass) > 0


# ---------------------------------------------------------------------------------------- the page


def test_the_page_names_tests_that_exist() -> None:
    folder = Path(__file__).parent
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", (folder.parent / "docs" / "failures.md").read_text())
    assert len(named) > 60
    for file, name in named:
        assert f"def {name}(" in (folder / file).read_text(), f"{file} has no {name}"
