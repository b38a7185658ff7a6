"""`python -m workbench.replay TRACE --policy SPEC …`: walk policies over a recorded trace, print the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from workbench.errors import InputError
from workbench.replayreport import format_replayed
from workbench.replayrun import Replayed, replay
from workbench.tracesource import open_source
from workbench.tree import PRESETS


@dataclass(frozen=True)
class ReplayConfig:
    """Replay policies on a trace: what each would have committed, step by step, without a model."""

    trace: tyro.conf.Positional[Path]
    """Folder of the trace."""
    policy: tuple[str, ...] = ()
    """Policies, separated by spaces: a plan (`specblock:blocks=2,budget=60`), a bandit
    (`ucb:arms=specblock+eagle3`), a JSON file; every preset the trace has pools for if not given."""
    baseline: str | None = None
    """The policy that the others are compared with; the first if not given."""
    seeds: int = 1
    """Policy seeds of each policy that draws."""
    orders: int = 1
    """Orders of the prompts each policy that learns walks: the recorded one, then shuffled ones."""
    bootstrap_seed: int = 0
    """Seed of the intervals."""
    stream: bool = False
    """Read the pools piece by piece instead of holding them: slower, for traces larger than memory."""
    readings: bool = True
    """Also read ranks, slots and the calibration of draft probabilities."""
    json: bool = False
    """Print one JSON object instead of the tables."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; exit status 0, 2 after bad input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    config = tyro.cli(ReplayConfig, args=argv, prog="python -m workbench.replay")
    try:
        print(_readout(config, _replayed(config)))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _replayed(config: ReplayConfig) -> Replayed:
    source = open_source(config.trace, config.stream)
    specs = config.policy or tuple(name for name in PRESETS if name.split("-")[0] in source.drafters)
    return replay(
        source, specs, config.baseline, config.seeds, config.orders, config.bootstrap_seed, is_read=config.readings
    )


def _readout(config: ReplayConfig, found: Replayed) -> str:
    if config.json:
        return json.dumps({"trace": str(config.trace)} | found.summary(), ensure_ascii=False, allow_nan=False)
    return format_replayed(found.walked, found.rows, found.oracle, found.text, found.cost)


if __name__ == "__main__":
    sys.exit(main())
