"""Published layouts at small sizes with exactly the published names, every kind of broken file, and our own folders."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafting import DRAFT_IDS, ROOT, observe, random_embed, random_net, random_pairs
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workbench import drafters
from workbench.drafters import CATALOGUE, load_drafter
from workbench.drafters.branching import BranchingDrafter
from workbench.drafters.checkpoint import (
    MedusaConfig,
    check_vocab_maps,
    hash_weights,
    load_checkpoint,
    load_net,
    read_published,
    save_checkpoint,
    skeleton,
    vocab_maps,
)
from workbench.drafters.nets import Eagle3Net, MedusaNet, NetConfig, ParallelSpecNet, SpecBlockNet
from workbench.errors import InputError

H, FFN, V, D = 12, 20, 40, 28  # hidden, feed-forward, target and draft vocabulary; 2 heads of 6, 1 of keys
Tensors = dict[str, Tensor]
Config = dict[str, Any]
Change = Callable[[Tensors, Config], object]

ATTENTION = {"q_proj": (12, H), "k_proj": (6, H), "v_proj": (6, H), "o_proj": (H, 12)}
MLP = {"gate_proj": (FFN, H), "up_proj": (FFN, H), "down_proj": (H, FFN)}
LLAMA: Config = {
    "hidden_size": H,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": FFN,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
}


def layer_names(prefix: str, in_size: int) -> dict[str, tuple[int, ...]]:
    """A Llama layer's tensors but its norms before attention."""
    found: dict[str, tuple[int, ...]] = {f"{prefix}.post_attention_layernorm.weight": (H,)}
    for name, (n_out, n_in) in ATTENTION.items():
        found[f"{prefix}.self_attn.{name}.weight"] = (n_out, n_in if name == "o_proj" else in_size)
    return found | {f"{prefix}.mlp.{name}.weight": shape for name, shape in MLP.items()}


def specblock_names() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "input_layer.condition_proj.weight": (H, 3 * H),
        "input_layer.condition_norm.weight": (H,),
        "input_layer.token_norm.weight": (H,),
        "input_layer.position_queries.weight": (4, H),
        "input_layer.query_norm.weight": (H,),
        "input_layer.fuse.weight": (H, 3 * H),
        "shift_proj.0.weight": (H, 2 * H),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
        "rank_head.0.weight": (256, H + 15),
        "rank_head.2.weight": (4, 256),
    }
    for i in range(2):
        found |= layer_names(f"layers.{i}", H) | {f"layers.{i}.input_layernorm.weight": (H,)}
    return found


def eagle3_names(layer: str = "midlayer") -> dict[str, tuple[int, ...]]:
    return layer_names(layer, 2 * H) | {
        "fc.weight": (H, 3 * H),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.input_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
    }


def filled(names: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float16) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {k: (torch.randn(shape, generator=generator) * 0.4).to(dtype) for k, shape in names.items()}


def maps() -> Tensors:
    """`t2d` and `d2t` of DRAFT_IDS, spelled out."""
    t2d = torch.tensor([i in DRAFT_IDS for i in range(V)])
    return {"t2d": t2d, "d2t": torch.tensor([int(token) - i for i, token in enumerate(DRAFT_IDS)])}


def specblock_folder(path: Path, change: Change | None = None, mapping: Tensors | None = None) -> Path:
    """config.json, model.safetensors with buffers, vocab_mapping.pt."""
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMSpecBlock"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "draft_vocab_size": D,
        "diffspec_draft_token_num": 4,
        "rank_classes": 4,
        "num_ttt_blocks": 3,
    }
    tensors = filled(specblock_names()) | maps()
    if change:
        change(tensors, config)
    path.mkdir()
    torch.save(maps() if mapping is None else mapping, path / "vocab_mapping.pt")
    return written(path, tensors, config)


def eagle3_folder(path: Path, change: Change | None = None) -> Path:
    """EAGLE's own layout: config.json, pytorch_model.bin."""
    config = LLAMA | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": D,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    tensors = filled(eagle3_names()) | maps()
    if change:
        change(tensors, config)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, path / "pytorch_model.bin")
    return path


