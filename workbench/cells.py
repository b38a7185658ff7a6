"""How numbers become text and JSON: the same dashes, ranges and columns in every table. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from workbench.metrics import TierReading
from workbench.stats import Interval

ALL_TASKS = "all"  # the row over every task


def jsonable(value: Any) -> Any:
    """Plain JSON values: arrays as lists, NaN as null."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float, digits: int, is_signed: bool = False) -> str:
    """A number of some decimals; a dash where nothing was measured."""
    return "–" if math.isnan(value) else f"{value:{'+' if is_signed else ''}.{digits}f}"


def span(interval: Interval) -> str:
    """An interval's two ends; a dash where none was computed."""
    if math.isnan(interval.low):
        return "–"
    return f"{interval.low:.2f}–{interval.high:.2f}"


def aligned(lines: Sequence[Sequence[str]], n_left: int) -> str:
    """Cells in columns: the first `n_left` flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(_cells(line, widths, n_left)).rstrip() for line in lines)


def _cells(line: Sequence[str], widths: Sequence[int], n_left: int) -> Iterator[str]:
    for i, (cell, width) in enumerate(zip(line, widths)):
        yield cell.ljust(width) if i < n_left else cell.rjust(width)


def printable(text: str) -> str:
    """Names from files as a terminal may be given them: no control characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def format_rank_reading(policy: str, reading: TierReading) -> str:
    """The rank head's precision, recall and F1 by tier."""
    lines: list[tuple[str, ...]] = [("rank head of " + printable(policy), "slots", "precision", "recall", "F1")]
    for tier, ranks in enumerate(("1", "2–4", "5–10", "beyond 10")):
        rates = (reading.precision[tier], reading.recall[tier], reading.f1[tier])
        slots = str(int(reading.confusion[tier].sum()))
        lines.append((f"tier {tier} (rank {ranks})", slots, *(number(float(rate), 2) for rate in rates)))
    return aligned(lines, n_left=1)
