"""`python -m workbench.corpus`: let a target write training text for its drafters."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from workbench.errors import InputError
from workbench.training.corpus_text import CorpusConfig
from workbench.training.corpus_writer import write_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; exit status 0, 2 after bad input, 130 if interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    config = tyro.cli(CorpusConfig, args=argv, prog="python -m workbench.corpus")
    try:
        summary = write_corpus(config, ["python", "-m", "workbench.corpus", *argv])
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted; whole parts are kept in {config.out}, --resume goes on with them.", file=sys.stderr)
        return 130
    print(json.dumps(summary, ensure_ascii=False) if config.json else readout(summary))
    return 0


def readout(summary: dict[str, Any]) -> str:
    """The summary in a few lines."""
    kinds = ", ".join(f"{kind} {n}" for kind, n in summary["by_kind"].items())
    dropped = ", ".join(f"{n} {why}" for why, n in summary["dropped"].items()) or "none"
    return (
        f"{summary['answers']} answers ({summary['greedy_answers']} greedy), {summary['prompt_tokens']} prompt and "
        f"{summary['response_tokens']} response tokens in {summary['out']}\n"
        f"families: {kinds}\ndropped: {dropped}\n"
        f"{summary['seconds']} s in this session, {summary['tokens_per_second']} response tokens a second"
    )


if __name__ == "__main__":
    sys.exit(main())
