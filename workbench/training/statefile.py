"""A training run on disk: its whole state, swapped in at once, and the metrics up to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from workbench.errors import InputError
from workbench.trace import write_durably

STATE_FILE, METRICS_FILE = "training_state.pt", "metrics.jsonl"


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state beside the old one, flush it, then swap: a kill at any moment leaves one that loads.

    Raises InputError where the disk does not take it; the state before stays.
    """
    path = folder / STATE_FILE
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer has its own words for a full disk
        raise InputError(f"{path}: cannot be written ({error}); the state written before is whole.") from error


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state, all tensors on the CPU; None where none was written. Raises InputError for a file that is none."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch each raise their own kinds
        raise InputError(f"{path}: not a whole training state; remove it to start afresh.") from error
    if not isinstance(state, dict) or "config" not in state:
        raise InputError(f"{path}: not a training state.")
    return state


def append_metrics(folder: Path, row: dict[str, Any]) -> None:
    """Add one line to metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl up to the first that is torn; none where there is no file."""
    path, rows = folder / METRICS_FILE, list[dict[str, Any]]()
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def trim_metrics(folder: Path, n_steps: int) -> None:
    """Drop what was written after the state of step `n_steps`: those steps are about to be run again."""
    if not (folder / METRICS_FILE).exists():
        return
    kept = [row for row in read_metrics(folder) if row["n_steps"] <= n_steps]
    write_durably(folder / METRICS_FILE, "".join(json.dumps(row) + "\n" for row in kept).encode())
