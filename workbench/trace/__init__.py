"""The trace folder on disk: durable writing of one part a prompt, and a strict reader in bounded memory.

Every file is treated as hostile: sizes, row counts and schemas are checked on the metadata before any data is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from workbench.errors import InputError
from workbench.schema import SCHEMA_VERSION, check_schema, check_table

FORMAT = "speculation-trace"
RUN_FILE = "run.json"
MAX_RUN_BYTES = 64 << 20
MAX_PARTS = 1_000_000
MAX_PART_ROWS = 5_000_000
MAX_PART_VALUES = 100_000_000  # of one column of one part, list elements counted
MAX_PART_BYTES = 1 << 30  # of one part, uncompressed
MAX_GROUP_BYTES = 1 << 28  # of one row group, uncompressed, where a part is read by row group
MAX_LOAD_BYTES = 8 << 30  # of one table, all parts together, uncompressed
_PART_NAME = re.compile(r"(steps|episodes|features|pools-[a-z0-9]+)-(\d{6,9})\.parquet")
_THRIFT_LIMITS = {"thrift_string_size_limit": 16 << 20, "thrift_container_size_limit": 1_000_000}


def part_path(folder: Path, name: str, prompt: int) -> Path:
    """Where a part of one prompt stands; `name` is its table's, for pools with the drafter: `pools-eagle3`."""
    return folder / f"{name}-{prompt:06d}.parquet"


def write_durably(path: Path, payload: bytes) -> None:
    """Write a file whole or not at all: temporary name, flushed to disk, renamed. OSError on a fault."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Make a rename durable; a system that cannot open folders skips it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write run.json durably."""
    text = json.dumps(run, indent=1, ensure_ascii=False, allow_nan=False)
    write_durably(folder / RUN_FILE, text.encode())


@dataclass(frozen=True)
class Part:
    """A table to be written for a prompt; `options` go to the parquet writer."""

    name: str
    data: pa.Table
    options: Mapping[str, Any] = field(default_factory=lambda: {"compression": "zstd"})


def write_prompt(
    folder: Path, prompt: int, steps: pa.Table, episodes: pa.Table, problems: Sequence[str], more: Sequence[Part] = ()
) -> None:
    """Write one finished prompt durably: every other part, then the episodes, whose being there makes it whole."""
    metadata = {**(episodes.schema.metadata or {}), b"problems": json.dumps(list(problems)).encode()}
    for part in (*more, Part("steps", steps), Part("episodes", episodes.replace_schema_metadata(metadata))):
        sink = pa.BufferOutputStream()
        pq.write_table(part.data, sink, **part.options)
        write_durably(part_path(folder, part.name, prompt), sink.getvalue().to_pybytes())


@contextmanager
def disk_faults_told(folder: Path) -> Iterator[None]:
    """Turn a fault of the disk (full, read-only, no rights) into an `InputError`; parts written before stay whole."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"{folder}: cannot be written ({why}); every prompt recorded before is whole.") from error


def refuse_if_taken(folder: Path, is_resumed: bool) -> None:
    """`InputError` unless a run can be written there: an empty or new folder, or, to be resumed, a trace."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is not a folder.")
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        raise InputError(f"{folder}: cannot be written (no permission in {nearest}).")
    if not folder.exists() or all(path.name == f".{RUN_FILE}.tmp" for path in folder.iterdir()):
        return
    if not is_resumed:
        raise InputError(f"{folder}: is not empty; choose another folder, or continue the run there with --resume.")
    read_run(folder)


def begin_run(folder: Path, run: Mapping[str, Any], session: Mapping[str, Any]) -> dict[str, Any]:
    """Write run.json with status `running` into a new folder, or take up the run there if it is the same one.

    run: what fixes the result, compared key by key (`InputError` names the first that differs). session: what does not
    (argv, versions, machine, moment); run.json lists one for each start. Returns what was written.
    """
    with disk_faults_told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sessions = []
        if (folder / RUN_FILE).exists():
            known = read_run(folder)
            sessions = known.pop("sessions", [])
            fixed = {key: value for key, value in known.items() if key not in ("status", "problems")}
            if key := first_difference(fixed, json.loads(json.dumps(run))):
                raise InputError(f"{folder}: cannot be resumed, since {key} differs from the run there.")
        begun = dict(run) | {"status": "running", "problems": [], "sessions": [*sessions, dict(session)]}
        write_run(folder, begun)
    return begun


