"""Walked tau of the shipped drafters at their presets on a prompt file: greedy, greedy outside loops, temperature 1.

    python scripts/measure_tau.py --prompts FILE --limit-per-task 10 --out results.json

The target decodes each prompt plainly once (cached in --cache); then each drafter runs for real on the recorded text
and features (`workbench.recorded`), so verification costs nothing. Also prints the rank head's reading.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from workbench.decode import decode
from workbench.drafters import load_drafter
from workbench.metrics import loop_mask, tau, tier_reading
from workbench.promptfile import load_prompts
from workbench.recorded import RecordedTarget, Recording, as_float, record_answer
from workbench.sampling import Sampling
from workbench.target import Target, load_target
from workbench.tree import PRESETS, parse_plan


class NoClock:
    """Times are not measured here."""

    def now(self) -> float:
        return 0.0


def recordings(target: Target, args: argparse.Namespace, temperature: float) -> list[tuple[str, Recording]]:
    """First turn of every prompt, decoded plainly; cached by target, prompts and settings."""
    prompts, _ = load_prompts(args.prompts, None, None, args.limit_per_task)
    sampling = Sampling(temperature=temperature, seed=args.seed)
    out = []
    for prompt in tqdm(prompts, desc=f"plain T={temperature:g}"):
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        ids = target.render([*messages, {"role": "user", "content": prompt.turns[0]}])
        key = hashlib.sha256(json.dumps([target.weights_hash, ids, temperature, args.seed]).encode()).hexdigest()[:24]
        file = Path(args.cache) / f"{key}-{args.max_new_tokens}.pt"
        if not file.exists():
            r = record_answer(target, ids, sampling, 0, args.max_new_tokens, set(target.stop_ids))
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save((r.prompt_ids, r.tokens, r.features.half(), r.final.half()), file)
        out.append((prompt.task, as_float(Recording(*torch.load(file, weights_only=True)), target.dtype)))
    return out


def walk(drafter: Any, plan: Any, items: list[tuple[str, Recording]], stop_ids: set[int]) -> list[dict[str, Any]]:
    """Steps of all episodes, each with its task and whether it starts inside a loop."""
    rows = []
    for task, r in tqdm(items, desc=drafter.name):
        episode = decode(
            RecordedTarget(r), drafter, plan, r.prompt_ids, sampling=Sampling(), max_new_tokens=len(r.tokens),
            stop_ids=stop_ids, clock=NoClock(),
        )  # fmt: skip
        assert episode.tokens == r.tokens
        in_loop = loop_mask(r.tokens)
        rows += [step | {"task": task, "in_loop": bool(in_loop[step["position"]])} for step in episode.steps]
    return rows


def reading(rows: list[dict[str, Any]]) -> dict[str, Any]:
    committed = np.array([r["n_committed"] for r in rows])
    outside = np.array([not r["in_loop"] for r in rows])
    tasks = sorted({r["task"] for r in rows})
    per_task = {t: round(tau(committed[[r["task"] == t for r in rows]]), 3) for t in tasks}
    return {
        "n_steps": len(rows),
        "tau": round(tau(committed), 3),
        "tau_outside_loops": round(tau(committed[outside]), 3),
        "loop_share": round(float(1 - outside.mean()), 3),
        "forwards_per_step": round(float(np.mean([r["n_forwards"] for r in rows])), 2),
        "tau_by_task": per_task,
    }


def tiers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    flat = [np.concatenate([np.asarray(r[c], int) for r in rows]) for c in ("slot_tier", "slot_rank", "slot_offered")]
    got = tier_reading(*flat)
    return {
        "confusion_true_by_predicted": got.confusion.tolist(),
        "precision": got.precision.round(3).tolist(),
        "recall": got.recall.round(3).tolist(),
        "f1": got.f1.round(3).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit-per-task", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--drafters", nargs="*", default=["eagle3", "specblock", "parallelspec", "medusa", "lookup"])
    parser.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", default="runs/tau-cache")
    parser.add_argument("--weights", nargs="*", default=[], help="NAME=PATH of a checkpoint to use instead")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target("smollm2")
    weights = dict(w.split("=", 1) for w in args.weights)
    results: dict[str, Any] = {"date": date.today().isoformat(), "machine": platform.processor() or platform.machine()}
    results["args"] = {k: v for k, v in vars(args).items() if k not in ("cache", "out", "prompts", "weights")}
    for temperature in args.temperatures:
        items = recordings(target, args, temperature)
        for spec in args.drafters:
            name, plan = parse_plan(spec) if ":" in spec else (spec.split("-")[0], PRESETS[spec])
            drafter = load_drafter(weights.get(name, name), target)
            rows = walk(drafter, plan, items, set(target.stop_ids))
            result = reading(rows)
            if drafter.has_tiers:
                result["tiers"] = tiers(rows)
            results[f"{spec} T={temperature:g}"] = result
            print(spec, f"T={temperature:g}", json.dumps(result), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
