"""Drafter checkpoints: published layouts read strictly, our own written and read back.

| layout | files | names |
|---|---|---|
| SpecBlock | config.json, model.safetensors, vocab_mapping.pt | as in `nets` |
| EAGLE-3, EAGLE's and SpecForge's | config.json, pytorch_model.bin or model.safetensors | `midlayer.*` |
| EAGLE-3, vLLM speculators | config.json with a nested `transformer_layer_config`, model.safetensors | `layers.0.*` |
| ours | config.json, model.safetensors (fp16) | SpecBlock's and EAGLE's; ParallelSpec and Medusa as in `nets` |

Strict: a missing, extra or misshapen tensor, a vocabulary map that is not one, or a switch that changes the network in
a way not built here is an InputError that names it. Nothing is allocated for a claim before it was checked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.drafters.nets import (
    N_RANK_TIERS,
    Eagle3Net,
    MedusaNet,
    NetConfig,
    ParallelSpecNet,
    SpecBlockNet,
)
from workbench.drafters.tensorfile import TensorFile, read_json
from workbench.errors import InputError

KINDS = ("specblock", "eagle3", "parallelspec", "medusa")
MAX_SIZE = 1 << 20  # no width, vocabulary or count of a drafter is larger
MAX_LAYERS = 64
SWITCHES = ("has_layer_shift", "has_prefix_broadcast", "has_rank_head")
EMBED = "embed_tokens.weight"


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of Medusa heads; `vocab_size` None: the target's own head serves every head."""

    n_heads: int
    n_blocks: int
    hidden_size: int
    vocab_size: int | None = None


Config = NetConfig | MedusaConfig


class Checkpoint(NamedTuple):
    """A network's kind, sizes, weights (in the file's dtype) and the target ids of its draft vocabulary, sorted.

    `draft_ids` is int64 [V_d]; None where the drafter scores the target's whole vocabulary through the target's head.
    """

    kind: str
    config: Config
    state: dict[str, Tensor]
    draft_ids: np.ndarray | None


class Published(NamedTuple):
    """A checkpoint with what only its fit to a target needs."""

    checkpoint: Checkpoint
    embed: Tensor | None  # an embedding the file carries [V, H]; the target's is used, so it must be the same
    feature_layers: tuple[int, ...] | None  # the tapped layers it names, as Hugging Face hidden_states entries


def build_net(kind: str, config: Config) -> nn.Module:
    """The network of that kind with fresh weights, on the current default device."""
    if isinstance(config, MedusaConfig):
        return MedusaNet(config.n_heads, config.n_blocks, config.hidden_size, config.vocab_size)
    return {"specblock": SpecBlockNet, "eagle3": Eagle3Net, "parallelspec": ParallelSpecNet}[kind](config)


class _NoValues(TorchFunctionMode):
    """Leaves new parameters without values: on the meta device, giving them some imports torch's compiler (seconds)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


def skeleton(kind: str, config: Config) -> nn.Module:
    """The network of that kind on the meta device: names and shapes, no memory."""
    with torch.device("meta"), _NoValues():
        return build_net(kind, config)


def load_net(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """The checkpoint's network in evaluation mode and without gradients."""
    net = skeleton(checkpoint.kind, checkpoint.config)
    moved = {id(v): v.to(device=device, dtype=dtype) for v in checkpoint.state.values()}  # what is shared stays shared
    state = {k: moved[id(v)] for k, v in checkpoint.state.items()}
    net.load_state_dict(state, strict=True, assign=True)
    return net.eval().requires_grad_(False)


