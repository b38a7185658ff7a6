"""Choose, per drafter, the plan that is fastest on this machine, measured on built-in prompts (never on report ones).

    python scripts/choose_plans.py --out runs/choose --limit 12 --max-new-tokens 64 --results docs/results/plans.json

Records the built-in prompts with every candidate plan (`python -m workbench.record`, runs interleaved) and picks the
plan with the largest measured speedup of each drafter. Pause everything else on the machine first.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

CANDIDATES = {
    "eagle3": [
        *(f"eagle3-chain:length={n}" for n in (1, 2, 3, 4)),
        "eagle3:depth=1,top_k=2,budget=3",
        "eagle3:depth=2,top_k=2,budget=4",
    ],
    "specblock": [
        *(f"specblock:blocks=1,root=1,tiers=1-1-1-1,budget={n}" for n in (1, 2, 3)),
        *(f"specblock:blocks=1,root=2,tiers=1-1-1-1,budget={n}" for n in (2, 3, 4)),
    ],
    "parallelspec": [f"parallelspec:budget={n}" for n in (1, 2, 3, 4)],
    "medusa": [f"medusa:budget={n}" for n in (1, 2, 3, 4)],
    "lookup": [f"lookup:length={n}" for n in (2, 3, 4, 8)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the recording")
    parser.add_argument("--limit", default="12", help="built-in prompts, taken in turn from the tasks")
    parser.add_argument("--max-new-tokens", default="64")
    parser.add_argument("--drafters", nargs="*", default=list(CANDIDATES))
    parser.add_argument("--weights", nargs="*", default=[], help="NAME=FOLDER of checkpoints to use instead")
    parser.add_argument("--results", help="JSON file to write")
    args = parser.parse_args()
    plans = [plan for drafter in args.drafters for plan in CANDIDATES[drafter]]
    command = [sys.executable, "-m", "workbench.record", "--out", args.out, "--limit", args.limit, "--json"]
    command += ["--max-new-tokens", args.max_new_tokens, "--drafters", *plans]
    command += ["--weights", *args.weights] if args.weights else []
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    rows = [row for row in report["rows"] if row["task"] == "all" and row["policy"] != "plain"]
    table = [{"plan": r["policy"], "drafter": r["drafter"], "tau": r["tau"], "speedup": r["speedup"]} for r in rows]
    best = {}
    for row in sorted(table, key=lambda r: -r["speedup"]["value"]):
        best.setdefault(row["drafter"], row["plan"])
        print(f"{row['plan']:55s} tau {row['tau']['value']:.2f}  speedup {row['speedup']['value']:.2f}")
    print(json.dumps(best))
    if args.results:
        about = {"date": date.today().isoformat(), "machine": platform.machine(), "prompts": f"built-in, {args.limit}"}
        Path(args.results).parent.mkdir(parents=True, exist_ok=True)
        Path(args.results).write_text(json.dumps(about | {"best": best, "plans": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
