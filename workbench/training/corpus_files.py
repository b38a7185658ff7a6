"""A corpus folder: run.json and one parquet part per batch (COLUMNS), each written whole or not at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.trace import write_durably
from workbench.training.corpus_text import Part, Row

FORMAT = "speculation-corpus"
FORMAT_VERSION = 1
COLUMNS = pa.schema(
    [
        ("kind", pa.string()),  # task family
        ("temperature", pa.float32()),  # of the answer; 0 is greedy
        ("prompt_ids", pa.list_(pa.int32())),  # chat template included
        ("response_ids", pa.list_(pa.int32())),  # ends with a stop id where the answer finished
    ]
)


def part_path(folder: Path, index: int) -> Path:
    """Where a part stands."""
    return folder / f"part-{index:05d}.parquet"


def count_parts(folder: Path) -> int:
    """Parts in the folder. Raises InputError if one before the last is missing."""
    names = sorted(path.name for path in folder.glob("part-*.parquet"))
    if names != [part_path(folder, index).name for index in range(len(names))]:
        raise InputError(f"{folder}: a part before the last is missing, or a file there is none of this corpus.")
    return len(names)


def write_part(folder: Path, index: int, part: Part) -> None:
    """Write a part durably; the counts of dropped prompts travel in its metadata."""
    columns = {name: [getattr(row, name) for row in part.rows] for name in COLUMNS.names}
    table = pa.table(columns, schema=COLUMNS.with_metadata({b"dropped": json.dumps(part.dropped).encode()}))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_durably(part_path(folder, index), sink.getvalue().to_pybytes())


def read_part(folder: Path, index: int) -> pa.Table:
    """A part as a table of COLUMNS. Raises InputError for a file that is none."""
    path = part_path(folder, index)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a whole parquet file.") from error
    if not table.schema.equals(COLUMNS):
        raise InputError(f"{path}: its columns are not those of a corpus ({', '.join(COLUMNS.names)}).")
    return table


def read_rows(folder: Path, index: int) -> Iterator[Row]:
    """The rows of a part."""
    for row in read_part(folder, index).to_pylist():
        yield Row(**row)


def summarise(folder: Path) -> dict[str, Any]:
    """Counts of the whole corpus, from its parts."""
    dropped: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    n_prompt = n_response = n_greedy = 0
    for index in range(count_parts(folder)):
        table = read_part(folder, index)
        dropped.update(json.loads((table.schema.metadata or {}).get(b"dropped", b"{}")))
        by_kind.update(table["kind"].to_pylist())
        n_greedy += sum(value == 0 for value in table["temperature"].to_pylist())
        n_prompt += sum(map(len, table["prompt_ids"].to_pylist()))
        n_response += sum(map(len, table["response_ids"].to_pylist()))
    return {
        "answers": by_kind.total(),
        "greedy_answers": n_greedy,
        "prompt_tokens": n_prompt,
        "response_tokens": n_response,
        "by_kind": dict(sorted(by_kind.items())),
        "dropped": dict(sorted(dropped.items())),
    }


def refuse_if_taken(folder: Path, is_resumed: bool) -> None:
    """InputError unless a corpus can be written there: an empty or new folder, or, to be resumed, a corpus."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is not a folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not is_resumed:
        raise InputError(f"{folder}: is not empty; choose another folder, or continue the corpus there with --resume.")
    read_run(folder)


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a corpus folder. Raises InputError if there is none of this format."""
    path = folder / "run.json"
    try:
        run = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{folder}: no corpus here (no readable run.json).") from None
    if not isinstance(run, dict) or (run.get("format"), run.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise InputError(f"{path}: not the run file of a corpus of format {FORMAT_VERSION}.")
    if not isinstance(run.get("sessions"), list):
        raise InputError(f"{path}: its list of sessions is damaged.")
    return run


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write run.json durably."""
    write_durably(folder / "run.json", json.dumps(run, indent=1, ensure_ascii=False, allow_nan=False).encode())