def first_difference(a: Any, b: Any, name: str = "") -> str | None:
    """Dotted name of the first key (or list entry) in which two JSON values differ; None if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(key, a.get(key), b.get(key)) for key in [*a, *(key for key in b if key not in a)]]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(str(i), left, right) for i, (left, right) in enumerate(zip(a, b))]
    else:
        return None if a == b and type(a) is type(b) else name
    found = (first_difference(left, right, f"{name}.{key}".lstrip(".")) for key, left, right in pairs)
    return next((difference for difference in found if difference is not None), None)


def finished_prompts(folder: Path) -> list[int]:
    """Prompts whose episodes part is there, in order."""
    names = sorted(path.name for path in folder.iterdir())
    if len(names) > MAX_PARTS:
        raise InputError(f"{folder}: holds more than {MAX_PARTS} files; this is no trace.")
    matches = (_PART_NAME.fullmatch(name) for name in names)
    return sorted(int(m[2]) for m in matches if m and m[1] == "episodes")


@dataclass(frozen=True)
class Trace:
    """An opened trace folder: its run.json and the prompts that are whole."""

    folder: Path
    run: dict[str, Any]
    prompts: list[int]

    @property
    def is_finished(self) -> bool:
        """Whether the recording ran to its end."""
        return self.run.get("status") == "finished"

    def parts(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """One checked table a prompt, in order."""
        for prompt in self.prompts:
            yield read_part(part_path(self.folder, table, prompt), table, columns)

    def load(self, table: str, columns: Sequence[str] | None = None) -> pa.Table:
        """All parts of `table` as one. Refuses what would not fit `MAX_LOAD_BYTES`."""
        loaded, n_bytes = [], 0
        for part in self.parts(table, columns):
            n_bytes += part.nbytes
            if n_bytes > MAX_LOAD_BYTES:
                raise InputError(f"{self.folder}: the {table} table is larger than {MAX_LOAD_BYTES >> 30} GiB.")
            loaded.append(part.replace_schema_metadata(None))
        if not loaded:
            raise InputError(f"{self.folder}: holds no finished prompt yet.")
        return pa.concat_tables(loaded)

    def problems(self) -> list[str]:
        """The sentences recorded about prompts that could not be run whole."""
        found = []
        for prompt in self.prompts:
            path = part_path(self.folder, "episodes", prompt)
            found += _problems_of(_opened(path, "episodes").schema_arrow.metadata or {}, path)
        return found


def _problems_of(metadata: Mapping[bytes, bytes], path: Path) -> list[str]:
    try:
        listed = json.loads(metadata.get(b"problems", b"[]"))
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise InputError(f"{path}: its list of problems is damaged.")
    return listed


def open_trace(folder: Path | str) -> Trace:
    """Open a trace folder. A missing, foreign, damaged or other-version one is an `InputError`."""
    folder = Path(folder)
    return Trace(folder, read_run(folder), finished_prompts(folder))


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a trace folder, checked for format and version."""
    path = folder / RUN_FILE
    if not path.is_file():
        raise InputError(f"{folder}: no trace here (no {RUN_FILE}).")
    if path.stat().st_size > MAX_RUN_BYTES:
        raise InputError(f"{path}: larger than {MAX_RUN_BYTES >> 20} MiB; this is no trace.")
    try:
        run = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON.") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise InputError(f"{path}: not the run file of a trace.")
    if run.get("schema_version") != SCHEMA_VERSION:
        found = str(run.get("schema_version"))[:20]
        raise InputError(f"{path}: schema version {found}, but this workbench reads version {SCHEMA_VERSION}.")
    return run


