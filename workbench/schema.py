"""The trace's tables as data: one list of column records drives writer, checker, documentation and tooltips.

A trace folder holds `run.json` and, per prompt, one part of the steps table (a row per step) and one of the episodes
table (a row per prompt, turn and policy). Live decoding and replay produce the same steps columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError

SCHEMA_VERSION = 2
PLAIN = "plain"  # the policy of decoding without a drafter

_SCALARS: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "bytes": pa.binary(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
}


@dataclass(frozen=True)
class Column:
    """One column. `dtype` is a scalar type, with `[Q]` a list of Q such values, with `?` a value that may be null."""

    name: str
    dtype: str
    unit: str
    meaning: str

    @property
    def is_nullable(self) -> bool:
        """Whether a row may hold null."""
        return self.dtype.endswith("?")

    @property
    def letter(self) -> str:
        """What a list counts (see `_LETTERS`); empty for a scalar."""
        return self.dtype.rstrip("?").partition("[")[2].rstrip("]")

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's arrow type: the scalar, or a list of scalars that are never null."""
        scalar, bracket, _ = self.dtype.rstrip("?").partition("[")
        return pa.list_(pa.field("element", _SCALARS[scalar], nullable=False)) if bracket else _SCALARS[scalar]


_KEYS = (
    Column("prompt", "int32", "index", "Place of the prompt in this run, 0-based; the number in the part's name."),
    Column("prompt_id", "string", "", "The prompt's own name in its file."),
    Column("task", "string", "", "Task family of the prompt."),
    Column("turn", "int16", "index", "Turn of the conversation, 0-based."),
    Column("policy", "string", "", "Policy that served the episode; `plain` is decoding without a drafter."),
    Column("drafter", "string", "", "Drafter that proposed; `none` under plain decoding."),
    Column("plan", "int16", "index", "Id of the plan in run.json's `plans`."),
)

STEP_COLUMNS: tuple[Column, ...] = _KEYS + (
    Column("drafter_version", "int32", "count", "Weight updates the drafter had received before the step."),
    Column("step", "int32", "index", "Step of the episode, 0-based; prefill is not a step."),
    Column("position", "int32", "index", "Position of the step's first token; prefill commits position 0."),
    Column("context_length", "int32", "tokens", "Prompt and committed tokens before the step, the root included."),
    Column("n_blocks", "int16", "count", "Levels of the tree that were expanded (SpecBlock: blocks along a path)."),
    Column("n_starts", "int32[M]", "count", "Starts expanded at each of the M levels."),
    Column("n_forwards", "int16", "count", "Forwards the drafter ran in the step."),
    Column("forward_kind", "string[F]", "", "Kind of each drafter forward, in order."),
    Column("forward_rows", "int32[F]", "count", "Query rows of each drafter forward."),
    Column("forward_starts", "int32[F]", "count", "Starts served by each drafter forward."),
    Column("slot_level", "int16[Q]", "index", "Level of each slot whose parent node is the root or an accepted node."),
    Column("slot_start", "int16[Q]", "index", "Start (column of its level) each such slot belongs to."),
    Column("slot_slot", "int16[Q]", "index", "Place of each such slot within its block, 0-based."),
    Column("slot_depth", "int16[Q]", "depth", "Depth of each such slot's candidates; 1 is the first draft."),
    Column("slot_tier", "int8[Q]", "tier", "Rank tier the drafter predicted for it; -1 without a rank head."),
    Column("slot_rank", "int16[Q]", "rank", "Rank of the target's token in the slot's list; 0: not in it."),
    Column("slot_offered", "int16[Q]", "count", "Candidates the drafter offered at the slot."),
    Column("slot_width", "int16[Q]", "count", "Candidates of the slot that stood in the verified tree."),
    Column("n_nodes", "int32", "count", "Nodes of the verified draft tree, root excluded."),
    Column("tree_depth", "int16", "depth", "Depth of the deepest node of the verified tree; 0 for an empty tree."),
    Column("n_accepted", "int32", "tokens", "Drafted tokens kept, bonus excluded, after the stop and length cuts."),
    Column("has_bonus", "bool", "", "Whether the target's own token was committed after the accepted ones."),
    Column("n_committed", "int32", "tokens", "Tokens the step added to the text: n_accepted + has_bonus."),
    Column("bonus", "int32?", "token id", "The bonus token; null where the step was cut before it."),
    Column("is_stopped", "bool", "", "Whether the step committed a stop id, its last token."),
    Column("is_truncated", "bool", "", "Whether the length limit cut the step."),
    Column("tokens", "int32[C]", "token id", "The tokens the step committed."),
    Column("drafter_ms", "float64", "ms", "Drafter time: growing the tree and refreshing its cache."),
    Column("verification_ms", "float64", "ms", "Target time: one forward over root and tree, acceptance, cache."),
    Column("other_ms", "float64", "ms", "The rest of the step."),
)

