"""Medusa (arXiv:2401.10774): residual-block heads on the target's final hidden state, one token ahead each.

The heads look at the `final` hidden state of the last committed pair, index i, whose token i + 1 is the root: head 0
predicts the first token after the root (index i + 2), head 1 the second, and so on. They are conditionally independent,
so one level holds everything they say. Our own checkpoints share the target's frozen head, cut to a draft vocabulary;
the published ones (`medusa_lm_head.pt`) bring a full head each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from workbench.drafters.along import HeadsText, TextDraft
from workbench.drafters.base import DraftState, Forward, offer, top_logits
from workbench.drafters.checkpoint import MAX_LAYERS, Checkpoint, MedusaConfig, hash_weights, load_net
from workbench.drafters.nets import MedusaNet
from workbench.drafters.packing import pack
from workbench.drafters.tensorfile import TensorFile, read_json
from workbench.errors import InputError
from workbench.linear import PackedLinear
from workbench.tree import Expansion, Starts

WEIGHTS_FILE = "medusa_lm_head.pt"


class TargetHead(Protocol):
    """What Medusa needs of a target."""

    name: str
    hidden_size: int
    vocab_size: int
    head_weight: Tensor  # [V, H]


@dataclass
class MedusaState(DraftState):
    """What the heads look at, and what they said there."""

    final: Tensor | None = None  # [H], the last committed pair's; None once the heads ran
    logits: Tensor | None = None  # [1, n_heads, V_d]


class MedusaDrafter:
    """One slot a head, one level, no state but the last pair's final hidden."""

    kind = "medusa"
    n_levels = 1
    has_tiers = False

    def __init__(
        self,
        net: MedusaNet,
        head_weight: Tensor | None,  # [V_d, H] rows of the target's frozen head; None: the heads are full
        target_ids: Tensor | None = None,  # [V_d] target id of each draft id; None: the same ids
        name: str = "medusa",
        weights_hash: str = "none",
    ) -> None:
        self.net, self.head_weight, self.target_ids = net.eval().requires_grad_(False), head_weight, target_ids
        self.name, self.weights_hash, self.n_slots = name, weights_hash, net.n_heads
        # The last parameter of full heads is the last head's own vocabulary matrix.
        self.weight: Tensor = head_weight if head_weight is not None else list(net.parameters())[-1]
        self.max_width = self.weight.shape[0]
        self._head = None if head_weight is None else PackedLinear(head_weight)
        self.repack()

    def repack(self) -> None:
        """Take over the weights of `net`; to be called after every change of them."""
        self._fast = pack(self.net)

    def open(self, prompt_ids: list[int], capacity: int) -> MedusaState:
        """Nothing to allocate: the heads keep no cache."""
        return MedusaState()

    def observe(self, state: DraftState, features: Tensor, final: Tensor, tokens: list[int]) -> None:
        """Keep the last pair's final hidden."""
        assert isinstance(state, MedusaState)
        if tokens:
            state.final = final[-1]

    @torch.inference_mode()
    def expand(self, state: DraftState, level: int, starts: Starts, width: int) -> Expansion:
        """Level 0: candidates [1, 1, n_heads, width] at the last committed pair."""
        assert isinstance(state, MedusaState)
        if level != 0:
            raise InputError(f"{self.name} drafts one level only, but the plan asks for level {level}")
        if state.final is not None:
            final = state.final.to(self.weight.device, self.weight.dtype)
            state.logits, state.final = self._logits(final)[None], None
            state.forwards.append(Forward(kind="first", n_rows=1, n_starts=1))
        if state.logits is None:
            raise ValueError("no pair was observed yet, so there is nothing to draft from")
        return self._offer_logits(state.logits, width)

    @torch.inference_mode()
    def along(self, features: Tensor, final: Tensor, tokens: list[int]) -> TextDraft:
        """Draft at many positions of a text whose n pairs are given: features, final hidden [n, H], tokens."""
        return HeadsText(self, final)

    def _offer(self, final: Tensor, width: int) -> Expansion:
        """Candidates [1, R, n_heads, width] of final hidden states [R, H]."""
        return self._offer_logits(self._logits(final), width)

    def _offer_logits(self, logits: Tensor, width: int) -> Expansion:
        return offer(logits, top_logits(logits, width), width, self.target_ids, None)

    def _logits(self, final: Tensor) -> Tensor:
        """Final hidden [..., H] -> logits [..., n_heads, V_d]."""
        if self._head is None:
            return self._fast.logits(final)
        return self._head(self._fast.hidden(final))


