"""Reading a trace folder as if a stranger had made it: every odd file is one sentence, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_metrics import a_step, an_episode

from workbench import trace as trace_module
from workbench.errors import InputError
from workbench.schema import SCHEMA_VERSION, to_table
from workbench.trace import (
    FORMAT,
    begin_run,
    finished_prompts,
    first_difference,
    open_trace,
    part_path,
    write_prompt,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace of three prompts."""
    out = tmp_path / "trace"
    begin_run(out, {"format": FORMAT, "schema_version": SCHEMA_VERSION}, {"started": "now"})
    for prompt in range(3):
        steps = to_table([a_step(prompt, "a", "plain", t, 1, 1.0) for t in (1, 2)], "steps")
        write_prompt(out, prompt, steps, to_table([an_episode(prompt, "a", "plain", [1, 2, 3])], "episodes"), [])
    return out


def test_text_that_is_no_text_is_told(folder: Path) -> None:
    """Bytes that are not UTF-8 in a string column."""
    path = part_path(folder, "episodes", 0)
    row = an_episode(0, "a", "plain", [1], prompt_id="MARKMARK")
    pq.write_table(to_table([row], "episodes"), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"MARKMARK", b"MARK\xff\xfe\xffK"))
    with pytest.raises(InputError, match=r"episodes-000000\.parquet: damaged"):
        open_trace(folder).load("episodes")


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def test_what_was_written_is_read(folder: Path) -> None:
    trace = open_trace(folder)
    assert trace.prompts == [0, 1, 2] and not trace.is_finished
    assert trace.load("steps").column("prompt").to_pylist() == [0, 0, 1, 1, 2, 2]
    assert [part.num_rows for part in trace.parts("episodes")] == [1, 1, 1]
    assert trace.load("steps", ["prompt", "position"]).num_columns == 2


def test_only_whole_prompts_count(folder: Path) -> None:
    part_path(folder, "episodes", 1).unlink()
    (folder / ".episodes-000007.parquet.tmp").write_bytes(b"half")
    (folder / "notes.txt").write_text("a stranger's")
    assert open_trace(folder).prompts == [0, 2] == finished_prompts(folder)
    part_path(folder, "steps", 2).unlink()
    with pytest.raises(InputError, match=r"steps-000002\.parquet: missing"):
        open_trace(folder).load("steps")


def test_problems_are_kept_with_their_prompt(folder: Path) -> None:
    empty = to_table([], "steps"), to_table([], "episodes")
    write_prompt(folder, 3, *empty, ["x:4: too long."])
    assert open_trace(folder).problems() == ["x:4: too long."]
    damage = {b"schema_version": str(SCHEMA_VERSION).encode(), b"problems": b"{"}
    rewrite(part_path(folder, "episodes", 3), lambda table: table.replace_schema_metadata(damage))
    with pytest.raises(InputError, match="list of problems is damaged"):
        open_trace(folder).problems()


@pytest.mark.parametrize("n_kept", [0, 3, 100, -1])
def test_a_part_cut_short_is_told(folder: Path, n_kept: int) -> None:
    path = part_path(folder, "steps", 1)
    path.write_bytes(path.read_bytes()[:n_kept])
    with pytest.raises(InputError, match=r"steps-000001\.parquet: (not a whole parquet file|damaged)"):
        open_trace(folder).load("steps")


def test_flipped_bytes_are_told_or_harmless(folder: Path) -> None:
    """No byte of a part, overwritten, gives anything but a table or an `InputError`."""
    path = part_path(folder, "episodes", 1)
    whole = path.read_bytes()
    for place in range(0, len(whole), 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            open_trace(folder).load("episodes")
        except InputError as error:
            assert "episodes-000001.parquet" in str(error)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.drop_columns(["task"]), "column 'task' of the steps table is missing"),
        (lambda t: t.append_column("extra", pa.array([1, 2])), "column 'extra' is unknown"),
        (lambda t: t.replace_schema_metadata({"schema_version": "7"}), "schema version '7'"),
        (lambda t: t.replace_schema_metadata(None), "not a table of this workbench"),
    ],
)
def test_foreign_columns_and_versions_are_told(folder: Path, change: Any, sentence: str) -> None:
    rewrite(part_path(folder, "steps", 0), change)
    with pytest.raises(InputError, match=sentence):
        open_trace(folder).load("steps")