EPISODE_COLUMNS: tuple[Column, ...] = _KEYS + (
    Column("source", "string", "", "File and line the prompt came from."),
    Column("sample_seed", "int64", "", "Seed of the sampling noise that fixes the text."),
    Column("order", "int16", "index", "Place of the episode among the interleaved runs of its turn."),
    Column("prompt_tokens", "int32[S]", "token id", "The rendered prompt, earlier turns included."),
    Column("tokens", "int32[L]", "token id", "The committed text, position 0 first."),
    Column("text", "string", "", "The committed text, decoded, stop id excluded."),
    Column("n_steps", "int32", "count", "Steps of the episode."),
    Column("stop_reason", "string", "", "`stop` (a stop id), `length` (the asked limit) or `context` (the target's)."),
    Column("prefill_ms", "float64", "ms", "Target time of the prompt, position 0 included."),
    Column("drafter_prefill_ms", "float64", "ms", "Drafter time of the prompt, before the first step."),
    Column("decode_ms", "float64", "ms", "Time of all steps."),
    Column("divergence", "int32?", "position", "First position where the text differs from plain decoding's."),
    Column("divergence_gap", "float64?", "logits", "Gap of the target's scores of the two tokens there."),
)

_PLACE = (
    Column("prompt", "int32", "index", "Place of the prompt in this run, 0-based; the number in the part's name."),
    Column("turn", "int16", "index", "Turn of the conversation, 0-based."),
)

POOL_COLUMNS: tuple[Column, ...] = _PLACE + (
    Column("position", "int32", "index", "Position a step might start at; its root is the token before."),
    Column("n_starts", "int16[M]", "count", "Starts drafted at each level; level 0 is the block at the root."),
    Column("creator", "int32[Z]", "index", "Of every start behind level 0, the candidate of this row that created it."),
    Column("tier", "int8[Q]", "tier", "Predicted rank tier of every slot; no entries without a rank head."),
    Column("logp", "int16[C]", "1/1024 nat", "Of a slot's first candidate -log p, of others the step down to them."),
    Column("is_named", "bool[C]", "", "Whether the candidate's token id is stored."),
    Column("token", "int32[I]", "token id", "Token ids of the named candidates; -1 where a slot has no candidate."),
)

FEATURE_COLUMNS: tuple[Column, ...] = _PLACE + (
    Column("index", "int32", "index", "Place in prompt + committed text, 0-based; the last token has no row."),
    Column("features", "bytes", "", "The target's three tapped layers there, in run.json's feature_dtype."),
    Column("final", "bytes", "", "The hidden state after the target's final norm, in the same dtype."),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "steps": STEP_COLUMNS,
    "episodes": EPISODE_COLUMNS,
    "pools": POOL_COLUMNS,
    "features": FEATURE_COLUMNS,
}


def arrow_schema(table: str) -> pa.Schema:
    """Arrow schema of a table, the schema version in its metadata."""
    fields = [pa.field(c.name, c.arrow_type, nullable=c.is_nullable) for c in TABLES[table]]
    return pa.schema(fields, metadata={"table": table, "schema_version": str(SCHEMA_VERSION)})


def check_schema(schema: pa.Schema, table: str, where: str) -> None:
    """Refuse a schema that is not exactly `table`'s: another version, unknown, missing or mistyped columns.

    `where` names the file in the error (an `InputError`).
    """
    version = (schema.metadata or {}).get(b"schema_version")
    if version is None:
        raise InputError(f"{where}: not a table of this workbench (no schema version in its metadata).")
    if version != str(SCHEMA_VERSION).encode():
        shown = version[:20].decode(errors="replace")
        raise InputError(f"{where}: schema version {shown!r}, but this workbench reads version {SCHEMA_VERSION}.")
    expected = {c.name: c for c in TABLES[table]}
    names = list(schema.names)
    _check_names(names, expected, table, where)
    for name, column in expected.items():
        found = schema.field(name).type
        if not found.equals(column.arrow_type):
            raise InputError(f"{where}: column {name!r} has type {found}, not {column.arrow_type}.")