def read_part(path: Path, table: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one part, strictly: schema, sizes, nulls and list lengths are checked, sizes before data is unpacked."""
    file = _opened(path, table)
    schema = file.schema_arrow
    try:
        _check_sizes(file.metadata, schema, path)
        texts = [leaf for leaf in _leaves(file.metadata) if _is_text(schema.field(leaf.partition(".")[0]).type)]
        # Texts come as dictionaries, so that a text repeated a million times is held once until it has been measured.
        whole = pq.ParquetFile(path, metadata=file.metadata, read_dictionary=texts, **_THRIFT_LIMITS)
        data = whole.read(columns=None if columns is None else list(columns))
        data.validate(full=True)
        data = _spelled_out(data, schema, path)
    except InputError:
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        raise InputError(f"{path}: damaged or cut short.") from error
    check_table(data, table, str(path), columns)
    return data


def read_groups(path: Path, table: str) -> Iterator[pa.Table]:
    """Read one part a row group at a time, as strictly as `read_part`; no group may unpack to much. No text columns."""
    file = _opened(path, table)
    schema = file.schema_arrow
    _check_rows(file.metadata, path)
    for i in range(file.metadata.num_row_groups):
        _check_bytes([file.metadata.row_group(i)], schema, path, MAX_GROUP_BYTES)
        try:
            data = file.read_row_group(i)
            data.validate(full=True)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise InputError(f"{path}: damaged or cut short.") from error
        check_table(data, table, str(path))
        yield data


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind.value_type if pa.types.is_list(kind) else kind)


def _leaves(metadata: pq.FileMetaData) -> list[str]:
    """Names of the columns as they are stored; those of lists go on after a dot."""
    return [metadata.schema.column(i).path for i in range(metadata.num_columns)]


def _spelled_out(data: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    """Texts as such instead of dictionaries, unless they would take more than `MAX_PART_BYTES`."""
    n_bytes = 0
    for name in data.column_names:
        for chunk in data.column(name).chunks if _is_text(schema.field(name).type) else ():
            found = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
            lengths = pc.take(pc.binary_length(found.dictionary), found.indices)
            n_bytes += pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
    if n_bytes > MAX_PART_BYTES:
        raise InputError(f"{path}: its texts would unpack to more than {MAX_PART_BYTES >> 20} MiB.")
    return data.cast(pa.schema([schema.field(name) for name in data.column_names], schema.metadata))


def _opened(path: Path, table: str) -> pq.ParquetFile:
    if not path.is_file():
        raise InputError(f"{path}: missing.")
    if path.stat().st_size > MAX_PART_BYTES:
        raise InputError(f"{path}: larger than {MAX_PART_BYTES >> 20} MiB.")
    try:
        file = pq.ParquetFile(path, **_THRIFT_LIMITS)
        schema = file.schema_arrow
    except (pa.ArrowException, ValueError, OSError) as error:
        raise InputError(f"{path}: not a whole parquet file.") from error
    check_schema(schema, table, str(path))
    return file


def _check_sizes(metadata: pq.FileMetaData, schema: pa.Schema, path: Path) -> None:
    """Refuse absurd row, value and byte counts, read from the footer alone."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    _check_rows(metadata, path)
    _check_bytes(groups, schema, path, MAX_PART_BYTES)


def _check_rows(metadata: pq.FileMetaData, path: Path) -> None:
    n_rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if not 0 <= metadata.num_rows <= MAX_PART_ROWS or sum(n_rows) != metadata.num_rows or min(n_rows, default=0) < 0:
        raise InputError(f"{path}: says it holds {metadata.num_rows} rows, which cannot be.")


def _check_bytes(groups: Sequence[Any], schema: pa.Schema, path: Path, most: int) -> None:
    """Refuse row groups that would unpack to more than `most` bytes together."""
    n_stored = n_unpacked = 0
    for group in groups:
        for i in range(group.num_columns):
            column = group.column(i)
            if not 0 <= column.num_values <= MAX_PART_VALUES:
                raise InputError(f"{path}: column {column.path_in_schema!r} says it holds {column.num_values} values.")
            kind = schema.field(column.path_in_schema.partition(".")[0]).type
            if pa.types.is_binary(kind) and any("DICTIONARY" in name for name in column.encodings):
                raise InputError(f"{path}: column {column.path_in_schema!r} repeats values by a dictionary.")
            n_stored += column.total_uncompressed_size
            n_unpacked += column.num_values * _value_bytes(kind)
    if max(n_stored, n_unpacked) > most:  # equal values are stored once: few bytes may hold many values
        raise InputError(f"{path}: would unpack to more than {most >> 20} MiB.")


def _value_bytes(kind: pa.DataType) -> int:
    """Bytes of one value in memory; of a text, its place in the dictionary; raw bytes are all stored."""
    scalar = kind.value_type if pa.types.is_list(kind) else kind
    return 4 if pa.types.is_string(scalar) or pa.types.is_binary(scalar) else max(1, scalar.bit_width // 8)