def test_sizes_are_judged_before_data_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("data was read"))
    for limit, value, sentence in (
        ("MAX_PART_ROWS", 1, "holds 2 rows, which cannot be"),
        ("MAX_PART_VALUES", 1, "says it holds 2 values"),
        ("MAX_PART_BYTES", 100, "larger than"),
    ):
        with monkeypatch.context() as patch, pytest.raises(InputError, match=sentence):
            patch.setattr(trace_module, limit, value)
            open_trace(folder).load("steps")
    with monkeypatch.context() as patch, pytest.raises(InputError, match="more than 2 files"):
        patch.setattr(trace_module, "MAX_PARTS", 2)
        open_trace(folder)


def repeated(row: pa.Table, n: int) -> pa.Table:
    return pa.concat_tables([row] * n).combine_chunks()


def test_a_text_stored_once_and_repeated_is_measured_before_it_is_unpacked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes on disk that would become 50 times 10,000 bytes in memory."""
    rows = repeated(to_table([an_episode(0, "a", "plain", [1], text="x" * 10_000)], "episodes"), 50)
    path = part_path(folder, "episodes", 0)
    pq.write_table(rows, path, compression="zstd")
    assert path.stat().st_size < 20_000
    assert set(open_trace(folder).load("episodes").column("text").to_pylist()) == {"x" * 10_000, ""}
    monkeypatch.setattr(trace_module, "MAX_PART_BYTES", 100_000)
    with pytest.raises(InputError, match="its texts would unpack to more"):
        open_trace(folder).load("episodes")


def test_numbers_stored_once_and_repeated_are_measured_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = to_table([an_episode(0, "a", "plain", [7] * 1000)], "episodes")
    path = part_path(folder, "episodes", 0)
    pq.write_table(repeated(row, 50), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(trace_module, "MAX_PART_BYTES", 100_000)  # 50 times 1,000 tokens of 4 bytes are more
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("data was read"))
    with pytest.raises(InputError, match="would unpack to more"):
        open_trace(folder).load("episodes")


def test_lists_of_one_letter_are_equally_long(folder: Path) -> None:
    """A step's slots are told by eight lists; a file in which one of them is shorter is refused, not misread."""
    path = part_path(folder, "steps", 0)

    def longer(table: pa.Table) -> pa.Table:
        i = table.column_names.index("slot_rank")
        tiers = pa.array([[0, *row] for row in table.column("slot_rank").to_pylist()], table.schema.field(i).type)
        return table.set_column(i, table.schema.field(i), tiers)

    rewrite(path, longer)
    with pytest.raises(InputError, match="'slot_level' and 'slot_rank' list different numbers of things in a row"):
        open_trace(folder).load("steps")
    assert open_trace(folder).load("steps", ["prompt", "slot_rank"]).num_rows == 6  # alone it is as good as any


def test_empty_values_are_told_whichever_columns_are_read(folder: Path) -> None:
    path = part_path(folder, "steps", 0)

    def emptied(table: pa.Table) -> pa.Table:
        i = table.column_names.index("position")
        return table.set_column(i, table.schema.field(i).with_nullable(True), pa.array([None, 1], pa.int32()))

    rewrite(path, emptied)
    for columns in (None, ["position"]):
        with pytest.raises(InputError, match="column 'position' has empty values"):
            open_trace(folder).load("steps", columns)


def test_the_whole_is_bounded_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_LOAD_BYTES", 10)
    with pytest.raises(InputError, match="the steps table is larger"):
        open_trace(folder).load("steps")


def test_run_json_must_be_a_trace_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = json.loads((folder / "run.json").read_text())
    for text, sentence in (
        ("[" * 100_000, "not readable as JSON"),
        ("{", "not readable as JSON"),
        ("[]", "not the run file of a trace"),
        (json.dumps(run | {"format": "other"}), "not the run file of a trace"),
        (json.dumps(run | {"schema_version": 99}), "schema version 99"),
    ):
        (folder / "run.json").write_text(text)
        with pytest.raises(InputError, match=sentence):
            open_trace(folder)
    monkeypatch.setattr(trace_module, "MAX_RUN_BYTES", 10)
    with pytest.raises(InputError, match="larger than"):
        open_trace(folder)
    with pytest.raises(InputError, match="no trace here"):
        open_trace(folder.parent)


def test_an_empty_trace_says_so(tmp_path: Path) -> None:
    begin_run(tmp_path / "a", {"format": FORMAT, "schema_version": SCHEMA_VERSION}, {})
    with pytest.raises(InputError, match="no finished prompt yet"):
        open_trace(tmp_path / "a").load("steps")


def test_the_first_difference_is_named() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) is None
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "a.1.b"
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == "a"
    assert first_difference({"a": 1}, {"b": 1}) == "a"
    assert first_difference({"a": 1}, {"a": True}) == "a"
