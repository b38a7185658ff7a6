"""Whatever tree is verified, the text is that of plain decoding: by equality, by enumeration and by law."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_tree, tiny_model, tiny_target, tree_from
from scipy import stats

from workbench.sampling import Chooser, Sampling, gumbel, processed_logprobs, prompt_key
from workbench.target import Target
from workbench.tree import Tree, chain_tree

FAMILIES = ("llama", "qwen2", "qwen3")
SETTINGS = (Sampling(1.0), Sampling(0.7, 0.9), Sampling(1.3, 0.95, 12), Sampling(0.9, 1.0, 5))


def plain_text(target: Target, prompt: list[int], n: int, sampling: Sampling, turn: int = 0) -> list[int]:
    session = target.session(len(prompt) + n, sampling, turn)
    tokens = [session.prefill(prompt).token]
    return tokens + [session.step() for _ in range(n - 1)]


def tree_text(target: Target, prompt: list[int], n: int, sampling: Sampling, draw: Any, turn: int = 0) -> list[int]:
    """n tokens or a few more, by verifying the trees that `draw(n_committed)` returns."""
    session = target.session(len(prompt) + n + 80, sampling, turn)
    tokens = [session.prefill(prompt).token]
    while len(tokens) < n:
        verdict = session.verify(draw(len(tokens)))
        tokens += [*verdict.tokens, verdict.bonus]
    return tokens


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(sampling.temperature, sampling.top_p, sampling.top_k, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_plain_decoding_and_generate(family: str, rng: np.random.Generator) -> None:
    model = tiny_model(family)
    target = Target.from_model(model)
    for _ in range(2):
        prompt = rng.integers(0, 64, int(rng.integers(1, 40))).tolist()
        text = plain_text(target, prompt, 60, Sampling())
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60)
        assert out[0, len(prompt) :].tolist() == text
        for helpful in (text, []):  # trees that hold much of the text, and trees that hold none on purpose

            def draw(t: int, helpful: list[int] = helpful) -> Tree:
                return random_tree(rng, int(rng.integers(0, 20)), 64, helpful[t : t + 6])

            assert tree_text(target, prompt, 60, Sampling(), draw)[:60] == text


@pytest.mark.parametrize("sampling", SETTINGS)
def test_sampled_text_is_the_same_whatever_the_trees(sampling: Sampling, rng: np.random.Generator) -> None:
    """24 seeds: same text by plain steps, by trees that know the text and by trees that do not."""
    target, n_accepted = tiny_target(vocab_size=32, sharpness=2.0), 0
    for seed in range(24):
        prompt, drawn = rng.integers(0, 32, 6).tolist(), with_seed(sampling, seed)
        text = plain_text(target, prompt, 16, drawn, turn=seed % 3)

        def draw(t: int, text: list[int] = text, seed: int = seed) -> Tree:
            return random_tree(rng, int(rng.integers(0, 12)), 32, text[t : t + 4] if seed % 2 else ())

        steps: list[int] = []

        def counted(t: int, steps: list[int] = steps, draw: Any = draw) -> Tree:
            steps.append(t)
            return draw(t)

        got = tree_text(target, prompt, 16, drawn, counted, turn=seed % 3)
        assert got[:16] == text
        n_accepted += len(got) - 1 - len(steps)
    assert n_accepted > 40  # the trees were not all refused


def test_noise_is_keyed_to_the_position_of_the_node() -> None:
    """By hand: the token after the root is position n_committed, after a node of depth d position n_committed + d."""
    target, prompt, sampling = tiny_target(), [5, 6, 7], Sampling(1.0, seed=3)
    session = target.session(50, sampling, turn=2)
    tokens = [session.prefill(prompt).token]
    for drafted in ([], [1], None):
        text = tokens + [0] * 4
        for t in range(len(tokens), len(text)):  # what each position wants, from scratch
            fresh = target.session(50, Sampling()).prefill([*prompt, *text[:t]])
            logits = target.network.logits(fresh.final[-1:])[0]
            noise = gumbel(3, prompt_key(prompt), 2, t, 64)
            text[t] = int((processed_logprobs(logits, sampling) + noise).argmax())
        start = len(tokens)
        verdict = session.verify(chain_tree(text[start : start + 3] if drafted is None else drafted))
        tokens += [*verdict.tokens, verdict.bonus]
        assert tokens == text[: len(tokens)]
    assert len(tokens) >= 7


def small_trees(n_vocab: int) -> list[Tree]:
    """Every shape of 0 to 5 nodes (parents in any order), siblings' tokens spread over the vocabulary."""
    trees = []
    for n in range(6):
        for parents in itertools.product(*[range(-1, i) for i in range(n)]):
            trees.append(tree_from(parents, distinct(parents, n_vocab, len(trees))))
    return trees


