"""The schema as data: writer, checker and documentation say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from workbench.errors import InputError
from workbench.schema import STEP_COLUMNS, TABLES, arrow_schema, check_table, schema_markdown, to_table

_VALUES: dict[str, Any] = {"bool": True, "float64": 1.5, "string": "x", "bytes": b"x"}


def a_row(table: str) -> dict[str, Any]:
    row = {}
    for column in TABLES[table]:
        scalar = column.dtype.rstrip("?").partition("[")[0]
        value = _VALUES.get(scalar, 3)
        row[column.name] = [value, value] if "[" in column.dtype else value
    return row


@pytest.mark.parametrize("table", list(TABLES))
def test_rows_round_trip(table: str) -> None:
    row = a_row(table)
    assert to_table([row], table).to_pylist() == [row]
    assert to_table([], table).num_rows == 0


def test_an_unknown_or_missing_key_is_named() -> None:
    row = a_row("steps")
    with pytest.raises(InputError, match="'tau' is unknown or missing"):
        to_table([row | {"tau": 2.0}], "steps")
    del row["n_nodes"]
    with pytest.raises(InputError, match="'n_nodes' is unknown or missing"):
        to_table([row], "steps")


def test_the_checker_names_the_odd_column() -> None:
    good = to_table([a_row("steps")], "steps")
    check_table(good, "steps")
    with pytest.raises(InputError, match="'n_nodes' of the steps table is missing"):
        check_table(good.drop_columns(["n_nodes"]), "steps", "part 3")
    with pytest.raises(InputError, match="part 3: column 'extra' is unknown"):
        check_table(good.append_column("extra", pa.array([1])), "steps", "part 3")
    place = good.schema.get_field_index("n_nodes")
    with pytest.raises(InputError, match="'n_nodes' has type int64, not int32"):
        check_table(good.set_column(place, "n_nodes", pa.array([1], pa.int64())), "steps")


def test_nulls_stand_only_where_they_may() -> None:
    row = a_row("steps") | {"bonus": None}
    assert to_table([row], "steps").column("bonus").null_count == 1
    with pytest.raises(InputError, match="'task' has empty values"):
        to_table([row | {"task": None}], "steps")


def test_another_version_or_a_foreign_table_is_refused() -> None:
    good = to_table([a_row("steps")], "steps")
    with pytest.raises(InputError, match="schema version '999'"):
        check_table(good.replace_schema_metadata({"schema_version": "999"}), "steps")
    with pytest.raises(InputError, match="not a table of this workbench"):
        check_table(good.replace_schema_metadata(None), "steps")


def test_every_column_is_described_and_its_unit_told_by_its_name() -> None:
    for columns in TABLES.values():
        assert len({c.name for c in columns}) == len(columns)
        for column in columns:
            assert column.meaning.endswith(".")
            assert column.name.endswith("_ms") == (column.unit == "ms")
            if column.name.startswith(("is_", "has_")):
                assert column.dtype.startswith("bool")


def test_list_columns_hold_lists_without_nulls() -> None:
    field = arrow_schema("steps").field("slot_rank")
    assert field.type == pa.list_(pa.field("element", pa.int16(), nullable=False))
    assert {c.name for c in STEP_COLUMNS if "[Q]" in c.dtype} == {c.name for c in STEP_COLUMNS if c.name[:5] == "slot_"}


def test_the_committed_page_is_current() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "trace.md"
    assert page.read_text(encoding="utf-8") == schema_markdown(), "run: python scripts/make_docs.py"