def specforge_folder(path: Path, change: Change | None = None) -> Path:
    """As EAGLE's, under another architecture name, bf16, with the target's embedding."""
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": D,
        "head_dim": 6,
        "rope_theta": 1000000,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    tensors = filled(eagle3_names(), torch.bfloat16) | maps() | {"embed_tokens.weight": EMBED.bfloat16()}
    if change:
        change(tensors, config)
    path.mkdir()
    return written(path, tensors, config)


def speculators_folder(path: Path, change: Change | None = None) -> Path:
    """vLLM speculators: a nested layer configuration, `layers.0.*`."""
    config: Config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "draft_vocab_size": D,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "transformer_layer_config": LLAMA | {"model_type": "llama", "num_hidden_layers": 1, "head_dim": 6},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"]},
        },
    }
    tensors = filled(eagle3_names("layers.0")) | maps() | {"embed_tokens.weight": EMBED.half()}
    if change:
        change(tensors, config)
    path.mkdir()
    return written(path, tensors, config)


def written(path: Path, tensors: Tensors, config: Config) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


EMBED = random_embed()
FOLDERS = {
    "specblock": specblock_folder,
    "eagle": eagle3_folder,
    "specforge": specforge_folder,
    "speculators": speculators_folder,
}


def target(**changes: Any) -> Any:
    values = {
        "name": "tiny",
        "hidden_size": H,
        "vocab_size": V,
        "feature_layers": (2, 3, 5),
        "embed_weight": EMBED,
        "head_weight": EMBED,
    }
    return SimpleNamespace(**(values | changes))


# Layouts


@pytest.mark.parametrize("layout", FOLDERS)
def test_published_layouts_load_and_draft(tmp_path: Path, layout: str) -> None:
    drafter = load_drafter(FOLDERS[layout](tmp_path / "drafter"), target())
    assert isinstance(drafter, BranchingDrafter)
    assert (drafter.name, drafter.kind) == ("drafter", "specblock" if layout == "specblock" else "eagle3")
    assert drafter.net.lm_head.weight.dtype == torch.float64  # the target's
    state = drafter.open([], 8)
    observe(drafter, state, *random_pairs(5))
    offer = drafter.expand(state, 0, ROOT, D)
    for slot in range(drafter.n_slots):
        assert sorted(offer.token[0, 0, slot].tolist()) == DRAFT_IDS.tolist()


@pytest.mark.parametrize("layout", FOLDERS)
def test_every_weight_arrives_under_its_name(tmp_path: Path, layout: str) -> None:
    """Values too: what was written under a published name is what the network holds under it."""
    found = load_checkpoint(FOLDERS[layout](tmp_path / "drafter"))
    names = specblock_names() if layout == "specblock" else eagle3_names()
    dtype = torch.bfloat16 if layout == "specforge" else torch.float16
    layer = "layers.0" if layout == "speculators" else "midlayer"
    expected = filled(names if layout == "specblock" else eagle3_names(layer), dtype)
    assert set(found.state) == set(names)
    for name, weight in found.state.items():
        theirs = name if layout == "specblock" else name.replace("midlayer", layer)
        assert torch.equal(weight, expected[theirs])
    assert found.draft_ids is not None and found.draft_ids.tolist() == DRAFT_IDS.tolist()


def test_the_same_drafter_in_three_layouts_drafts_the_same(tmp_path: Path) -> None:
    """One network written as EAGLE's, SpecForge's and speculators' folder."""
    tensors = filled(eagle3_names())
    renamed = {k.replace("midlayer", "layers.0"): v for k, v in tensors.items()}

    def plain(t: Tensors, c: Config) -> None:
        t.update(renamed if "layers.0.hidden_norm.weight" in t else tensors)
        c.pop("rope_theta", None)
        c.pop("eagle_config", None)
        c.update({"norm_before_residual": False})

    offers = []
    for layout in ("eagle", "specforge", "speculators"):
        drafter = load_drafter(FOLDERS[layout](tmp_path / layout, plain), target())
        assert isinstance(drafter, BranchingDrafter)
        state = drafter.open([], 8)
        observe(drafter, state, *random_pairs(5))
        offer = drafter.expand(state, 0, ROOT, 10)
        offers.append((offer.token.tolist(), offer.logp.tolist()))
    assert offers[0] == offers[1] == offers[2]


