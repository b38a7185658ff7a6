"""Read the text of a trace, and the pools along it: whole, or a row group at a time for traces larger than memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from workbench.errors import InputError
from workbench.pools import DraftPools, Text, lookup_pools, stack_levels
from workbench.poolstore import PoolShape, pools_from
from workbench.schema import PLAIN
from workbench.trace import Trace, part_path, read_groups

_KIND = re.compile(r"[a-z0-9]{1,40}")  # a drafter's name: it stands in file names
MAX_POOL_VALUES = 1 << 31  # candidates held at once by `read_pools`


def read_text(trace: Trace) -> Text:
    """The texts of plain decoding, one episode a prompt and turn. InputError where the trace does not hold them."""
    names = ["prompt", "prompt_id", "task", "turn", "policy", "prompt_tokens", "tokens"]
    rows: list[dict[str, Any]] = []
    for part in trace.parts("episodes", names):
        rows += part.filter(pc.equal(part.column("policy"), PLAIN)).to_pylist()
    if not rows:
        raise InputError(f"{trace.folder}: holds no text of plain decoding.")
    texts, n_vocab = [row["tokens"] for row in rows], _number(trace, "target", "vocab_size")
    if min(map(len, texts)) < 1:
        raise InputError(f"{trace.folder}: an episode has no tokens.")
    token = np.concatenate([np.asarray(tokens, np.int32) for tokens in texts])
    prompts = [np.asarray(row["prompt_tokens"], np.int32) for row in rows]
    if any(x.min(initial=0) < 0 or x.max(initial=0) >= n_vocab for x in (token, *prompts)):
        raise InputError(f"{trace.folder}: a token id lies outside the target's vocabulary of {n_vocab}.")
    most, context = _number(trace, "max_new_tokens"), _number(trace, "target", "max_context")
    room = np.array([min(most, context - len(prompt)) for prompt in prompts])
    if (room < [len(tokens) for tokens in texts]).any():
        raise InputError(f"{trace.folder}: an episode is longer than run.json allows.")
    return Text(
        token=token,
        offset=np.cumsum([0, *map(len, texts)], dtype=np.int64),
        prompt=[row["prompt"] for row in rows],
        prompt_id=[row["prompt_id"] for row in rows],
        task=[row["task"] for row in rows],
        turn=[row["turn"] for row in rows],
        prompt_tokens=prompts,
        room=room.astype(np.int32),
        stop_ids=_stop_ids(trace),
    )


def pool_kinds(trace: Trace) -> list[str]:
    """The drafters whose pools the trace holds, prompt lookup included."""
    return list(_described(trace))


def pool_shape(trace: Trace, kind: str) -> PoolShape:
    """What run.json says all rows of a drafter's pools share. InputError where the trace has none of it."""
    described = _described(trace)
    if kind not in described:
        there = ", ".join(described) or "none"
        raise InputError(f"{trace.folder}: holds no pools of the drafter {kind!r}; there are {there}.")
    return PoolShape.from_dict(kind, described[kind], str(trace.folder))


def read_pools(trace: Trace, kind: str, text: Text | None = None) -> DraftPools:
    """All of a drafter's pools, rows as in `read_text`; InputError where they would not fit `MAX_POOL_VALUES`."""
    shape, parts, n_values = pool_shape(trace, kind), [], 0
    for _, pools in stream_pools(trace, kind, text):
        parts.append(pools.levels)
        n_values += sum(level.expansion.token.size for level in pools.levels)
        if n_values > MAX_POOL_VALUES:
            raise InputError(f"{trace.folder}: the pools of {kind} do not fit in memory at once.")
    levels = stack_levels(parts, shape.n_slots, shape.width)
    return DraftPools(kind, shape.n_slots, shape.has_tiers, levels, shape.envelope)


def stream_pools(trace: Trace, kind: str, text: Text | None = None) -> Iterator[tuple[slice, DraftPools]]:
    """A drafter's pools a row group at a time, each with its slice of the text's rows. InputError on odd parts."""
    text = read_text(trace) if text is None else text
    shape = pool_shape(trace, kind)
    if kind == "lookup":
        yield slice(0, text.n_rows), lookup_pools(text, _max_ngram(trace), shape.n_slots)
        return
    keys = np.stack([np.asarray(text.prompt)[text.row_episode()], np.asarray(text.turn)[text.row_episode()]])
    position, begin = text.row_position(), 0
    for prompt in dict.fromkeys(text.prompt):
        path = part_path(trace.folder, f"pools-{kind}", prompt)
        for data in read_groups(path, "pools"):
            rows = slice(begin, begin + data.num_rows)
            wanted = (*keys[:, rows], position[rows])
            found = (data.column(name).to_numpy() for name in ("prompt", "turn", "position"))
            if not all(np.array_equal(a, b) for a, b in zip(found, wanted)):
                raise InputError(f"{path}: its rows are not the positions of the text.")
            yield rows, pools_from(data, shape, str(path))
            begin = rows.stop
        if begin < text.n_rows and keys[0, begin] == prompt:
            raise InputError(f"{path}: ends before the text does.")


def _described(trace: Trace) -> Mapping[str, Any]:
    found = trace.run.get("pools")
    if found is not None and (not isinstance(found, dict) or not all(_KIND.fullmatch(kind) for kind in found)):
        raise InputError(f"{trace.folder}: run.json's pools are damaged.")
    return found or {}


def _max_ngram(trace: Trace) -> int:
    return _whole(_described(trace)["lookup"].get("max_ngram"), "pools.lookup.max_ngram", trace.folder)


def _number(trace: Trace, *keys: str) -> int:
    value: Any = trace.run
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return _whole(value, ".".join(keys), trace.folder)


def _whole(value: Any, name: str, folder: Path) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{folder}: run.json's {name} must be a whole number above 0, not {str(value)[:40]}.")
    return value


def _stop_ids(trace: Trace) -> tuple[int, ...]:
    about = trace.run.get("target")
    found = about.get("stop_ids") if isinstance(about, dict) else None
    if not isinstance(found, list) or any(type(stop) is not int for stop in found):
        raise InputError(f"{trace.folder}: run.json's target.stop_ids must be a list of token ids.")
    return tuple(found)