def hash_weights(state: Mapping[str, Tensor], draft_ids: np.ndarray | None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the weights and the draft vocabulary."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    if draft_ids is not None:
        digest.update(np.ascontiguousarray(draft_ids, dtype=np.int64).tobytes())
    return digest.hexdigest()


# Writing


def save_checkpoint(
    path: str | os.PathLike[str],
    kind: str,
    net: nn.Module,
    draft_ids: np.ndarray | None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter folder: fp16 weights, the vocabulary map as `t2d` and `d2t`, and config.json with `extra` keys.

    draft_ids int64 [V_d]: sorted target ids of the draft vocabulary. Medusa heads on the target's whole head have none;
    those on a part of it need `extra` to hold "target_vocab_size", which their network does not know. Files are
    replaced one by one, each whole. Raises InputError on weights that fp16 cannot hold or `extra` keys that would
    overwrite a size.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: _to_half(k, v) for k, v in net.state_dict().items()}
    config = _config_dict(kind, net)
    if draft_ids is not None:
        if kind == "medusa":
            config["draft_vocab_size"] = len(draft_ids)
        n_vocab = (extra or {}).get("target_vocab_size") if kind == "medusa" else config["vocab_size"]
        if n_vocab is None:
            raise InputError("a Medusa drafter with a draft vocabulary needs 'target_vocab_size' beside it.")
        t2d, d2t = vocab_maps(draft_ids, n_vocab)
        tensors |= {"t2d": t2d, "d2t": d2t}
        if kind == "specblock":
            _replace(folder / "vocab_mapping.pt", lambda p: torch.save({"t2d": t2d, "d2t": d2t}, p))
    taken = sorted(set(config) & set(extra or {}))
    if taken:
        raise InputError(f"extra configuration may not overwrite {', '.join(taken)}.")
    text = json.dumps(config | dict(extra or {}), indent=1, sort_keys=True)
    _replace(folder / "model.safetensors", lambda p: save_file(tensors, str(p)))
    _replace(folder / "config.json", lambda p: p.write_text(text + "\n", encoding="utf-8"))


def vocab_maps(draft_ids: np.ndarray, vocab_size: int) -> tuple[Tensor, Tensor]:
    """`t2d` bool [V] and the offsets `d2t` int64 [V_d] of sorted target ids."""
    ids = torch.from_numpy(np.array(draft_ids, dtype=np.int64))
    d2t = ids - torch.arange(len(ids))
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    check_vocab_maps(d2t, t2d, len(ids), vocab_size, "draft vocabulary")
    return t2d, d2t


def _to_half(name: str, weight: Tensor) -> Tensor:
    half = weight.detach().cpu().to(torch.float16).contiguous()
    if not torch.isfinite(half).all():
        raise InputError(f"tensor '{name}' has values that fp16 cannot hold.")
    return half


def _replace(path: Path, write: Any) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def _config_dict(kind: str, net: Any) -> dict[str, Any]:
    """config.json of our own folders: the published keys, and `kind` where nothing was published."""
    if kind == "medusa":
        n_parts = len(net.heads[0])
        full = net.has_full_heads
        return {
            "kind": "medusa",
            "n_heads": net.n_heads,
            "n_blocks": n_parts - full,
            "hidden_size": net.heads[0][0].linear.in_features,
            "vocab_size": net.heads[0][-1].out_features if full else None,
        }
    c: NetConfig = net.config
    found: dict[str, Any] = {
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
        "model_type": "llama",
        "tie_word_embeddings": False,
        "num_hidden_layers": c.n_layers if kind == "specblock" else 1,
    }
    if c.target_hidden_size:
        found["target_hidden_size"] = c.target_hidden_size
    if kind == "specblock":
        found |= {
            "architectures": ["LlamaForCausalLMSpecBlock"],
            "diffspec_draft_token_num": c.n_slots,
            "rank_classes": N_RANK_TIERS,
            "num_ttt_blocks": c.n_ttt_blocks,
        } | {name: getattr(c, name) for name in SWITCHES}
        return found
    found["norm_before_residual"] = c.is_norm_before_residual
    if kind == "eagle3":
        return found | {"architectures": ["LlamaForCausalLM"]}
    return found | {"kind": "parallelspec", "n_slots": c.n_slots}


# Reading


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """(kind, config, state, draft_ids) of a drafter folder in any layout of the table above. Raises InputError."""
    return read_published(path).checkpoint


def read_published(path: str | os.PathLike[str]) -> Published:
    """As `load_checkpoint`, with the embedding and the tapped layers a published file may carry."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder with a drafter in it.")
    where = folder / "config.json"
    raw = read_json(where)
    kind, is_speculators = _kind_of(raw, where)
    config = _medusa_config(raw, where) if kind == "medusa" else _net_config(raw, kind, is_speculators, where)
    file = _weights_file(folder)
    sizes = _vocab_sizes(raw, config, where)
    state, others = _read_state(file, kind, config, sizes, is_speculators)
    draft_ids = None
    if sizes is not None:
        maps = _vocab_maps_of(folder, others, kind)
        draft_ids = _draft_ids(maps, sizes, file.path)
    return Published(Checkpoint(kind, config, state, draft_ids), others.get(EMBED), _feature_layers(raw, where))


def _vocab_sizes(raw: dict[str, Any], config: Config, where: Path) -> tuple[int, int] | None:
    """(draft, target) vocabulary sizes; None for Medusa heads that score the target's whole vocabulary."""
    if isinstance(config, NetConfig):
        return config.draft_vocab_size, config.vocab_size
    if raw.get("draft_vocab_size") is None:
        return None
    n_draft, n_vocab = _int(raw, "draft_vocab_size", where), _int(raw, "target_vocab_size", where)
    if n_draft > n_vocab or config.vocab_size is not None:
        raise InputError(f"{where}: a 'draft_vocab_size' of {n_draft} does not go with the other vocabulary sizes.")
    return n_draft, n_vocab


def _kind_of(raw: dict[str, Any], where: Path) -> tuple[str, bool]:
    """(kind, is it in the speculators layout) by the keys that only one layout has."""
    if "kind" in raw:
        if raw["kind"] not in ("parallelspec", "medusa"):
            raise InputError(f"{where}: kind {raw['kind']!r} is not one of parallelspec, medusa.")
        return raw["kind"], False
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] != "eagle3":
            raise InputError(f"{where}: speculators_model_type {raw['speculators_model_type']!r} is not supported.")
        return "eagle3", True
    if "diffspec_draft_token_num" in raw:
        return "specblock", False
    names = raw.get("architectures")
    if isinstance(names, list) and names in (["LlamaForCausalLM"], ["LlamaForCausalLMEagle3"]):
        return "eagle3", False
    raise InputError(f"{where}: no drafter is known by the architectures {names!r}.")


