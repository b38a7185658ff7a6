"""A live check from a trace's folder to its findings: what is loaded, walked and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.drafters import load_drafter
from workbench.errors import InputError
from workbench.livecheck import Job, Verified, text_rows, verify_job
from workbench.recorded import Recording, as_float, read_recordings
from workbench.replayrun import Engine, Named
from workbench.sampling import Sampling
from workbench.target import Target, load_target
from workbench.tracesource import TracePools, open_source
from workbench.tree import PRESETS
from workbench.walk import streams, walk

if TYPE_CHECKING:
    from workbench.drafters.base import Drafter


def verify_trace(
    folder: Path,
    specs: Sequence[str],
    most_steps: int | None = None,
    *,
    target_name: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    weights: Sequence[str] = (),
    threads: int | None = None,
    tick: Callable[[], Any] = lambda: None,
) -> list[Verified]:
    """Re-run policies live on a trace, at most `most_steps` steps of each. None: as recorded.

    InputError where the trace, the specs or the models do not fit one another.
    """
    source = open_source(folder)
    specs = specs or [name for name in PRESETS if name.split("-")[0] in source.drafters]
    engine = Engine(source)
    policies = engine.policies(specs)
    jobs = [_job(engine, named) for named in policies]
    if threads is not None:
        torch.set_num_threads(threads)
    target = recorded_target(source, target_name, device, dtype)
    drafters = recorded_drafters(source, {arm.drafter for job in jobs for arm in job.arms}, weights, target)
    sampling = Sampling(**source.trace.run["sampling"])
    found = []
    for job in jobs:
        recordings = _recordings(source, target)
        found.append(verify_job(job, source.text, target, drafters, sampling, recordings, most_steps, tick))
    return found


def _job(engine: Engine, named: Named) -> Job:
    """A policy's first stream."""
    text, menu = engine.source.text, engine.menu(named.policy)
    steps = walk(named.policy, menu, text, streams(text.n_episodes), engine.cost)
    pools = [next(engine.source.parts(arm.drafter))[1] for arm in named.policy.arms]
    return Job(named.name, named.policy.arms, menu, pools, steps)


def _recordings(source: TracePools, target: Target) -> Iterator[Recording]:
    """Every episode with its features: the recorded ones, or those of one prefill, as when pools are recorded."""
    if source.trace.run.get("features"):
        yield from (as_float(recording, target.dtype) for _, recording in read_recordings(source.trace, source.text))
        return
    text = source.text
    for e in range(text.n_episodes):
        tokens = text.token[text.offset[e] : text.offset[e + 1]].tolist()
        yield text_rows(target, text.prompt_tokens[e].tolist(), tokens)


def recorded_target(source: TracePools, name: str | None, device: str | None, dtype: str | None) -> Target:
    """The trace's target, loaded as it was recorded but for what is given. InputError if its weights are others."""
    about = source.trace.run["target"]
    target = load_target(
        name or about["name"],
        device or about["device"],
        dtype or about["dtype"],
        feature_dtype=about["feature_dtype"],
        feature_layers=about["feature_layers"],
    )
    if target.weights_hash != about["weights_hash"]:
        raise InputError(f"The target {target.name} has other weights than the one that was recorded.")
    return target


def recorded_drafters(
    source: TracePools, kinds: set[str], weights: Sequence[str], target: Target
) -> dict[str, Drafter]:
    """The drafters of the trace's pools. InputError if weights are others than those recorded."""
    places = dict(entry.partition("=")[::2] for entry in weights)
    if unknown := sorted(set(places) - kinds):
        raise InputError(f"Weights are given for {unknown[0]!r}, which is not among the drafters.")
    found = {}
    for kind in sorted(kinds):
        drafter = load_drafter(places.get(kind, kind), target)
        if drafter.weights_hash != source.trace.run["pools"][kind]["weights_hash"]:
            raise InputError(f"The drafter {kind} has other weights than those recorded; give them with --weights.")
        found[kind] = drafter
    return found


def format_verified(found: Sequence[Verified]) -> str:
    """A line a policy, then a line a disagreement."""
    lines = [f"{v.policy}: {v.n_steps - len(v.found)} of {v.n_steps} steps agree ({v.agreement:.2%})" for v in found]
    for d in (d for v in found for d in v.found):
        gap = "" if d.gap is None else f", gap {d.gap:.2g}"
        place = f"prompt {d.prompt_id}, turn {d.turn + 1}, position {d.position}"
        lines.append(f"  {d.policy}, {place}: {d.cause}{gap} ({', '.join(d.columns)})")
    return "\n".join(lines)
