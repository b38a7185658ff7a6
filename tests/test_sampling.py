"""Position-keyed noise against big-integer arithmetic and published vectors; processors against Hugging Face's."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from workbench.errors import InputError
from workbench.sampling import (
    Chooser,
    Sampling,
    gumbel,
    processed_logprobs,
    prompt_key,
    stream_key,
    token_bits,
    uniform,
)

M64 = (1 << 64) - 1
# First outputs of splitmix64.c (Vigna, public domain) for the seeds 0 and 1234567, as published with many ports of it.
VECTORS = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B],
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
}


def slow_stream(state: int, n: int) -> list[int]:
    """splitmix64.c, line by line, in Python's big integers."""
    out = []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & M64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        out.append(z ^ (z >> 31))
    return out


def slow_key(seed: int, prompt: int, turn: int, position: int) -> int:
    key = 0
    for word in (seed, prompt, turn, position):
        key = slow_stream(key ^ (word & M64), 1)[0]
    return key


def slow_gumbel(seed: int, prompt: int, turn: int, position: int, n: int) -> list[float]:
    bits = slow_stream(slow_key(seed, prompt, turn, position), n)
    return [-math.log(-math.log(((z >> 11) | 1) / 2**53)) for z in bits]


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


@pytest.mark.parametrize("seed", VECTORS)
def test_published_vectors(seed: int) -> None:
    tokens = torch.arange(5)
    assert slow_stream(seed, 5) == VECTORS[seed]
    assert [bits & M64 for bits in token_bits(seed, tokens).tolist()] == VECTORS[seed]
    assert [bits & M64 for bits in token_bits(seed, tokens.numpy()).tolist()] == VECTORS[seed]


@settings(max_examples=100, deadline=None)
@given(*[st.integers(-(2**63), 2**64 - 1)] * 2, st.integers(0, 50), st.integers(0, 10**6))
def test_numpy_torch_and_big_integers_agree(seed: int, prompt: int, turn: int, position: int) -> None:
    key = stream_key(seed, prompt, turn, position)
    assert key == slow_key(seed, prompt, turn, position)
    tokens = torch.arange(40)
    expected = [signed(bits) for bits in slow_stream(key, 40)]
    assert token_bits(key, tokens).tolist() == expected
    with np.errstate(over="raise"):  # wrapping of int64 arrays is silent and meant
        assert token_bits(key, tokens.numpy()).tolist() == expected


def test_gumbel_equals_the_slow_form() -> None:
    """1e-12: two logarithms of two libraries; their last bits may differ."""
    got = gumbel(7, 11, 1, 42, 500)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), slow_gumbel(7, 11, 1, 42, 500), rtol=1e-12, atol=1e-12)


def test_fixed_values() -> None:
    """The noise is part of every recorded text: these numbers must never change."""
    key = prompt_key([1, 2, 3])
    assert key == int.from_bytes(hashlib.sha256(struct.pack("<3q", 1, 2, 3)).digest()[:8], "little")
    assert key == 0x689DE1E73A03E2E2
    assert stream_key(0, key, 0, 0) == 0x5C321843E0DAB718
    expected = [-0.42094657733660534, 0.7110865775060188, -0.6084736226296209]
    np.testing.assert_allclose(gumbel(0, key, 0, 0, 3).numpy(), expected, rtol=1e-12)


def test_uniform_never_reaches_its_ends() -> None:
    bits = torch.tensor([0, -1, -(2**63), 2**63 - 1])
    u = uniform(bits)
    assert u.tolist() == [2**-53, 1 - 2**-53, (2**52 + 1) / 2**53, (2**52 - 1) / 2**53]
    assert torch.isfinite(-torch.log(-torch.log(u))).all()


def test_noise_is_gumbel() -> None:
    """Kolmogorov-Smirnov over 50 streams of 2,000; the mean is Euler's constant, the variance pi^2 / 6 (5 sigma)."""
    noise = torch.cat([gumbel(seed, 5, 0, seed % 7, 2000) for seed in range(50)]).numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    assert abs(noise.mean() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * len(noise))
    assert abs(noise.var() - math.pi**2 / 6) < 0.06


def test_each_field_matters_and_no_two_streams_overlap() -> None:
    base = {"seed": 3, "prompt": 9, "turn": 0, "position": 5}
    rows = [gumbel(**base, n_vocab=64)]
    for field in base:
        rows.append(gumbel(**{**base, field: base[field] + 1}, n_vocab=64))
    rows.append(gumbel(seed=9, prompt=3, turn=0, position=5, n_vocab=64))  # swapped
    values = torch.cat(rows)
    assert len(values.unique()) == len(values)
    correlations = np.corrcoef(torch.stack(rows).numpy()) - np.eye(len(rows))
    assert np.abs(correlations).max() < 0.5  # 64 points: 4 sigma
    assert torch.equal(gumbel(**base, n_vocab=64), gumbel(**base, n_vocab=640)[:64])  # not of the vocabulary's size


def test_prompt_key_is_of_the_content() -> None:
    assert prompt_key([1, 2]) == prompt_key((1, 2)) == prompt_key(np.array([1, 2], np.int32))
    assert len({prompt_key(ids) for ids in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [258], [])}) == 6


