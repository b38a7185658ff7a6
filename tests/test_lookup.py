"""Prompt lookup: hand-computed copies, a brute-force reference, and no token made up by padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.drafters.base import LOGP_MIN
from workbench.drafters.lookup import LookupDrafter, LookupState
from workbench.errors import InputError
from workbench.tree import Starts, accept, grow, product_chain, tree_of

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def root() -> Starts:
    plan = product_chain(1)
    return plan.starts(plan.seed(1), 0)


def committed(drafter: LookupDrafter, prompt: list[int], *steps: list[int]) -> LookupState:
    """The state after prefill and the given commits, handed over as decoding does: the prompt's own pairs first."""
    state = drafter.open(prompt, capacity=100)
    first, *later = steps
    drafter.observe(state, None, None, prompt[1:] + first)
    for tokens in later:
        drafter.observe(state, None, None, tokens)
    return state


def copied(drafter: LookupDrafter, state: LookupState) -> list[int]:
    token = drafter.expand(state, 0, root(), 1).token[0, 0, :, 0]
    n = int((token >= 0).sum())
    assert (token[n:] == -1).all()
    return token[:n].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3]),  # trigram 1 2 3 at the start; the copy ends with the text
        ([7, 1, 9, 5, 1, 8, 1], [8, 1]),  # only the unigram repeats: the latest earlier 1 counts, not the first
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # two earlier bigrams 1 2: the latest
        (
            [3, 1, 2, 9, 4, 1, 2, 8, 3, 1, 2],
            [9, 4, 1, 2, 8, 3, 1, 2],
        ),  # 3 1 2 beats the later 1 2
        ([5, 5, 5], [5]),  # an occurrence may overlap the suffix: 5 5 at index 0 goes on with index 2
        ([1, 2, 3], []),
        ([4], []),
    ],
)
def test_copy_by_hand(text: list[int], expected: list[int]) -> None:
    drafter = LookupDrafter(n_slots=10)
    assert copied(drafter, committed(drafter, text[:1], text[1:])) == expected
    assert copied(drafter, committed(drafter, text[: len(text) // 2 + 1], text[len(text) // 2 + 1 :])) == expected


def brute_force(text: list[int], max_ngram: int, n_slots: int) -> list[int]:
    """Every n from the longest, every earlier place from the latest."""
    for n in range(min(max_ngram, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                return text[end : end + n_slots]
    return []


@given(texts, texts, st.integers(1, 4), st.integers(1, 5))
def test_equals_brute_force_at_every_step(prompt: list[int], answer: list[int], max_ngram: int, n_slots: int) -> None:
    drafter = LookupDrafter(max_ngram=max_ngram, n_slots=n_slots)
    state = drafter.open(prompt, capacity=100)
    drafter.observe(state, None, None, prompt[1:])
    assert copied(drafter, state) == brute_force(prompt, max_ngram, n_slots)
    for i, token in enumerate(answer):
        drafter.observe(state, None, None, [token])
        assert copied(drafter, state) == brute_force(prompt + answer[: i + 1], max_ngram, n_slots)


@given(texts, texts, st.data())
def test_the_cut_into_steps_does_not_matter(prompt: list[int], answer: list[int], data: st.DataObject) -> None:
    drafter = LookupDrafter()
    cut = data.draw(st.integers(0, len(answer)))
    one, two = committed(drafter, prompt, answer), committed(drafter, prompt, answer[:cut], answer[cut:])
    assert one.index.tokens == two.index.tokens == prompt + answer
    assert copied(drafter, one) == copied(drafter, two)


def test_expansion_layout() -> None:
    drafter = LookupDrafter(n_slots=4)
    state = committed(drafter, [1, 2, 3], [1])
    got = drafter.expand(state, 0, root(), 2)
    assert got.token.tolist() == [[[[2, -1], [3, -1], [1, -1], [-1, -1]]]]
    assert got.logp.tolist() == [[[[0, LOGP_MIN]] * 3 + [[LOGP_MIN] * 2]]]
    assert got.tier.tolist() == [[[-1] * 4]]
    assert (got.token.dtype, got.logp.dtype, got.tier.dtype) == (np.int32, np.int16, np.int8)
    assert state.forwards == []


def test_padding_is_never_a_token() -> None:
    """Token 0 is a token, padding is not: a short copy gives a short tree; a target that wants 0 accepts nothing."""
    drafter = LookupDrafter(n_slots=5)
    state = committed(drafter, [7, 8, 9], [7])
    plan = product_chain(5)
    tree = tree_of(plan.finish(grow(plan, lambda level, starts, width: drafter.expand(state, level, starts, width))))
    assert tree.token.tolist() == [8, 9, 7]
    assert accept(tree, lambda node: 0) == ([], 0)
    nothing = committed(drafter, [7, 8, 9], [6])
    tree = tree_of(plan.finish(grow(plan, lambda level, starts, width: drafter.expand(nothing, level, starts, width))))
    assert len(tree.token) == 0


def test_tokens_that_contradict_the_prompt_are_refused() -> None:
    drafter = LookupDrafter()
    state = drafter.open([1, 2, 3], capacity=10)
    with pytest.raises(ValueError, match="token 9 at index 2 contradicts the prompt's 3"):
        drafter.observe(state, None, None, [2, 9])


def test_bad_settings_and_levels() -> None:
    with pytest.raises(InputError, match="at least 1"):
        LookupDrafter(max_ngram=0)
    with pytest.raises(InputError, match="at least 1"):
        LookupDrafter(n_slots=0)
    drafter = LookupDrafter()
    with pytest.raises(InputError, match="one level only"):
        drafter.expand(drafter.open([1], 10), 1, root(), 1)
