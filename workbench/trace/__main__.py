"""`python -m workbench.trace check PATH`: say what a trace holds and whether it is whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from workbench.errors import InputError
from workbench.trace.check import as_text, check_trace


@dataclass(frozen=True)
class TraceConfig:
    """Look after a trace. `check` reads every part, says what there is and whether it is whole (exit status 1: not)."""

    verb: tyro.conf.Positional[Literal["check"]]
    """What to do."""
    path: tyro.conf.Positional[Path]
    """Folder of the trace."""
    json: bool = False
    """Print one JSON object instead of sentences."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; exit status 0, 1 where the trace is not whole, 2 where there is none."""
    config = tyro.cli(TraceConfig, args=sys.argv[1:] if argv is None else argv, prog="python -m workbench.trace")
    try:
        found = check_trace(config.path)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), ensure_ascii=False) if config.json else as_text(found))
    return 0 if found.is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