def medusa_drafter(checkpoint: Checkpoint, target: TargetHead, name: str = "medusa") -> MedusaDrafter:
    """The checkpoint's heads on this target, in its dtype and on its device. Raises InputError if they do not fit."""
    config = cast(MedusaConfig, checkpoint.config)
    if config.hidden_size != target.hidden_size:
        raise InputError(
            f"The Medusa drafter {name} is made for a hidden size of {config.hidden_size}, "
            f"but {target.name} has {target.hidden_size}."
        )
    n_vocab = config.vocab_size
    if n_vocab is not None and n_vocab != target.vocab_size:
        raise InputError(
            f"The Medusa drafter {name} predicts a vocabulary of {n_vocab} tokens, "
            f"but {target.name} has {target.vocab_size}."
        )
    head = target.head_weight
    net = cast(MedusaNet, load_net(checkpoint, head.dtype, head.device))
    rows, ids = (None, None) if net.has_full_heads else _draft_head(checkpoint.draft_ids, target, name)
    weights_hash = hash_weights(checkpoint.state, checkpoint.draft_ids)
    return MedusaDrafter(net, rows, ids, name, weights_hash)


def _draft_head(draft_ids: np.ndarray | None, target: TargetHead, name: str) -> tuple[Tensor, Tensor | None]:
    """The target's head at the draft vocabulary [V_d, H], copied once, and the target ids [V_d]."""
    if draft_ids is None:
        return target.head_weight, None
    if int(draft_ids.max()) >= target.vocab_size:
        raise InputError(
            f"The Medusa drafter {name} drafts token {int(draft_ids.max())}, "
            f"but {target.name} has {target.vocab_size} tokens."
        )
    ids = torch.from_numpy(np.asarray(draft_ids, dtype=np.int64)).to(target.head_weight.device)
    return target.head_weight[ids].contiguous(), ids


# The published layout


def load_medusa_published(path: str | os.PathLike[str], target: TargetHead) -> MedusaDrafter:
    """A published folder (config.json, medusa_lm_head.pt) as a drafter of this target. Raises InputError."""
    return medusa_drafter(read_medusa_published(path), target, Path(path).name)


def read_medusa_published(path: str | os.PathLike[str]) -> Checkpoint:
    """Full heads with the tensors `{i}.{j}.linear.weight`, `.bias` and `{i}.{medusa_num_layers}.weight`.

    Strict: names, shapes and dtypes must be what config.json's medusa_num_heads and medusa_num_layers say. (One
    published config counts 2 heads beside 5: such a file is refused with the count to write.)
    """
    folder = Path(path)
    where = folder / "config.json"
    raw = read_json(where)
    n_heads, n_blocks = (_count(raw, key, where) for key in ("medusa_num_heads", "medusa_num_layers"))
    if not isinstance(raw.get("base_model_name_or_path"), str):
        raise InputError(f"{where}: 'base_model_name_or_path' must name the target these heads were trained on.")
    file = TensorFile(folder / WEIGHTS_FILE)
    size, n_vocab = _n_rows(file, "0.0.linear.weight"), _n_rows(file, f"0.{n_blocks}.weight")
    config = MedusaConfig(n_heads, n_blocks, size, n_vocab)
    _check_tensors(file, config)
    state = {f"heads.{name}": file.read(name) for name in file.specs}
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise InputError(f"{file.path}: tensor '{name.removeprefix('heads.')}' holds values that are not finite.")
    return Checkpoint("medusa", config, state, None)


def published_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in `medusa_lm_head.pt`."""
    size = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.n_heads):
        for j in range(config.n_blocks):
            shapes[f"{i}.{j}.linear.weight"] = (size, size)
            shapes[f"{i}.{j}.linear.bias"] = (size,)
        shapes[f"{i}.{config.n_blocks}.weight"] = (cast(int, config.vocab_size), size)
    return shapes


def _check_tensors(file: TensorFile, config: MedusaConfig) -> None:
    wanted = published_shapes(config)
    for name in wanted:
        if name not in file.specs:
            raise InputError(f"{file.path}: missing tensor '{name}'.")
    for name, (dtype, shape) in file.specs.items():
        if name not in wanted:
            n_found = len({found.split(".")[0] for found in file.specs})
            raise InputError(
                f"{file.path}: unexpected tensor '{name[:80]}' (the file has {n_found} heads, "
                f"config.json's medusa_num_heads is {config.n_heads})."
            )
        if shape != wanted[name]:
            raise InputError(f"{file.path}: tensor '{name}' has the shape {shape}, expected {wanted[name]}.")
        if not dtype.is_floating_point:
            raise InputError(f"{file.path}: tensor '{name}' has the dtype {dtype}, expected a floating-point one.")


def _n_rows(file: TensorFile, name: str) -> int:
    """Rows of a tensor of head 0; the other tensors must agree."""
    if name not in file.specs:
        raise InputError(f"{file.path}: missing tensor '{name}'.")
    shape = file.specs[name][1]
    if len(shape) != 2 or shape[0] < 1:
        raise InputError(f"{file.path}: tensor '{name}' has the shape {shape}, expected a matrix.")
    return shape[0]


def _count(raw: dict[str, Any], key: str, where: Path) -> int:
    found = raw.get(key)
    if type(found) is not int or not 1 <= found <= MAX_LAYERS:
        raise InputError(f"{where}: '{key}' must be an integer from 1 to {MAX_LAYERS}, not {found!r}.")
    return found