def distinct(parents: tuple[int, ...], n_vocab: int, offset: int) -> list[int]:
    """Tokens that differ among siblings."""
    n_seen: dict[int, int] = {}
    tokens = []
    for up in parents:
        n_seen[up] = n_seen.get(up, 0) + 1
        tokens.append((offset + 3 * n_seen[up] + up) % n_vocab)
    return tokens


def test_every_small_tree_leaves_the_text_alone() -> None:
    """V = 8, two tokens: all 154 tree shapes of up to 5 nodes under several seeds each."""
    target, prompt = tiny_target(vocab_size=8, sharpness=1.5), [1, 5, 2]
    trees = small_trees(8)
    assert len(trees) == 154
    for i, tree in enumerate(trees):
        for seed in range(2):
            sampling = Sampling(1.0, seed=100 * i + seed)
            text = plain_text(target, prompt, 3, sampling)
            assert tree_text(target, prompt, 3, sampling, lambda t, tree=tree: tree)[:3] == text


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, 0.9), Sampling(1.2, 1.0, 4)])
def test_law_of_two_tokens_by_enumeration(sampling: Sampling) -> None:
    """V = 8, L = 2: 6,000 seeds against the 64 enumerated probabilities, chi-square at 1e-3; impossible pairs never.

    The choices are made from the target's own logits by the same chooser as in `verify` and `step`; that these two
    make exactly these choices is the business of the tests above and of the check on the first 60 seeds.
    """
    target, prompt, n = tiny_target(vocab_size=8, sharpness=1.5), [1, 5, 2], 6_000
    first = target.session(9, Sampling()).prefill(prompt)
    logits = target.network.logits(first.final[-1:])[0]
    after = torch.stack([
        target.network.logits(target.session(9, Sampling()).prefill([*prompt, a]).final[-1:])[0] for a in range(8)
    ])  # fmt: skip
    law = processed_logprobs(logits, sampling).exp()[:, None] * torch.stack([
        processed_logprobs(row, sampling).exp() for row in after
    ])  # fmt: skip
    counts = np.zeros((8, 8))
    for seed in range(n):
        choose = Chooser(with_seed(sampling, seed), prompt, 0)
        a = choose(logits, 0)
        b = choose(after[a], 1)
        counts[a, b] += 1
        if seed < 60:
            tree = tree_from([-1, -1, 0, 2], [a, (a + 1) % 8, b, 3])
            assert tree_text(target, prompt, 2, with_seed(sampling, seed), lambda t, tree=tree: tree)[:2] == [a, b]
    expected = law.numpy()
    assert expected.sum() == pytest.approx(1, abs=1e-12) and counts[expected == 0].sum() == 0
    likely = expected * n >= 5
    observed, wanted = [*counts[likely], counts[~likely].sum()], [*(n * expected[likely]), n * expected[~likely].sum()]
    if wanted[-1] < 5:  # too little left over for a cell of its own
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = [value * sum(observed) / sum(wanted) for value in wanted]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_a_wider_vocabulary_follows_its_law_through_verification() -> None:
    """V = 40: first tokens after the root of 800 verified trees against the target's law, chi-square at 1e-3."""
    target, prompt, sampling = tiny_target(vocab_size=40), [3, 9], Sampling(1.0)
    root = plain_text(target, prompt, 1, Sampling())[0]
    final = target.session(9, Sampling()).prefill([*prompt, root]).final[-1:]
    law = processed_logprobs(target.network.logits(final)[0], sampling).exp().numpy()
    counts = np.zeros(40)
    tree = tree_from([-1, -1, -1, 0, 1], [0, 7, 21, 5, 5])
    session = target.session(20, sampling)
    session.prefill(prompt)
    for seed in range(800):
        session.length, session.n_committed, session.root = 2, 1, root  # back to the same root
        session._choose = Chooser(with_seed(sampling, seed), prompt, 0)
        verdict = session.verify(tree)
        counts[[*verdict.tokens, verdict.bonus][0]] += 1
    assert stats.chisquare(counts, 800 * law).pvalue > 1e-3


def test_turn_prompt_and_seed_change_the_noise_and_nothing_else_does() -> None:
    target, prompt = tiny_target(sharpness=0.3), [1, 2, 3]
    base = plain_text(target, prompt, 12, Sampling(1.0))
    assert plain_text(target, prompt, 12, Sampling(1.0)) == base
    assert plain_text(target, prompt, 12, Sampling(1.0), turn=1) != base
    assert plain_text(target, prompt, 12, Sampling(1.0, seed=1)) != base