def test_switches_and_defaults_of_the_layouts(tmp_path: Path) -> None:
    """RoPE base: the drafter's own, else 10000. Tapped layers: speculators' input of, SpecForge's output of a layer."""
    found = {layout: read_published(make(tmp_path / layout)) for layout, make in FOLDERS.items()}
    configs: dict[str, Any] = {layout: one.checkpoint.config for layout, one in found.items()}
    assert {k: c.rope_theta for k, c in configs.items()} == {
        "specblock": 10000.0,
        "eagle": 10000.0,
        "specforge": 1000000.0,
        "speculators": 10000.0,
    }
    assert [k for k, c in configs.items() if c.is_norm_before_residual] == ["speculators"]
    assert {k: one.feature_layers for k, one in found.items()} == {
        "specblock": None,
        "eagle": None,
        "specforge": (2, 3, 5),
        "speculators": (2, 3, 5),
    }
    assert configs["specblock"].n_ttt_blocks == 3 and configs["specblock"].n_slots == 4


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_plain_rope_in_a_dictionary_is_read(tmp_path: Path, key: str) -> None:
    def change(t: Tensors, c: Config) -> None:
        c[key] = {"rope_type": "default", "rope_theta": 5000.0}

    config = load_checkpoint(eagle3_folder(tmp_path / "drafter", change)).config
    assert isinstance(config, NetConfig)
    assert config.rope_theta == (5000.0 if key == "rope_parameters" else 10000.0)


def drop_buffers(t: Tensors, c: Config) -> None:
    t.pop("t2d"), t.pop("d2t")


def test_specblock_maps_from_either_place(tmp_path: Path) -> None:
    only_file = specblock_folder(tmp_path / "a", drop_buffers)
    only_buffers = specblock_folder(tmp_path / "b")
    (only_buffers / "vocab_mapping.pt").unlink()
    for folder in (only_file, only_buffers):
        ids = load_checkpoint(folder).draft_ids
        assert ids is not None and ids.tolist() == DRAFT_IDS.tolist()
    (only_file / "vocab_mapping.pt").unlink()
    with pytest.raises(InputError, match="missing tensor 't2d', which a draft vocabulary of 28 needs"):
        load_checkpoint(only_file)


@pytest.mark.parametrize("has_maps", [False, True])
def test_a_whole_vocabulary_needs_no_maps(tmp_path: Path, has_maps: bool) -> None:
    def change(t: Tensors, c: Config) -> None:
        drop_buffers(t, c)
        t["lm_head.weight"] = torch.ones(V, H)
        c.pop("draft_vocab_size")
        if has_maps:
            t |= {"t2d": torch.ones(V, dtype=torch.bool), "d2t": torch.zeros(V, dtype=torch.int64)}

    folder = eagle3_folder(tmp_path / "drafter", change)
    ids = load_checkpoint(folder).draft_ids
    assert ids is not None and ids.tolist() == list(range(V))
    drafter = load_drafter(folder, target())
    assert isinstance(drafter, BranchingDrafter)
    assert drafter.target_ids is None and drafter.max_width == V


# Broken checkpoints, each named


def drop(name: str) -> Change:
    return lambda t, c: t.pop(name)


def put(name: str, value: Tensor) -> Change:
    return lambda t, c: t.update({name: value})


def say(key: str, value: Any) -> Change:
    return lambda t, c: c.update({key: value})


def nested(key: str, value: Any) -> Change:
    return lambda t, c: c["transformer_layer_config"].update({key: value})


IDS = torch.from_numpy(DRAFT_IDS)
SWAPPED = maps()["d2t"].clone()
SWAPPED[3], SWAPPED[4] = SWAPPED[4] + 1, SWAPPED[3] - 1  # the same ids, two of them in the wrong order
T2D_MOVED = maps()["t2d"].roll(1)

