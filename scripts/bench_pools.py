"""What recording pools costs beside decoding the text: time of every drafter at the default envelope, bytes a position.

For each prompt in turn: plain decoding (the yardstick), one prefill over prompt + text for the features, then each
drafter's pools, twice for block drafters (with and without the third level). Everything runs side by side in one
process, so whatever else the machine does falls on all alike; what is compared is processor time by default, wall time
with --wall (on an idle machine). At a few positions the live drafter is asked for the same starts: in float32 some
log-probabilities round to the neighbouring step and near-ties swap their places.

    python scripts/bench_pools.py --weights specblock=runs/specblock --new-tokens 128 --json
"""

from __future__ import annotations

import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro

from workbench.drafters import CATALOGUE, load_drafter
from workbench.keeping import Keeping, KeptTurn, keep_turn, kept_parts
from workbench.poolrecorder import record_pools
from workbench.pools import ENVELOPES, DraftPools
from workbench.promptfile import load_prompts
from workbench.sampling import Sampling
from workbench.target import Target, load_target


@dataclass(frozen=True)
class Config:
    """What to time."""

    target: str = "smollm2"
    prompts: Path | None = None
    limit: int = 6  # prompts, taken in turn from the tasks
    new_tokens: int = 128  # of each prompt, unless a stop id comes first
    temperature: float = 0.0
    drafters: tuple[str, ...] = tuple(name for name in CATALOGUE if name != "lookup")
    weights: tuple[str, ...] = ()  # NAME=FOLDER
    envelope: str = "default"
    checked: int = 8  # positions of each text at which the live drafter is asked as well
    threads: int = 0  # of PyTorch; 0 leaves its default
    wall: bool = False  # wall time instead of processor time
    json: bool = False


def plain(target: Target, ids: list[int], config: Config) -> list[int]:
    """Plain decoding of one prompt, prefill included."""
    session = target.session(len(ids) + config.new_tokens + 1, Sampling(config.temperature))
    tokens = [session.prefill(ids).token]
    while len(tokens) < config.new_tokens and tokens[-1] not in target.stop_ids:
        tokens.append(session.step())
    return tokens


def part_bytes(turn: KeptTurn) -> dict[str, int]:
    """Bytes of each drafter's part on disk."""
    out = {}
    for part in kept_parts(0, [turn]):
        sink = pa.BufferOutputStream()
        pq.write_table(part.data, sink, **part.options)
        out[part.name] = len(sink.getvalue())
    return out


def compared(
    drafter: Any, pools: DraftPools, ids: list[int], tokens: list[int], rows: Any, position: int
) -> np.ndarray:
    """The live drafter at one position, asked for the recorded starts.

    Returns counts: candidates; those with another log-probability (in steps); by more than a step; with another token.
    """
    n_pairs = len(ids) + position - 1
    state = drafter.open(ids, n_pairs + 1)
    drafter.observe(state, rows.features[:n_pairs], rows.final[:n_pairs], (ids + tokens)[1 : n_pairs + 1])
    counts = np.zeros(4, np.int64)
    for number, level in enumerate(pools.rows(slice(position - 1, position)).levels):
        live = drafter.expand(state, number, level.starts, pools.width)
        gap = np.abs(live.logp.astype(int) - level.expansion.logp)
        counts += gap.size, (gap > 0).sum(), (gap > 1).sum(), (live.token != level.expansion.token).sum()
    return counts


def told(found: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """The counts of `compared`, named."""
    names = ("n_candidates", "n_logp_off", "n_logp_off_by_more_than_a_step", "n_token_off")
    return {kind: dict(zip(names, counts.tolist())) for kind, counts in found.items()}


def measure(config: Config) -> dict[str, Any]:
    """All times and sizes, summed over the prompts."""
    clock: Callable[[], float] = time.perf_counter if config.wall else time.process_time
    spent: dict[str, float] = defaultdict(float)
    size: dict[str, int] = defaultdict(int)
    found: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(4, np.int64))
    target = load_target(config.target)
    places = dict(entry.split("=", 1) for entry in config.weights)
    keeping = Keeping({name: load_drafter(places.get(name, name), target) for name in config.drafters})
    envelope, n_positions = ENVELOPES[config.envelope], 0

    def timed(name: str, is_counted: bool, run: Callable[..., Any], *args: Any) -> Any:
        begin = clock()
        result = run(*args)
        spent[name] += (clock() - begin) * is_counted
        return result

    prompts = load_prompts(config.prompts, limit=config.limit)[0]
    for index, prompt in enumerate([prompts[0], *prompts]):  # the first is run twice, the first time uncounted
        ids, is_counted = target.render(prompt.messages([])), index > 0
        tokens = timed("plain", is_counted, plain, target, ids, config)
        text = ids + tokens[:-1]
        rows = timed("features", is_counted, target.session(len(text) + 1, Sampling()).prefill, text)
        for name, drafter in keeping.drafters.items():
            pools = timed(name, is_counted, record_pools, drafter, envelope, ids, tokens, rows.features, rows.final)
            if name == "specblock":
                short = ENVELOPES["two-blocks"]
                args = (drafter, short, ids, tokens, rows.features, rows.final)
                timed("specblock two blocks", is_counted, record_pools, *args)
            if is_counted:
                for position in range(1, len(tokens), max(1, len(tokens) // config.checked)):
                    found[name] += compared(drafter, pools, ids, tokens, rows, position)
        if is_counted:
            for name, n in timed("encoding", True, part_bytes, keep_turn(target, keeping, ids, tokens, 0)).items():
                size[name] += n
            n_positions += len(tokens) - 1
    return summary(config, dict(spent), dict(size), n_positions) | {"against_live": told(found)}


def summary(config: Config, spent: dict[str, float], size: dict[str, int], n_positions: int) -> dict[str, Any]:
    """Milliseconds and bytes a position, and the ratio of recording everything to plain decoding."""
    each = {name: round(seconds * 1e3 / n_positions, 2) for name, seconds in spent.items()}
    recording = sum(ms for name, ms in each.items() if name != "specblock two blocks")
    third = each.get("specblock", 0.0) - each.get("specblock two blocks", 0.0)
    return {
        "n_positions": n_positions,
        "clock": "wall" if config.wall else "processor",
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "ms_per_position": each,
        "recording_over_plain": round(recording / each["plain"], 2),
        "third_level_ms": round(third, 2),
        "third_level_share": round(third / recording, 3),
        "bytes_per_position": {name: round(n / n_positions) for name, n in size.items()},
        "bytes_per_position_all": round(sum(size.values()) / n_positions),
    }


def main() -> None:
    """Measure and print."""
    config = tyro.cli(Config)
    if config.threads:
        torch.set_num_threads(config.threads)
    result = measure(config)
    if config.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