def hf_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Hugging Face's own warpers in the order of its `generate`, then softmax."""
    scores = TemperatureLogitsWarper(float(sampling.temperature))(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.softmax(scores[0], -1)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 60),
    st.sampled_from([0.1, 0.7, 1.0, 1.9]),
    st.sampled_from([0, 1, 3, 10, 100]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.booleans(),
)
def test_processing_equals_hugging_face(
    seed: int, n: int, temperature: float, k: int, p: float, has_ties: bool
) -> None:
    """Same support, probabilities to 1e-12 (float64 on both sides, sums in another order)."""
    logits = torch.tensor(np.random.default_rng(seed).normal(0, 3, n))
    logits = logits.round() if has_ties and p == 1 else logits  # ties under top-p fall by sort order: not compared
    sampling = Sampling(temperature, p, k)
    ours, theirs = processed_logprobs(logits, sampling).exp(), hf_probs(logits, sampling)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    assert ours.sum().item() == pytest.approx(1, abs=1e-12)


def test_processing_by_hand() -> None:
    """p = (.5, .3, .15, .05): top-p .79 keeps two; top-k 3, then top-p .6 of what is left, keeps two of the three."""
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3], dtype=torch.float64))
    nucleus = processed_logprobs(logits, Sampling(1.0, 0.79)).exp()
    torch.testing.assert_close(nucleus, torch.tensor([0, 0.625, 0, 0.375], dtype=torch.float64))
    both = processed_logprobs(logits, Sampling(1.0, 0.6, 3)).exp()
    torch.testing.assert_close(both, torch.tensor([0, 0.625, 0, 0.375], dtype=torch.float64))
    assert processed_logprobs(logits, Sampling(1.0, 1e-9)).exp().tolist() == [0, 1, 0, 0]  # one token at least
    assert processed_logprobs(logits, Sampling(1.0, 1.0, 2)).tolist()[0] == -math.inf


@pytest.mark.parametrize("first_look", [1, 2, 256])
def test_the_nucleus_is_found_wherever_it_ends(first_look: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat laws need a longer look: support against cumulative sums of the whole sorted law."""
    monkeypatch.setattr("workbench.sampling._NUCLEUS_FIRST_LOOK", first_look)
    for scale, top_p in itertools.product((0.0, 0.1, 1.0, 10.0), (0.01, 0.5, 0.9, 0.9999)):
        logits = torch.tensor(np.random.default_rng(3).normal(0, scale, 1000))
        probs = np.sort(torch.softmax(logits, -1).numpy())[::-1]
        n_kept = int(np.searchsorted(np.cumsum(probs), top_p)) + 1 if scale else 1000  # equal values stay together
        assert int((processed_logprobs(logits, Sampling(1.0, top_p)) > -math.inf).sum()) == n_kept


def test_removed_tokens_are_never_chosen() -> None:
    logits = torch.linspace(0, 1, 30)
    for seed in range(300):
        assert Chooser(Sampling(1.0, 1.0, 4, seed), [1], 0)(logits, 0) >= 26


def test_greedy_ignores_the_seed() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert {Chooser(Sampling(seed=s), [1], 0)(logits, 0) for s in range(5)} == {1}


def test_chosen_frequencies() -> None:
    """20,000 positions of one stream against the processed law, chi-square at 1e-3."""
    logits = torch.tensor([1.0, 0.2, -0.5, 0.9, -2.0, 0.0])
    sampling = Sampling(0.8, 0.95, 5, seed=4)
    choose = Chooser(sampling, [3, 1], 2)
    counts = np.bincount([choose(logits, position) for position in range(20_000)], minlength=6)
    law = processed_logprobs(logits, sampling).exp().numpy()
    assert counts[law == 0].sum() == 0
    assert stats.chisquare(counts[law > 0], 20_000 * law[law > 0]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e-308}, "temperature"),  # logits divided by it are beyond float64
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 2**63}, "seed"),  # a trace holds 64 bits of it
        ({"seed": -(2**63) - 1}, "seed"),
    ],
)
def test_bad_values_are_named(bad: dict, word: str) -> None:
    with pytest.raises(InputError, match=word):
        Sampling(**bad)


def test_the_coldest_sampling_is_greedy() -> None:
    logits = torch.tensor([2.0, -3.0, 2.001, 1e4, -1e4], dtype=torch.float64)
    for seed in (-(2**63), 2**63 - 1):
        assert Chooser(Sampling(1e-6, seed=seed), [1], 0)(logits, 0) == 3


def test_noise_is_the_same_on_cuda() -> None:
    """Bits equal; noise to 1e-12 (the device's own logarithm)."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tokens = torch.arange(1000)
    assert token_bits(99, tokens.cuda()).cpu().tolist() == token_bits(99, tokens).tolist()
    torch.testing.assert_close(gumbel(1, 2, 3, 4, 1000, "cuda").cpu(), gumbel(1, 2, 3, 4, 1000), atol=1e-12, rtol=1e-12)
