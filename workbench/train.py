"""`python -m workbench.train`: train one drafter on the target's own text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import tyro

from workbench.errors import InputError
from workbench.training.run import TrainArgs, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; exit status 0, 2 after bad input, 130 if interrupted (run again to resume)."""
    args = tyro.cli(TrainArgs, args=argv, prog="python -m workbench.train")
    try:
        card = train(args)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted; run the same command again to resume from {args.out}.", file=sys.stderr)
        return 130
    print(json.dumps(card) if args.json else f"Trained {args.kind}; checkpoint in {args.out}/checkpoint")
    return 0


if __name__ == "__main__":
    sys.exit(main())
