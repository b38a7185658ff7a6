"""The catalogue of drafters. A new one is a file here and a line in `BUILDERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from workbench.drafters.base import Drafter
from workbench.drafters.checkpoint import Published, read_published
from workbench.drafters.eagle3 import Eagle3Drafter
from workbench.drafters.fit import fit_drafter
from workbench.drafters.lookup import LookupDrafter
from workbench.drafters.medusa import WEIGHTS_FILE, load_medusa_published, medusa_drafter
from workbench.drafters.parallelspec import ParallelSpecDrafter
from workbench.drafters.specblock import SpecBlockDrafter
from workbench.errors import InputError


class TargetWeights(Protocol):
    """What drafters take from a target."""

    name: str
    hidden_size: int
    vocab_size: int
    feature_layers: tuple[int, int, int]
    embed_weight: Tensor  # [V, H]
    head_weight: Tensor  # [V, H]


@dataclass
class _Recast:
    """A target's weights in another dtype."""

    name: str
    hidden_size: int
    vocab_size: int
    feature_layers: tuple[int, int, int]
    embed_weight: Tensor
    head_weight: Tensor


BUILDERS: dict[str, Callable[[Published, TargetWeights, str], Drafter]] = {
    "specblock": lambda found, target, name: fit_drafter(SpecBlockDrafter, found, target, name),
    "eagle3": lambda found, target, name: fit_drafter(Eagle3Drafter, found, target, name),
    "medusa": lambda found, target, name: medusa_drafter(found.checkpoint, target, name),
    "parallelspec": lambda found, target, name: fit_drafter(ParallelSpecDrafter, found, target, name),
}
CATALOGUE = (*BUILDERS, "lookup")  # names with shipped weights, and the drafter that needs none


def shipped_folder(name: str) -> Path:
    """Where the package keeps the weights of a catalogue name."""
    return Path(str(resources.files("workbench") / "weights" / name))


def load_drafter(spec: str | Path, target: TargetWeights, dtype: torch.dtype | None = None) -> Drafter:
    """A drafter by its name in the catalogue (shipped weights) or by a checkpoint folder, fitted to `target`.

    dtype: the target's if None. Raises InputError where the name or folder is unknown, the checkpoint is broken or it
    does not fit the target.
    """
    if dtype is not None and dtype != target.embed_weight.dtype:
        embed, head = target.embed_weight.to(dtype), target.head_weight.to(dtype)
        target = _Recast(target.name, target.hidden_size, target.vocab_size, target.feature_layers, embed, head)
    if str(spec) == "lookup":
        return LookupDrafter()
    if str(spec) in BUILDERS:
        folder, name = shipped_folder(str(spec)), str(spec)
        if not folder.is_dir():
            raise InputError(f"The weights of the drafter {name} are not installed ({folder} is missing).")
    else:
        folder, name = Path(spec), Path(spec).name
        if not folder.is_dir():
            raise InputError(f"'{spec}' is neither a drafter ({', '.join(CATALOGUE)}) nor a checkpoint folder.")
    if (folder / WEIGHTS_FILE).is_file():
        return load_medusa_published(folder, target)
    found = read_published(folder)
    return BUILDERS[found.checkpoint.kind](found, target, name)
