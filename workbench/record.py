"""`python -m workbench.record`: decode prompts plainly and with drafters, record every step, print the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import tyro
from tqdm import tqdm

from workbench.cells import format_rank_reading
from workbench.errors import InputError
from workbench.recordrun import RecordConfig, record
from workbench.report import (
    divergences,
    format_divergences,
    format_rows,
    rank_readings,
    report_rows,
    summary,
)
from workbench.trace import open_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; exit status 0, 2 after bad input (good prompts are recorded all the same), 130 if interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    config = tyro.cli(RecordConfig, args=argv, prog="python -m workbench.record")
    try:
        problems = record(config, ["python", "-m", "workbench.record", *argv], _say)
        print(_readout(config))
    except InputError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say(f"Interrupted; finished prompts are kept in {config.out}, --resume continues the run.")
        return 130
    return 2 if problems else 0


def _say(sentence: str) -> None:
    """One sentence on standard error, above any progress bar."""
    tqdm.write(sentence, file=sys.stderr)


def _readout(config: RecordConfig) -> str:
    trace = open_trace(config.out)
    steps, episodes = trace.load("steps"), trace.load("episodes")
    if config.json:
        about: dict[str, Any] = {"trace": str(config.out), "problems": trace.run["problems"]}
        return json.dumps(about | summary(steps, episodes), ensure_ascii=False, allow_nan=False)
    tables = [format_rows(report_rows(steps, episodes))]
    if found := divergences(episodes):
        tables.append(format_divergences(found))
    tables += [format_rank_reading(policy, reading) for policy, reading in rank_readings(steps).items()]
    return "\n\n".join([*tables, f"Recorded in {config.out}"])


if __name__ == "__main__":
    sys.exit(main())
