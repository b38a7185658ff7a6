"""`python -m workbench.verify TRACE --policy SPEC …`: re-run policies live on a trace and compare step by step."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

from workbench.cells import jsonable
from workbench.errors import InputError
from workbench.livecauses import OTHER
from workbench.livecheck import Verified
from workbench.verifyrun import format_verified, verify_trace


@dataclass(frozen=True)
class VerifyConfig:
    """Re-run replayed steps with the real target and drafters, and list every step that differs."""

    trace: tyro.conf.Positional[Path]
    """Folder of the trace."""
    policy: tuple[str, ...] = ()
    """Policies, as `workbench.replay` takes them; every preset the trace has pools for if not given."""
    steps: int | None = 250
    """Most steps of each policy, from the trace's beginning; `None` for all."""
    target: str | None = None
    """Where to find the target, if not under the name the trace gives."""
    device: str | None = None
    """Where the models run; as recorded if not given."""
    dtype: str | None = None
    """Number type of the target; as recorded if not given."""
    weights: tuple[str, ...] = ()
    """Drafter checkpoints to load instead of the shipped ones, as NAME=FOLDER."""
    threads: int | None = None
    """Threads of the CPU's matrix products; the library's own choice if not given."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; exit status 0 if all disagreements are explained, 1 if one is not, 2 after bad input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    config = tyro.cli(VerifyConfig, args=argv, prog="python -m workbench.verify")
    try:
        with tqdm(unit="step", disable=config.json) as bar:
            found = verify_trace(
                config.trace,
                config.policy,
                config.steps,
                target_name=config.target,
                device=config.device,
                dtype=config.dtype,
                weights=config.weights,
                threads=config.threads,
                tick=bar.update,
            )
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(_readout(found) if config.json else format_verified(found))
    return 1 if any(d.cause == OTHER for v in found for d in v.found) else 0


def _readout(found: Sequence[Verified]) -> str:
    policies = {
        v.policy: {"n_steps": v.n_steps, "agreement": v.agreement, "found": [asdict(d) for d in v.found]} for v in found
    }
    return json.dumps(jsonable({"policies": policies}), ensure_ascii=False, allow_nan=False)


if __name__ == "__main__":
    sys.exit(main())
