"""What a trace holds and whether it is whole: every part read once, strictly, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.poolnames import regrow
from workbench.poolreader import pool_kinds, read_text, stream_pools
from workbench.pools import Text
from workbench.trace import Trace, open_trace, part_path, read_groups


@dataclass
class Finding:
    """What was found. `faults` are sentences; the trace is whole where there is none."""

    trace: str
    status: str = ""  # finished or running
    target: str = ""
    temperature: float = 0.0
    n_prompts: int = 0
    n_expected: int = 0  # prompts the run set out to record
    n_episodes: int = 0  # over all policies
    n_steps: int = 0
    policies: list[str] = field(default_factory=list)
    n_positions: int = 0  # of the plain text, each a possible step start
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)  # drafter -> n_rows, n_bytes, bytes_per_position
    n_feature_rows: int = 0
    n_bytes: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing or broken; a run that was interrupted is not whole."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "is_whole": self.is_whole}


def check_trace(folder: Path) -> Finding:
    """Read everything in a trace folder. InputError where there is no trace at all."""
    trace = open_trace(folder)
    found = Finding(str(folder), n_prompts=len(trace.prompts))
    found.n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    _check_run(trace, found)
    for what in (_check_tables, _check_pools, _check_features):
        try:
            what(trace, found)
        except InputError as error:
            found.faults.append(str(error))
    return found


def _check_run(trace: Trace, found: Finding) -> None:
    """What run.json says of the run, and whether it ran to its end."""
    found.status = str(trace.run.get("status"))
    found.target = str(_of(trace, "target", "name"))
    temperature, n_expected = _of(trace, "sampling", "temperature"), _of(trace, "prompts", "n")
    found.temperature = float(temperature) if isinstance(temperature, int | float) else 0.0
    found.n_expected = n_expected if type(n_expected) is int else 0
    if not trace.is_finished:
        found.faults.append(f"{trace.folder}: the run did not finish ({found.n_prompts} prompts are whole).")
    elif found.n_prompts != found.n_expected:
        found.faults.append(f"{trace.folder}: holds {found.n_prompts} of {found.n_expected} prompts.")


def _of(trace: Trace, key: str, name: str) -> Any:
    about = trace.run.get(key)
    return about.get(name) if isinstance(about, dict) else None


def _check_tables(trace: Trace, found: Finding) -> None:
    """Steps and episodes: readable, and every episode's steps add up to its text."""
    policies: dict[str, None] = {}
    for prompt, episodes, steps in zip(trace.prompts, trace.parts("episodes"), trace.parts("steps")):
        told = {_key(row): row["tokens"] for row in episodes.select([*_KEY, "tokens"]).to_pylist()}
        texts: dict[tuple[Any, ...], list[int]] = {key: tokens[:1] for key, tokens in told.items()}
        for row in steps.select([*_KEY, "tokens"]).to_pylist():
            if _key(row) not in texts:
                raise InputError(f"{part_path(trace.folder, 'steps', prompt)}: holds steps of no episode.")
            texts[_key(row)] += row["tokens"]
        if texts != told:
            raise InputError(f"{part_path(trace.folder, 'steps', prompt)}: an episode's steps do not make its text.")
        if any(key[0] != prompt for key in told):
            raise InputError(f"{part_path(trace.folder, 'episodes', prompt)}: holds another prompt's episodes.")
        found.n_episodes += episodes.num_rows
        found.n_steps += steps.num_rows
        policies |= dict.fromkeys(episodes.column("policy").to_pylist())
    found.policies = list(policies)


_KEY = ("prompt", "turn", "policy")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def _check_pools(trace: Trace, found: Finding) -> None:
    """Pools: readable, along the text, and holding the starts their envelope chooses."""
    text = read_text(trace)
    found.n_positions = text.n_rows
    for kind in pool_kinds(trace):
        n_rows = sum(pools.n_rows for pools in _checked_pools(trace, kind, text))
        paths = [part_path(trace.folder, f"pools-{kind}", prompt) for prompt in dict.fromkeys(text.prompt)]
        n_bytes = sum(path.stat().st_size for path in paths) if kind != "lookup" else 0
        each = round(n_bytes / n_rows, 1) if n_rows else 0.0
        found.pools[kind] = {"n_rows": n_rows, "n_bytes": n_bytes, "bytes_per_position": each}
        if n_rows != text.n_rows:
            found.faults.append(f"{trace.folder}: the pools of {kind} cover {n_rows} of {text.n_rows} positions.")


def _checked_pools(trace: Trace, kind: str, text: Text) -> Iterator[Any]:
    vocab = _of(trace, "target", "vocab_size")
    for _, pools in stream_pools(trace, kind, text):
        if pools.envelope is not None:
            regrow(pools)
        token = pools.levels[0].expansion.token
        if type(vocab) is int and token.size and int(token.max()) >= vocab:
            raise InputError(f"{trace.folder}: the pools of {kind} hold token ids beyond the vocabulary of {vocab}.")
        yield pools


_VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def _check_features(trace: Trace, found: Finding) -> None:
    """Features: a row for every index of prompt and text but the last, all of one width, every value finite."""
    if not trace.run.get("features"):
        return
    text = read_text(trace)
    name = _of(trace, "target", "feature_dtype") or _of(trace, "target", "dtype")
    size = _of(trace, "target", "hidden_size")
    if name not in _VALUE_BYTES or type(size) is not int:
        raise InputError(f"{trace.folder}: run.json does not say how features are stored.")
    n_each = _VALUE_BYTES[name] * size
    n_wanted = sum(map(len, text.prompt_tokens)) + len(text.token) - text.n_episodes
    for prompt in dict.fromkeys(text.prompt):
        path = part_path(trace.folder, "features", prompt)
        for data in read_groups(path, "features"):
            for column, n_bytes in (("features", 3 * n_each), ("final", n_each)):
                rows = data.column(column).to_pylist()
                if any(len(row) != n_bytes for row in rows):
                    raise InputError(f"{path}: a row holds features of another width.")
                if name != "bfloat16" and not np.isfinite(np.frombuffer(b"".join(rows), name)).all():
                    raise InputError(f"{path}: holds features that are not finite.")
            found.n_feature_rows += data.num_rows
    if found.n_feature_rows != n_wanted:
        found.faults.append(f"{trace.folder}: holds features of {found.n_feature_rows} of {n_wanted} indices.")


def as_text(found: Finding) -> str:
    """The finding in words."""
    missing = "" if found.n_prompts == found.n_expected else f" of {found.n_expected}"
    lines = [
        f"{found.trace}: {found.n_prompts}{missing} prompts, {found.n_episodes} episodes of"
        f" {len(found.policies)} policies, {found.n_steps} steps; {found.n_bytes / 1e6:.1f} MB",
        f"target {found.target}, temperature {found.temperature:g}, {found.n_positions} positions to start a step at",
    ]
    for kind, about in found.pools.items():
        stored = f"{about['bytes_per_position']:.0f} bytes a position" if about["n_bytes"] else "from the tokens"
        lines.append(f"pools of {kind}: {about['n_rows']} positions, {stored}")
    if found.n_feature_rows:
        lines.append(f"features: {found.n_feature_rows} indices")
    return "\n".join([*lines, *found.faults, "The trace is whole." if found.is_whole else "The trace is NOT whole."])