def _weights_file(folder: Path) -> TensorFile:
    """model.safetensors, else pytorch_model.bin."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return TensorFile(folder / name)
    raise InputError(f"{folder} holds neither model.safetensors nor pytorch_model.bin.")


def _read_state(
    file: TensorFile, kind: str, config: Config, sizes: tuple[int, int] | None, is_speculators: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the network's weights, the vocabulary maps and embedding beside them), all names and shapes as expected."""
    shapes = {k: tuple(v.shape) for k, v in skeleton(kind, config).state_dict().items()}
    in_file = {_file_name(k, is_speculators): k for k in shapes}
    beside: dict[str, tuple[int, ...]] = {}
    if sizes is not None:
        beside = {"t2d": (sizes[1],), "d2t": (sizes[0],)}
    if kind == "eagle3" and isinstance(config, NetConfig):
        beside[EMBED] = (config.vocab_size, config.hidden_size)
    _check_names(file, set(in_file), set(beside))
    for name, (dtype, shape) in file.specs.items():
        wanted = beside[name] if name in beside else shapes[in_file[name]]
        if shape != wanted:
            raise InputError(f"{file.path}: tensor '{name}' has the shape {shape}, expected {wanted}.")
        if name not in ("t2d", "d2t") and not dtype.is_floating_point:
            raise InputError(f"{file.path}: tensor '{name}' has the dtype {dtype}, expected a floating-point one.")
    state = {net_name: file.read(name) for name, net_name in in_file.items()}
    for name, net_name in in_file.items():
        if not torch.isfinite(state[net_name]).all():
            raise InputError(f"{file.path}: tensor '{name}' holds values that are not finite.")
    return state, {name: file.read(name) for name in beside if name in file.specs}


def _file_name(name: str, is_speculators: bool) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if is_speculators and name.startswith("midlayer.") else name


def _check_names(file: TensorFile, wanted: set[str], allowed: set[str]) -> None:
    missing, extra = sorted(wanted - set(file.specs)), sorted(set(file.specs) - wanted - allowed)
    if missing:
        raise InputError(f"{file.path}: missing tensor {_some(missing)}.")
    if extra:
        raise InputError(f"{file.path}: unexpected tensor {_some(extra)}.")


def _some(names: list[str], n_most: int = 4) -> str:
    shown = ", ".join(f"'{n[:80]}'" for n in names[:n_most])
    return shown if len(names) <= n_most else f"{shown} and {len(names) - n_most} more"