BROKEN: list[tuple[str, Change, str]] = [
    # names
    ("specblock", drop("shift_proj.0.weight"), "missing tensor 'shift_proj.0.weight'"),
    ("specblock", drop("rank_head.2.weight"), "missing tensor 'rank_head.2.weight'"),
    ("specblock", put("embed_tokens.weight", torch.ones(V, H)), "unexpected tensor 'embed_tokens.weight'"),
    ("specblock", put("layers.2.mlp.up_proj.weight", torch.ones(FFN, H)), "unexpected tensor 'layers.2.mlp.up_proj"),
    ("eagle", drop("midlayer.hidden_norm.weight"), "missing tensor 'midlayer.hidden_norm.weight'"),
    ("eagle", put("layers.0.hidden_norm.weight", torch.ones(H)), "unexpected tensor 'layers.0.hidden_norm.weight'"),
    ("eagle", put("fc.bias", torch.ones(H)), "unexpected tensor 'fc.bias'"),
    ("specforge", drop("norm.weight"), "missing tensor 'norm.weight'"),
    ("speculators", drop("layers.0.mlp.down_proj.weight"), "missing tensor 'layers.0.mlp.down_proj.weight'"),
    ("speculators", put("midlayer.mlp.x", torch.ones(1)), "unexpected tensor 'midlayer.mlp.x'"),
    # shapes, dtypes and values
    ("specblock", put("lm_head.weight", torch.ones(D - 1, H)), r"'lm_head.weight' has the shape \(27, 12\), expected"),
    ("specblock", say("diffspec_draft_token_num", 3), r"'input_layer.position_queries.weight' has the shape \(4, 12\)"),
    ("eagle", put("fc.weight", torch.ones(H, 2 * H)), r"'fc.weight' has the shape \(12, 24\), expected \(12, 36\)"),
    ("eagle", say("num_key_value_heads", 2), r"'midlayer.self_attn.k_proj.weight' has the shape \(6, 24\), expected"),
    ("eagle", put("norm.weight", torch.ones(H).long()), "'norm.weight' has the dtype torch.int64"),
    ("eagle", put("norm.weight", torch.full((H,), torch.nan)), "'norm.weight' holds values that are not finite"),
    ("specforge", put("embed_tokens.weight", torch.ones(V, 2 * H)), r"'embed_tokens.weight' has the shape \(40, 24\)"),
    # vocabulary maps
    ("eagle", drop("d2t"), "missing tensor 'd2t', which a draft vocabulary of 28 needs"),
    ("eagle", put("d2t", IDS), "'d2t' is not an offset map: it points to target id"),
    ("eagle", put("d2t", torch.zeros(D).long()), "'t2d' does not mark exactly the target ids"),
    ("eagle", put("d2t", -torch.arange(D)), "'d2t' is not an offset map: its target ids do not increase"),
    ("eagle", put("d2t", SWAPPED), "'d2t' is not an offset map: its target ids do not increase strictly"),
    ("eagle", put("d2t", maps()["d2t"] - 1 - DRAFT_IDS[0]), "'d2t' is not an offset map: it points to target id"),
    ("eagle", put("d2t", maps()["d2t"].float()), "'d2t' must hold 28 integers, not torch.float32"),
    ("eagle", put("t2d", T2D_MOVED), "'t2d' does not mark exactly the target ids"),
    ("eagle", put("t2d", maps()["t2d"].long()), "'t2d' must hold 40 booleans, not torch.int64"),
    ("eagle", put("t2d", torch.ones(V + 1, dtype=torch.bool)), r"'t2d' has the shape \(41,\), expected \(40,\)"),
    ("specblock", put("t2d", T2D_MOVED), "vocab_mapping.pt: 't2d' differs from the one in the weights file"),
    # configurations
    ("eagle", say("bias", True), "'bias' is set; drafters with it are not supported"),
    ("speculators", say("fc_norm", True), "'fc_norm' is set"),
    ("speculators", say("norm_output", True), "'norm_output' is set"),
    ("speculators", say("norm_before_fc", True), "'norm_before_fc' is set"),
    ("speculators", say("speculators_model_type", "dflash"), "speculators_model_type 'dflash' is not supported"),
    ("speculators", say("transformer_layer_config", None), "'transformer_layer_config' must be a JSON object"),
    ("speculators", nested("num_hidden_layers", 2), "'num_hidden_layers' is 2; this drafter has one layer"),
    ("speculators", nested("rope_scaling", {"rope_type": "llama3"}), "'rope_scaling' .* is not supported"),
    ("speculators", nested("attention_bias", True), "'attention_bias' is set"),
    ("speculators", say("eagle_aux_hidden_state_layer_ids", [1, 2]), "must list three layers"),
    ("specblock", say("rank_classes", 11), "'rank_classes' 11 is not supported"),
    ("specblock", say("hidden_act", "gelu"), "'hidden_act' 'gelu' is not supported"),
    ("specblock", say("has_rank_head", "yes"), "'has_rank_head' must be true or false, not 'yes'"),
    ("eagle", say("hidden_size", None), "'hidden_size' is missing"),
    ("eagle", say("rms_norm_eps", None), "'rms_norm_eps' is missing"),
    ("eagle", say("rms_norm_eps", -1), "'rms_norm_eps' must be a positive number, not -1"),
    ("eagle", say("rope_theta", "10000"), "'rope_theta' must be a positive number, not '10000'"),
    ("eagle", say("hidden_size", 10**12), "'hidden_size' must be an integer from 1 to 1048576"),
    ("eagle", say("num_attention_heads", True), "'num_attention_heads' must be an integer"),
    ("specblock", say("num_hidden_layers", 10**6), "'num_hidden_layers' must be an integer from 1 to 64"),
    ("eagle", say("num_key_value_heads", 3), "2 attention heads cannot share 3 key-value heads"),
    ("eagle", say("head_dim", 5), "'head_dim' is 5; RoPE needs an even one"),
    ("eagle", say("draft_vocab_size", V + 1), "'draft_vocab_size' 41 exceeds 'vocab_size' 40"),
    ("eagle", say("architectures", ["MambaForCausalLM"]), "no drafter is known by the architectures"),
    ("eagle", say("kind", "falcon"), "kind 'falcon' is not one of parallelspec, medusa"),
]