def test_mixing_steps_and_trees_leaves_the_text_alone(rng: np.random.Generator) -> None:
    for sampling in (Sampling(), Sampling(1.0, 0.9, seed=5)):
        target, prompt = tiny_target(), [9, 8]
        text = plain_text(target, prompt, 50, sampling)
        session = target.session(140, sampling)
        tokens = [session.prefill(prompt).token]
        while len(tokens) < 50:
            if rng.random() < 0.5:
                tokens.append(session.step())
            else:
                verdict = session.verify(random_tree(rng, 7, 64, text[len(tokens) : len(tokens) + 3]))
                tokens += [*verdict.tokens, verdict.bonus]
        assert tokens[:50] == text


def test_a_tree_that_holds_a_chain_accepts_no_less(rng: np.random.Generator) -> None:
    """Step by step from the same state: the chain, then the chain with random branches added."""
    target, prompt = tiny_target(), rng.integers(0, 64, 12).tolist()
    text = plain_text(target, prompt, 60, Sampling())
    for t in range(1, 50, 3):
        chain = [*text[t : t + int(rng.integers(0, 4))], *rng.integers(0, 64, 2).tolist()]
        lengths = []
        for tree in (chain_tree(chain), with_branches(rng, chain)):
            session = target.session(120, Sampling())
            session.prefill([*prompt, *text[: t - 1]])
            lengths.append(len(session.verify(tree).path))
        assert lengths[1] >= lengths[0]


def with_branches(rng: np.random.Generator, chain: list[int]) -> Tree:
    """The chain in a tree of 12 nodes, its nodes not the first ones listed."""
    parent, token = [-1, 0], [(chain[0] + 1) % 64, 3]
    for i, word in enumerate(chain):
        parent.append(-1 if i == 0 else len(parent) - 1)
        token.append(word)
    while len(parent) < 12:
        up = int(rng.integers(2, len(parent)))
        siblings = {token[i] for i in range(len(parent)) if parent[i] == up}
        parent.append(up)
        token.append(next(word for word in rng.permutation(64).tolist() if word not in siblings))
    return tree_from(parent, token)


def test_equal_siblings_are_verified_once_each(rng: np.random.Generator) -> None:
    """Unmerged trees may hold a token twice under one parent; the deeper of the two is followed."""
    target, prompt = tiny_target(), [4, 4, 2]
    text = plain_text(target, prompt, 5, Sampling())
    session = target.session(30, Sampling())
    session.prefill(prompt)
    verdict = session.verify(tree_from([-1, -1, 1, 2], [text[1], text[1], text[2], (text[3] + 1) % 64]))
    assert verdict.path == [1, 2] and verdict.tokens == text[1:3] and verdict.bonus == text[3]


@pytest.mark.parametrize("tree", [chain_tree([]), tree_from([-1], [5]), tree_from([-1] * 20, list(range(20)))])
def test_edge_shapes(tree: Tree) -> None:
    """No nodes, one node, and every node at depth 1."""
    target, prompt = tiny_target(vocab_size=20), [4, 4, 2]
    text = plain_text(target, prompt, 8, Sampling())
    assert tree_text(target, prompt, 8, Sampling(), lambda t: tree)[:8] == text


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.13)])
def test_low_precision_divergence_is_a_near_tie(
    dtype: torch.dtype, tolerance: float, rng: np.random.Generator, record_property: Any
) -> None:
    """Forwards of other shapes round differently: where texts part, the two tokens' logits must be nearly equal.

    The gap is taken from the float64 model on the common text. bfloat16 keeps 8 bits: logits of size 4 move by 1/64
    a rounding, and a few roundings add up.
    """
    gaps: list[tuple[int, float]] = []
    n_steps = 0
    low = tiny_target(dtype=dtype, is_exact=False)
    exact = Target.from_model(tiny_model(dtype=dtype).double(), feature_dtype=None)  # the same rounded weights
    for _ in range(3):
        prompt = rng.integers(0, 64, 20).tolist()
        text = plain_text(low, prompt, 60, Sampling())
        other = tree_text(low, prompt, 60, Sampling(), lambda t, text=text: random_tree(rng, 9, 64, text[t : t + 4]))
        n_steps += 60
        t = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), None)
        if t is not None:
            final = exact.session(200, Sampling()).prefill([*prompt, *text[:t]]).final[-1:]
            logits = exact.network.logits(final)[0]
            gaps.append((t, float(logits[text[t]] - logits[other[t]])))
    record_property("divergences", {"dtype": str(dtype), "n_steps": n_steps, "gaps": gaps})
    assert all(abs(gap) < tolerance for _, gap in gaps)