def _vocab_maps_of(folder: Path, tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """`t2d` and `d2t` from beside the weights, from SpecBlock's vocab_mapping.pt, or from both, which must agree."""
    maps = {k: v for k, v in tensors.items() if k in ("t2d", "d2t")}
    path = folder / "vocab_mapping.pt"
    if kind != "specblock" or not path.exists():
        return maps
    mapping = TensorFile(path)
    _check_names(mapping, {"t2d", "d2t"}, set())
    for name in ("t2d", "d2t"):
        found = mapping.read(name)
        if name in maps and not torch.equal(maps[name], found):
            raise InputError(f"{path}: '{name}' differs from the one in the weights file.")
        maps[name] = found
    return maps


def _draft_ids(maps: dict[str, Tensor], sizes: tuple[int, int], where: Path) -> np.ndarray:
    """Sorted target ids [V_d] of the maps; without maps the two vocabularies must be the same."""
    n_draft, n_vocab = sizes
    if not maps and n_draft == n_vocab:
        return np.arange(n_vocab, dtype=np.int64)
    for name in ("t2d", "d2t"):
        if name not in maps:
            raise InputError(f"{where}: missing tensor '{name}', which a draft vocabulary of {n_draft} needs.")
    return check_vocab_maps(maps["d2t"], maps["t2d"], n_draft, n_vocab, str(where))


def check_vocab_maps(d2t: Tensor, t2d: Tensor, n_draft: int, n_vocab: int, where: str) -> np.ndarray:
    """Target ids int64 [V_d] of the offset map d2t, or InputError: increasing, in range, t2d true exactly there."""
    if d2t.dtype not in (torch.int64, torch.int32) or tuple(d2t.shape) != (n_draft,):
        raise InputError(f"{where}: 'd2t' must hold {n_draft} integers, not {d2t.dtype} of shape {tuple(d2t.shape)}.")
    if t2d.dtype != torch.bool or tuple(t2d.shape) != (n_vocab,):
        raise InputError(f"{where}: 't2d' must hold {n_vocab} booleans, not {t2d.dtype} of shape {tuple(t2d.shape)}.")
    ids = d2t.to(torch.int64) + torch.arange(n_draft)
    if ids.min() < 0 or ids.max() >= n_vocab:
        raise InputError(f"{where}: 'd2t' is not an offset map: it points to target id {int(ids.max())} of {n_vocab}.")
    if (ids.diff() <= 0).any():
        raise InputError(f"{where}: 'd2t' is not an offset map: its target ids do not increase strictly.")
    marked = torch.zeros(n_vocab, dtype=torch.bool)
    marked[ids] = True
    if not torch.equal(marked, t2d):
        raise InputError(f"{where}: 't2d' does not mark exactly the target ids that 'd2t' points to.")
    return ids.numpy()


# Configurations


def _net_config(raw: dict[str, Any], kind: str, is_speculators: bool, where: Path) -> NetConfig:
    """Sizes and switches of SpecBlock, EAGLE-3 or ParallelSpec; what cannot be built is refused by name."""
    body = raw
    if is_speculators:
        body = raw.get("transformer_layer_config")  # type: ignore[assignment]
        if not isinstance(body, dict):
            raise InputError(f"{where}: 'transformer_layer_config' must be a JSON object.")
    _refuse_unsupported(raw, body, where)
    size, n_heads = _int(body, "hidden_size", where), _int(body, "num_attention_heads", where)
    n_vocab = _int(body, "vocab_size", where)
    n_layers = _int(body, "num_hidden_layers", where, 1, MAX_LAYERS)
    if kind != "specblock" and n_layers != 1:
        raise InputError(f"{where}: 'num_hidden_layers' is {n_layers}; this drafter has one layer.")
    config = NetConfig(
        hidden_size=size,
        n_heads=n_heads,
        n_kv_heads=_int(body, "num_key_value_heads", where, n_heads),
        head_dim=_int(body, "head_dim", where, max(1, size // n_heads)),
        intermediate_size=_int(body, "intermediate_size", where),
        vocab_size=n_vocab,
        draft_vocab_size=_int(raw, "draft_vocab_size", where, n_vocab),
        target_hidden_size=_int(raw, "target_hidden_size", where, size),
        n_layers=n_layers,
        n_slots=_n_slots(raw, kind, where),
        rms_norm_eps=_positive(body, "rms_norm_eps", where),
        rope_theta=_rope_theta(body, where),
        n_ttt_blocks=_int(raw, "num_ttt_blocks", where, 3, MAX_LAYERS),
        is_norm_before_residual=_flag(raw, "norm_before_residual", where, False),
        has_layer_shift=_flag(raw, "has_layer_shift", where, True),
        has_prefix_broadcast=_flag(raw, "has_prefix_broadcast", where, True),
        has_rank_head=_flag(raw, "has_rank_head", where, True),
    )
    if config.n_heads % config.n_kv_heads:
        raise InputError(f"{where}: {config.n_heads} attention heads cannot share {config.n_kv_heads} key-value heads.")
    if config.head_dim % 2:
        raise InputError(f"{where}: 'head_dim' is {config.head_dim}; RoPE needs an even one.")
    if config.draft_vocab_size > config.vocab_size:
        raise InputError(f"{where}: 'draft_vocab_size' {config.draft_vocab_size} exceeds 'vocab_size' {n_vocab}.")
    return config


def _n_slots(raw: dict[str, Any], kind: str, where: Path) -> int:
    if kind == "specblock":
        return _int(raw, "diffspec_draft_token_num", where, n_most=MAX_LAYERS)
    return _int(raw, "n_slots", where, n_most=MAX_LAYERS) if kind == "parallelspec" else 1


def _refuse_unsupported(raw: dict[str, Any], body: dict[str, Any], where: Path) -> None:
    """Switches that change the network, in places where this code has only one form of it."""
    for name in ("fc_norm", "norm_output", "norm_before_fc", "bias", "attention_bias", "mlp_bias"):
        if raw.get(name) or body.get(name):
            raise InputError(f"{where}: '{name}' is set; drafters with it are not supported.")
    act = body.get("hidden_act", "silu")
    if act != "silu":
        raise InputError(f"{where}: 'hidden_act' {act!r} is not supported, only 'silu' is.")
    if raw.get("rank_classes", N_RANK_TIERS) != N_RANK_TIERS:
        raise InputError(f"{where}: 'rank_classes' {raw['rank_classes']!r} is not supported, only {N_RANK_TIERS} is.")
    for name in ("rope_scaling", "rope_parameters"):
        rope = body.get(name) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise InputError(f"{where}: '{name}' {rope!r} is not supported, only plain RoPE is.")


def _rope_theta(body: dict[str, Any], where: Path) -> float:
    """The drafter's own base, else 10000; never the target's, whose base its drafter was not trained with."""
    parameters = body.get("rope_parameters") or {}
    found = body if body.get("rope_theta") is not None else parameters
    return _positive(found, "rope_theta", where, 10000.0)


def _medusa_config(raw: dict[str, Any], where: Path) -> MedusaConfig:
    vocab_size = None if raw.get("vocab_size") is None else _int(raw, "vocab_size", where)
    return MedusaConfig(
        n_heads=_int(raw, "n_heads", where, n_most=MAX_LAYERS),
        n_blocks=_int(raw, "n_blocks", where, n_most=MAX_LAYERS),
        hidden_size=_int(raw, "hidden_size", where),
        vocab_size=vocab_size,
    )


def _feature_layers(raw: dict[str, Any], where: Path) -> tuple[int, ...] | None:
    """The tapped layers as hidden_states entries: speculators counts inputs of layers, SpecForge outputs (one less)."""
    name, shift = "eagle_aux_hidden_state_layer_ids", 0
    ids = raw.get(name)
    nested = raw.get("eagle_config")
    if ids is None and isinstance(nested, dict):
        ids, shift = nested.get(name), 1
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) != 3 or not all(type(i) is int and 0 <= i < MAX_SIZE for i in ids):
        raise InputError(f"{where}: '{name}' must list three layers, not {ids!r}.")
    return tuple(i + shift for i in ids)


def _int(raw: dict[str, Any], name: str, where: Path, default: int | None = None, n_most: int = MAX_SIZE) -> int:
    found = raw.get(name)
    if found is None and default is not None:
        return default
    if found is None:
        raise InputError(f"{where}: '{name}' is missing.")
    if type(found) is not int or not 1 <= found <= n_most:
        raise InputError(f"{where}: '{name}' must be an integer from 1 to {n_most}, not {found!r}.")
    return found


def _positive(raw: dict[str, Any], name: str, where: Path, default: float | None = None) -> float:
    found = raw.get(name, default)
    if found is None:
        raise InputError(f"{where}: '{name}' is missing.")
    if type(found) not in (int, float) or not 0 < found < float("inf"):
        raise InputError(f"{where}: '{name}' must be a positive number, not {found!r}.")
    return float(found)


def _flag(raw: dict[str, Any], name: str, where: Path, default: bool) -> bool:
    found = raw.get(name, default)
    if type(found) is not bool:
        raise InputError(f"{where}: '{name}' must be true or false, not {found!r}.")
    return found
