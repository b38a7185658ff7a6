"""How fast replay is on this machine, on one core, with pools in memory: positions and steps a second.

    python scripts/bench_replay.py TRACE --rows 20000 --out docs/bench_replay.json

Outcome tables: every preset the trace has pools for, the trace's rows repeated up to --rows. Walks: one fixed plan and
every bandit over --steps steps and more, in lockstep over --streams streams. The time is the process's own (CPU) time,
the best of --rounds; what numba compiles is compiled before. `replay` is the whole verb's work but the start of Python:
loading the trace, walking all presets, readings and bootstrap.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from policies import CATALOGUE, parse_policy
from workbench.outcomes import OutcomeTable, Span, outcome_table
from workbench.replayrun import Engine, replay
from workbench.source import Creators
from workbench.tracesource import TracePools, open_source
from workbench.tree import PRESETS, BlockPlan, Plan, parse_plan
from workbench.walk import Menu, streams, walk


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Best CPU time of some rounds, after one that does not count."""
    run()
    times = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


def plans(source: TracePools) -> dict[str, tuple[str, Plan]]:
    """Every preset there are pools for, and a plan of one block."""
    found = {name: (parse_plan(name)[0], plan) for name, plan in PRESETS.items()}
    found["specblock:blocks=1"] = ("specblock", BlockPlan(n_blocks=1))
    return {name: pair for name, pair in found.items() if pair[0] in source.drafters}


def bench_tables(source: TracePools, n_rows: int, rounds: int) -> dict[str, Any]:
    """Positions a second of every plan, at n_rows and at half of them."""
    out: dict[str, Any] = {}
    for name, (drafter, plan) in plans(source).items():
        (_, pools), span = next(source.parts(drafter)), Span.of(source.text)
        rows = np.resize(np.arange(pools.n_rows), n_rows)
        times = {}
        for n in (n_rows // 2, n_rows):
            part, here = pools.rows(rows[:n]), span.rows(rows[:n])
            creators = Creators.of(part)
            times[n] = seconds(lambda p=part, h=here, c=creators, q=plan: outcome_table(q, p, h, c), rounds)
        table = outcome_table(plan, part, here, creators)
        out[name] = {
            "positions_per_s": round(n_rows / times[n_rows]),
            "time_of_twice_the_rows": round(times[n_rows] / times[n_rows // 2], 2),
            "nodes": round(float(table.n_nodes.mean()), 1),
            "starts": table.n_starts.mean(axis=0).round(1).tolist(),
            "missed": round(float(table.is_missed.mean()), 4),
        }
        print(name, json.dumps(out[name]), flush=True)
    return out


def repeated(table: OutcomeTable, n: int) -> OutcomeTable:
    """The table n times over."""
    return OutcomeTable(*(np.concatenate([getattr(table, f.name)] * n) for f in fields(OutcomeTable)))


def bench_walks(source: TracePools, n_steps: int, n_streams: int, rounds: int) -> dict[str, Any]:
    """Steps a second of a fixed plan and of every bandit over three arms."""
    arms = [name for name in plans(source) if "chain" not in name][:3]
    engine, out = Engine(source), {}
    specs = [arms[0], *(f"{name}:arms={'+'.join(arms)}" for name in CATALOGUE)]
    for spec in specs:
        policy = parse_policy(spec)
        n = max(1, n_steps // max(1, source.text.n_rows // 2) // (1 if len(policy.arms) == 1 else n_streams))
        text = source.text.episodes(list(range(source.text.n_episodes)) * n)
        one = engine.menu(policy)
        menu = Menu([repeated(table, n) for table in one.tables], one.drafters, one.n_slots)
        over = streams(text.n_episodes, 1 if len(policy.arms) == 1 else n_streams)
        walked = walk(policy, menu, text, over).n_steps
        took = seconds(lambda p=policy, m=menu, t=text, o=over: walk(p, m, t, o), rounds)
        out[spec] = {"steps": walked, "steps_per_s": round(walked / took)}
        print(spec, json.dumps(out[spec]), flush=True)
    return out


def bench_replay(folder: Path, rounds: int) -> dict[str, Any]:
    """The verb on this trace, loading and bootstrap counted."""
    specs = list(plans(open_source(folder)))
    took = seconds(lambda: replay(open_source(folder), specs).summary(), rounds)
    print("replay", took, flush=True)
    return {"seconds": round(took, 3), "policies": len(specs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = open_source(args.trace)
    results = {
        "date": date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "rows": args.rows,
        "streams": args.streams,
        "outcome_tables": bench_tables(source, args.rows, args.rounds),
        "walks": bench_walks(source, args.steps, args.streams, args.rounds),
        "replay": bench_replay(args.trace, args.rounds),
    }
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