@pytest.mark.parametrize(("layout", "change", "sentence"), BROKEN, ids=[sentence for *_, sentence in BROKEN])
def test_broken_checkpoints_are_named(tmp_path: Path, layout: str, change: Change, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_checkpoint(FOLDERS[layout](tmp_path / "broken", change))


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = eagle3_folder(tmp_path / "drafter")
    with pytest.raises(InputError, match="nowhere is not a folder"):
        load_checkpoint(tmp_path / "nowhere")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="holds neither model.safetensors nor pytorch_model.bin"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(InputError, match="config.json must hold a JSON object"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{" * 100000)
    with pytest.raises(InputError, match="config.json cannot be read as JSON"):
        load_checkpoint(folder)
    (folder / "config.json").write_text(" " * ((1 << 20) + 1))
    with pytest.raises(InputError, match="config.json is larger than"):
        load_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="config.json is missing"):
        load_checkpoint(folder)


# Hostile files: refused before anything is allocated


def header(entries: Any, n_claimed: int | None = None, data: bytes = b"") -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if n_claimed is None else n_claimed) + raw + data


def entry(shape: list[Any], start: int, stop: int, kind: str = "F32") -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


HUGE = 1 << 40
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "its header claims -1 bytes"),
    "header past the end": (header({}, HUGE), f"its header claims {HUGE} bytes"),
    "header past the limit": (header(b" " * (2 << 20)), f"its header claims {2 << 20} bytes"),
    "not JSON": (header(b"PK\x03\x04 nothing like it"), "its header is malformed"),
    "deep JSON": (header(b'{"a":' * 50000), "its header is malformed"),
    "a list": (header([1, 2]), "its header is malformed"),
    "huge tensor": (header({"a": entry([HUGE, HUGE], 0, 4)}, data=b"1234"), "tensor 'a' has 4 bytes"),
    "huge offsets": (header({"a": entry([HUGE], 0, 4 * HUGE)}, data=b"1234"), "do not fill the file"),
    "negative shape": (header({"a": entry([-1, -1], 0, 4)}, data=b"1234"), "malformed shape or offset"),
    "fractional shape": (header({"a": entry([1.0], 0, 4)}, data=b"1234"), "malformed shape or offset"),
    "unknown dtype": (header({"a": entry([4], 0, 4, "F8_E4M3")}, data=b"1234"), "unsupported dtype F8_E4M3"),
    "overlap": (
        header({"a": entry([1], 0, 4), "b": entry([1], 0, 4), "c": entry([1], 8, 12)}, data=b"1" * 12),
        "do not fill the file",
    ),
    "bytes left over": (header({"a": entry([1], 0, 4)}, data=b"12345678"), "do not fill the file"),
}