def _check_names(names: Sequence[str], expected: Mapping[str, Column], table: str, where: str) -> None:
    for name in names:
        if name not in expected:
            raise InputError(f"{where}: column {name[:80]!r} is unknown in the {table} table.")
        if names.count(name) > 1:
            raise InputError(f"{where}: column {name!r} stands twice.")
    for name in expected:
        if name not in names:
            raise InputError(f"{where}: column {name!r} of the {table} table is missing.")


def check_table(data: pa.Table, table: str, where: str = "table", only: Sequence[str] | None = None) -> None:
    """Refuse a table (or these columns of it alone) that is not `table`'s (`InputError`).

    Beside the schema: a null where none may stand, and, in a row, lists of one letter that differ in length.
    """
    columns = [c for c in TABLES[table] if only is None or c.name in only]
    if only is None:
        check_schema(data.schema, table, where)
    lengths: dict[str, tuple[str, Any]] = {}
    for column in columns:
        chunked = data.column(column.name)
        if not column.is_nullable and chunked.null_count:
            raise InputError(f"{where}: column {column.name!r} has empty values.")
        if not column.letter:
            continue
        if any(chunk.flatten().null_count for chunk in chunked.chunks):
            raise InputError(f"{where}: column {column.name!r} has empty values.")
        found = pc.list_value_length(chunked)
        first, wanted = lengths.setdefault(column.letter, (column.name, found))
        if not found.equals(wanted):
            raise InputError(
                f"{where}: columns {first!r} and {column.name!r} list different numbers of things in a row."
            )


def to_table(rows: Sequence[Mapping[str, Any]], table: str, where: str = "table") -> pa.Table:
    """Rows (one mapping a row, exactly the schema's keys) as a checked arrow table."""
    expected = {c.name for c in TABLES[table]}
    for row in rows:
        if row.keys() != expected:
            odd = sorted(set(row) ^ expected)
            raise InputError(f"{where}: column {odd[0]!r} is unknown or missing in a row of the {table} table.")
    data = pa.Table.from_pylist([dict(row) for row in rows], schema=arrow_schema(table))
    check_table(data, table, where)
    return data


_LETTERS = (
    "Letters: M levels expanded · F drafter forwards · Q slots whose parent is the root or an accepted node, "
    "in order of (depth, level, start, slot) · C committed tokens · S prompt tokens · L committed text. "
    "In pools: M levels · Z starts behind level 0 · Q slots · C candidates, in order of (level, start, slot, rank) · "
    "I candidates whose token id is stored."
)


def schema_markdown() -> str:
    """The page `docs/trace.md`: all tables, a row a column."""
    parts = [
        "# The trace format",
        "",
        "Written by `python scripts/make_docs.py` from `workbench/schema.py`; edit that, not this page.",
        "",
        f"Schema version {SCHEMA_VERSION}. A trace is a folder: `run.json` (what ran: configuration, target, drafters, "
        "plans, versions, machine) and, for each finished prompt, `steps-NNNNNN.parquet`, `episodes-NNNNNN.parquet`, "
        "`pools-DRAFTER-NNNNNN.parquet` for each drafter with weights and, if asked for, `features-NNNNNN.parquet`, "
        "each written to a temporary name, flushed to disk and renamed. A prompt is whole once its episodes part, "
        "the last, is there; that part's metadata lists the problems met with the prompt.",
        "",
        "Pools lie along the text of plain decoding: a row for every position but 0 of each turn. run.json's `pools` "
        "says each drafter's slots K, candidates a slot W, and envelope. Candidates without a token id matter by their "
        "log-probability alone: no sibling equals them, nor does the token committed at their depth.",
        "",
        _LETTERS,
    ]
    for table, columns in TABLES.items():
        parts += ["", f"## The {table} table", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        parts += [_markdown_row(c) for c in columns]
    return "\n".join(parts) + "\n"


def _markdown_row(column: Column) -> str:
    dtype = column.dtype.replace("?", " or null")
    return f"| `{column.name}` | {dtype} | {column.unit} | {column.meaning} |"