@pytest.mark.parametrize(("content", "sentence"), HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_safetensors(tmp_path: Path, content: bytes, sentence: str) -> None:
    folder = specblock_folder(tmp_path / "drafter")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        load_checkpoint(folder)


class Runs:
    """A pickle that would run code."""

    def __reduce__(self) -> Any:
        return (print, ("this must never be printed",))


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def compressed(content: bytes) -> bytes:
    """The same archive with its records deflated, as no PyTorch writes it: a small file could claim a large one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


def test_hostile_pickles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = eagle3_folder(tmp_path / "drafter")
    stretched = torch.ones(1).expand(1 << 20, 1 << 20)  # four bytes that claim four terabytes
    for content, sentence in (
        (b"not an archive", "cannot be read as PyTorch weights"),
        (saved({"fc.weight": Runs()}), "cannot be read as PyTorch weights"),
        (saved({"a": torch.ones(3)}, _use_new_zipfile_serialization=False), "cannot be read as PyTorch weights"),
        (compressed(saved({"a": torch.zeros(1 << 16)})), "holds compressed records"),
        (saved([torch.ones(3)]), "must hold a dictionary from names to tensors"),
        (saved({"a": {"b": torch.ones(3)}}), "must hold a dictionary from names to tensors"),
        (saved({"fc.weight": torch.ones(H, 3 * H).to_sparse()}), "tensor 'fc.weight' has the unsupported layout"),
        (saved({"fc.weight": stretched}), "its tensors claim more bytes than the file has"),
    ):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(InputError, match=sentence):
            load_checkpoint(folder)
    assert capsys.readouterr().out == ""


def test_a_hostile_vocabulary_map(tmp_path: Path) -> None:
    folder = specblock_folder(tmp_path / "drafter", drop_buffers)
    for content, sentence in (
        (saved({"t2d": Runs(), "d2t": Runs()}), "vocab_mapping.pt cannot be read as PyTorch weights"),
        (saved({"t2d": maps()["t2d"]}), "vocab_mapping.pt: missing tensor 'd2t'"),
        (saved(maps() | {"more": torch.ones(1)}), "vocab_mapping.pt: unexpected tensor 'more'"),
        (saved(maps() | {"d2t": torch.zeros(2).long()}), "'d2t' must hold 28 integers"),
    ):
        (folder / "vocab_mapping.pt").write_bytes(content)
        with pytest.raises(InputError, match=sentence):
            load_checkpoint(folder)


# Vocabulary maps


def test_random_vocabularies_survive_the_maps(rng: np.random.Generator) -> None:
    """Offsets, not ids: draft id + d2t[draft id] is the target id, and t2d is true exactly there."""
    for _ in range(20):
        n_vocab = int(rng.integers(1, 60))
        ids = np.sort(rng.choice(n_vocab, int(rng.integers(1, n_vocab + 1)), replace=False))
        t2d, d2t = vocab_maps(ids, n_vocab)
        assert (np.arange(len(ids)) + d2t.numpy()).tolist() == ids.tolist()
        assert np.flatnonzero(t2d).tolist() == ids.tolist()
        assert check_vocab_maps(d2t, t2d, len(ids), n_vocab, "test").tolist() == ids.tolist()


# Our own folders


NETS: dict[str, nn.Module] = {
    "specblock": random_net(SpecBlockNet, n_layers=2, n_slots=3),
    "eagle3": random_net(Eagle3Net, is_norm_before_residual=True, target_hidden_size=16),
    "parallelspec": random_net(ParallelSpecNet),
    "medusa": MedusaNet(4, 2, H, None),
}


@pytest.mark.parametrize("kind", NETS)
def test_saved_drafters_come_back(tmp_path: Path, kind: str) -> None:
    """Sizes exactly; weights as fp16 rounds them; `extra` beside them."""
    net = NETS[kind]
    extra = {"target_vocab_size": V, "n_steps": 17} if kind == "medusa" else {"n_steps": 17}
    for _ in range(2):  # the second time over the first
        save_checkpoint(tmp_path / "drafter", kind, net, DRAFT_IDS, extra)
    found = load_checkpoint(tmp_path / "drafter")
    assert found.kind == kind
    assert found.draft_ids is not None and found.draft_ids.tolist() == DRAFT_IDS.tolist()
    assert found.config == (MedusaConfig(4, 2, H, None) if kind == "medusa" else net.config) or kind != "medusa"
    again = load_net(found, torch.float64)
    for (name, a), (other, b) in zip(net.state_dict().items(), again.state_dict().items()):
        assert name == other and torch.equal(a.half().double(), b)
    assert not again.training and not any(p.requires_grad for p in again.parameters())
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["n_steps"] == 17
    files = {"config.json", "model.safetensors"} | ({"vocab_mapping.pt"} if kind == "specblock" else set())
    assert {p.name for p in (tmp_path / "drafter").iterdir()} == files
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {t.dtype for k, t in stored.items() if k not in ("t2d", "d2t")} == {torch.float16}


@pytest.mark.parametrize("switch", ["has_layer_shift", "has_prefix_broadcast", "has_rank_head"])
def test_ablations_come_back_and_draft(tmp_path: Path, switch: str) -> None:
    net = random_net(SpecBlockNet, n_layers=2, **{switch: False})
    save_checkpoint(tmp_path / "drafter", "specblock", net, DRAFT_IDS)
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())[switch] is False
    drafter = load_drafter(tmp_path / "drafter", target())
    assert isinstance(drafter, BranchingDrafter)
    assert getattr(drafter.net.config, switch) is False
    assert drafter.has_tiers is (switch != "has_rank_head")


def test_specblock_folders_are_in_the_published_layout(tmp_path: Path) -> None:
    """The names of the published layout, no more: what loads here loads there."""
    save_checkpoint(tmp_path / "drafter", "specblock", random_net(SpecBlockNet, n_layers=2), DRAFT_IDS)
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    sizes = {k: tuple(v.shape) for k, v in stored.items()}
    assert set(sizes) == set(specblock_names()) | {"t2d", "d2t"}
    mapping = torch.load(tmp_path / "drafter" / "vocab_mapping.pt", weights_only=True)
    assert torch.equal(mapping["d2t"], maps()["d2t"]) and torch.equal(mapping["t2d"], maps()["t2d"])
    assert torch.equal(stored["d2t"], maps()["d2t"]) and torch.equal(stored["t2d"], maps()["t2d"])


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    net = random_net(Eagle3Net)
    with pytest.raises(InputError, match="may not overwrite hidden_size, vocab_size"):
        save_checkpoint(tmp_path / "a", "eagle3", net, DRAFT_IDS, {"hidden_size": 1, "vocab_size": 2, "note": 3})
    with pytest.raises(InputError, match="target ids do not increase"):
        save_checkpoint(tmp_path / "a", "eagle3", net, DRAFT_IDS[::-1])
    with pytest.raises(InputError, match="needs 'target_vocab_size'"):
        save_checkpoint(tmp_path / "a", "medusa", NETS["medusa"], DRAFT_IDS)
    with torch.no_grad():
        net.fc.weight[0, 0] = 1e5
    with pytest.raises(InputError, match="'fc.weight' has values that fp16 cannot hold"):
        save_checkpoint(tmp_path / "a", "eagle3", net, DRAFT_IDS)
    assert not (tmp_path / "a" / "config.json").exists()


def test_hashes_tell_weights_apart() -> None:
    state = NETS["eagle3"].state_dict()
    other = {k: v.clone() for k, v in state.items()}
    assert hash_weights(state, DRAFT_IDS) == hash_weights(dict(reversed(other.items())), DRAFT_IDS)
    other["norm.weight"][0] += 1e-6
    ids = DRAFT_IDS.copy()
    ids[0] += 1
    assert (
        len({hash_weights(s, i) for s, i in ((state, DRAFT_IDS), (other, DRAFT_IDS), (state, ids), (state, None))}) == 4
    )


# The catalogue and the fit to a target


def test_unknown_drafters_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match="'eagel3' is neither a drafter .specblock, eagle3, .* nor a checkpoint folder"
    ):
        load_drafter("eagel3", target())
    monkeypatch.setattr(drafters, "shipped_folder", lambda name: tmp_path / name)
    for name in CATALOGUE:
        if name != "lookup":
            with pytest.raises(InputError, match=f"The weights of the drafter {name} are not installed"):
                load_drafter(name, target())
    assert load_drafter("lookup", target()).kind == "lookup"


def test_catalogue_names_load_shipped_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "shipped_folder", lambda name: tmp_path / name)
    for kind, net in NETS.items():
        if kind == "eagle3":
            net = random_net(Eagle3Net)
        extra = {"target_vocab_size": V} if kind == "medusa" else {}
        save_checkpoint(tmp_path / kind, kind, net, DRAFT_IDS, extra)
        drafter = load_drafter(kind, target())
        assert (drafter.name, drafter.kind, len(drafter.weights_hash)) == (kind, kind, 64)


def test_a_dtype_of_its_own(tmp_path: Path) -> None:
    drafter = load_drafter(eagle3_folder(tmp_path / "drafter"), target(), torch.float32)
    assert isinstance(drafter, BranchingDrafter)
    assert drafter.net.fc.weight.dtype == torch.float32 == drafter.embed_weight.dtype


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        ("specblock", {"hidden_size": 16}, "specblock drafter drafter is made for features of width 36, tiny has 48"),
        ("eagle", {"vocab_size": 41}, "eagle3 drafter drafter is made for a vocabulary of 40, tiny has 41"),
        ("specforge", {"feature_layers": (1, 2, 4)}, r"features of the layers \(2, 3, 5\), tiny has \(1, 2, 4\)"),
        ("speculators", {"feature_layers": (3, 4, 6)}, r"features of the layers \(2, 3, 5\), tiny has \(3, 4, 6\)"),
        ("specforge", {"embed_weight": EMBED + 0.1}, "carries an 'embed_tokens.weight' unlike the embedding of tiny"),
    ],
)
def test_drafters_of_another_target(tmp_path: Path, layout: str, changes: Config, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_drafter(FOLDERS[layout](tmp_path / "drafter"), target(**changes))


def test_features_may_be_wider_than_the_drafter_but_not_its_embedding(tmp_path: Path) -> None:
    def change(t: Tensors, c: Config) -> None:
        c["target_hidden_size"] = 16
        t["fc.weight"] = torch.ones(H, 48)

    with pytest.raises(InputError, match="made for a hidden size of 12, tiny has 16"):
        load_drafter(eagle3_folder(tmp_path / "drafter", change), target(hidden_size=16))


# Real sizes, without a byte of weights

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "n_heads": 32,
    "n_kv_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}


def big_layer(prefix: str, in_size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.input_layernorm.weight": (4096,),
        f"{prefix}.post_attention_layernorm.weight": (4096,),
        f"{prefix}.self_attn.q_proj.weight": (4096, in_size),
        f"{prefix}.self_attn.k_proj.weight": (1024, in_size),
        f"{prefix}.self_attn.v_proj.weight": (1024, in_size),
        f"{prefix}.self_attn.o_proj.weight": (4096, 4096),
        f"{prefix}.mlp.gate_proj.weight": (14336, 4096),
        f"{prefix}.mlp.up_proj.weight": (14336, 4096),
        f"{prefix}.mlp.down_proj.weight": (4096, 14336),
    }


def shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    assert all(p.is_meta for p in net.parameters())
    return {k: tuple(v.shape) for k, v in net.state_dict().items()}


def test_specblock_for_llama_8b() -> None:
    """Every published shape, and the 702.6 million parameters the shapes add up to."""
    net = skeleton("specblock", NetConfig(**LLAMA_8B, n_layers=2, n_slots=4))
    expected = {
        "input_layer.condition_proj.weight": (4096, 12288),
        "input_layer.condition_norm.weight": (4096,),
        "input_layer.token_norm.weight": (4096,),
        "input_layer.position_queries.weight": (4, 4096),
        "input_layer.query_norm.weight": (4096,),
        "input_layer.fuse.weight": (4096, 12288),
        "shift_proj.0.weight": (4096, 8192),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
        "rank_head.0.weight": (256, 4111),
        "rank_head.2.weight": (4, 256),
    }
    expected |= big_layer("layers.0", 4096) | big_layer("layers.1", 4096)
    assert shapes(net) == expected
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 702.6


def test_eagle3_for_llama_8b() -> None:
    net = skeleton("eagle3", NetConfig(**LLAMA_8B))
    expected = {
        "fc.weight": (4096, 12288),
        "midlayer.hidden_norm.weight": (4096,),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
    }
    assert shapes(net) == expected | big_layer("midlayer", 8192)
