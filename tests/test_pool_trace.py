"""Pools and features in a trace: recorded by the verb, read back strictly, refused when damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import HIDDEN, VOCAB
from test_pools import assert_same_pools
from test_record import arguments
from tiny_drafters import KINDS, save_drafter

from workbench.drafters import load_drafter
from workbench.errors import InputError
from workbench.poolnames import labelled, named
from workbench.poolreader import pool_kinds, read_pools, read_text, stream_pools
from workbench.poolrecorder import record_pools
from workbench.pools import ENVELOPES
from workbench.record import main
from workbench.recorded import read_recordings, record_answer
from workbench.sampling import Sampling
from workbench.target import load_target
from workbench.trace import Trace, open_trace, part_path
from workbench.trace.__main__ import main as check_main
from workbench.tree import BlockPlan, plan_to_dict


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for kind in KINDS:
        save_drafter(folder / kind, kind, HIDDEN, VOCAB)
    return folder


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    target_folder: Path,
    prompt_file: Path,
    weights: Path,
) -> Path:
    """A sampled trace of two prompts (three turns) with pools of every drafter, and features."""
    out = tmp_path_factory.mktemp("pools") / "trace"
    more = ["--limit", "2", "--envelope", "small", "--features", "--temperature", "1"]
    more += ["--weights", *(f"{kind}={weights / kind}" for kind in KINDS)]
    assert main(arguments(target_folder, prompt_file, out, (*KINDS, "lookup"), *more)) == 0
    return out


def test_the_trace_holds_what_the_drafters_offer(folder: Path, target_folder: Path, weights: Path) -> None:
    trace, target = open_trace(folder), load_target(str(target_folder), dtype="float64")
    text = read_text(trace)
    assert pool_kinds(trace) == [*KINDS, "lookup"] and text.n_episodes == 3
    recordings = []
    for episode, found in read_recordings(trace, text):
        ids, turn = text.prompt_tokens[episode].tolist(), text.turn[episode]
        again = record_answer(target, ids, Sampling(1.0), turn, 12, set(target.stop_ids))
        assert found.prompt_ids == ids and found.tokens == again.tokens
        np.testing.assert_array_equal(found.features.double(), again.features)
        np.testing.assert_array_equal(found.final.double(), again.final)
        recordings.append(again)
    for kind in KINDS:
        drafter = load_drafter(weights / kind, target)
        pools = read_pools(trace, kind)
        for episode, r in enumerate(recordings):
            expected = record_pools(drafter, ENVELOPES["small"], r.prompt_ids, r.tokens, r.features, r.final)
            one = text.episodes([episode])
            rows = slice(*text.row_offset[episode : episode + 2].tolist())
            assert_same_pools(pools.rows(rows), labelled(expected, named(expected, one)))


def test_lookup_pools_follow_from_the_tokens(folder: Path) -> None:
    """The drafter run live at each position against the pools made of the text."""
    trace = open_trace(folder)
    text, pools, row = read_text(trace), read_pools(open_trace(folder), "lookup"), 0
    drafter: Any = load_drafter("lookup", None)  # type: ignore[arg-type]
    for episode in range(text.n_episodes):
        prompt = text.prompt_tokens[episode].tolist()
        tokens = text.token[text.offset[episode] : text.offset[episode + 1]].tolist()
        for position in range(1, len(tokens)):
            state = drafter.open(prompt, 99)
            drafter.observe(state, None, None, [*prompt[1:], *tokens[:position]])
            offered = drafter.expand(state, 0, None, 1)
            for name in ("token", "logp", "tier"):
                np.testing.assert_array_equal(
                    getattr(pools.levels[0].expansion, name)[row], getattr(offered, name)[0], name
                )
            row += 1
    assert row == pools.n_rows == text.n_rows


def test_streamed_pools_are_the_pools(folder: Path, tmp_path: Path) -> None:
    """Row groups of five rows: the rows cover the text in order and say the same."""
    trace = copy(folder, tmp_path)
    for kind in KINDS:
        for prompt in (0, 1):
            path = part_path(trace.folder, f"pools-{kind}", prompt)
            pq.write_table(pq.read_table(path), path, row_group_size=5)
        whole, begin = read_pools(open_trace(folder), kind), 0
        for rows, pools in stream_pools(trace, kind):
            assert rows.start == begin and rows.stop - begin <= 5
            begin = rows.stop
            for a, b in zip(pools.levels, whole.rows(rows).levels):
                n = a.starts.node.shape[1]
                np.testing.assert_array_equal(a.expansion.token, b.expansion.token[:, :n])
                np.testing.assert_array_equal(a.starts.rank, b.starts.rank[:, :n])
        assert begin == whole.n_rows


def copy(folder: Path, to: Path) -> Trace:
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return open_trace(to)


# ---------------------------------------------------------------------------------------- odd files


def changed(column: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[pa.Table], pa.Table]:
    """A table with one column's values changed."""

    def apply(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(column)
        values = pa.array(change(table.column(column).to_pylist()), table.schema.field(column).type)
        return table.set_column(at, table.schema.field(column), values)

    return apply


def first_row(value: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value(values[0]), *values[1:]]


ODD: list[tuple[Callable[[pa.Table], pa.Table], str]] = [
    (lambda t: t.slice(1), "rows are not the positions"),
    (lambda t: t.slice(0, t.num_rows - 1), "ends before|not the positions"),
    (lambda t: t.drop_columns(["tier"]), "'tier' of the pools table is missing"),
    (lambda t: t.append_column("extra", pa.array([0] * t.num_rows)), "'extra' is unknown"),
    (lambda t: t.replace_schema_metadata({"schema_version": "1"}), "schema version '1'"),
    (lambda t: t.replace_schema_metadata(None), "not a table of this workbench"),
    (changed("position", first_row(lambda x: x + 1)), "not the positions"),
    (changed("n_starts", first_row(lambda x: [])), "no levels, differ"),
    (changed("n_starts", first_row(lambda x: [2, *x[1:]])), "other than one start"),
    (changed("n_starts", first_row(lambda x: [1, 30_000, *x[2:]])), "absurd number of starts"),
    (changed("n_starts", first_row(lambda x: [1, 4000, *x[2:]])), "call for"),
    (changed("n_starts", first_row(lambda x: [1, -1, *x[2:]])), "absurd number"),
    (changed("creator", first_row(lambda x: [10**6, *x[1:]])), "own level or a later one"),
    (changed("creator", first_row(lambda x: [-1, *x[1:]])), "no creator"),
    (changed("creator", first_row(lambda x: [-7, *x[1:]])), "own level or a later one"),
    (changed("creator", first_row(lambda x: x[1:])), "call for"),
    (changed("tier", first_row(lambda x: [9, *x[1:]])), "rank tier"),
    (changed("logp", first_row(lambda x: [-1, *x[1:]])), "do not fall"),
    (changed("logp", first_row(lambda x: [32767, 32767, *x[2:]])), "fall too far"),
    (changed("is_named", first_row(lambda x: [False, *x[1:]])), "call for"),
    (changed("token", first_row(lambda x: [1 << 25, *x[1:]])), "token id lies outside"),
    (changed("token", first_row(lambda x: [-1, *x[1:]])), "behind a gap"),
]


@pytest.mark.parametrize("change,why", ODD, ids=[str(i) for i in range(len(ODD))])
def test_odd_pools_are_refused(folder: Path, tmp_path: Path, change: Any, why: str) -> None:
    trace = copy(folder, tmp_path)
    path = part_path(tmp_path, "pools-specblock", 0)
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(InputError, match=why):
        read_pools(trace, "specblock")


def test_missing_cut_and_foreign_parts_are_refused(folder: Path, tmp_path: Path) -> None:
    trace = copy(folder, tmp_path)
    path = part_path(tmp_path, "pools-eagle3", 1)
    whole = path.read_bytes()
    for damage in (whole[:-100], whole[: len(whole) // 2], b"PAR1" + b"x" * 50 + b"PAR1", b""):
        path.write_bytes(damage)
        with pytest.raises(InputError, match="pools-eagle3-000001"):
            read_pools(trace, "eagle3")
    path.unlink()
    with pytest.raises(InputError, match="missing"):
        read_pools(trace, "eagle3")
    with pytest.raises(InputError, match="no pools of the drafter 'falcon'"):
        read_pools(trace, "falcon")


SIZES = {"n_slots": 4, "width": 10, "has_tiers": True}


@pytest.mark.parametrize(
    "key,value,why",
    [
        ("pools", [1], "pools are damaged"),
        ("pools", {"specblock": {"n_slots": 4}}, "incomplete"),
        ("pools", {"specblock": {"n_slots": 10**9, "width": 4, "has_tiers": True, "envelope": None}}, "absurd sizes"),
        ("pools", {"../specblock": {}}, "pools are damaged"),
        ("pools", {"specblock": {**SIZES, "envelope": plan_to_dict(BlockPlan(root_width=11))}}, "does not fit its"),
        ("pools", {"specblock": {**SIZES, "envelope": {"kind": "block"}}}, "missing or unknown field"),
        ("max_new_tokens", 3, "longer than run.json allows"),
        ("max_new_tokens", "12", "whole number"),
        ("target", None, "whole number"),
    ],
)
def test_odd_run_files_are_refused(folder: Path, tmp_path: Path, key: str, value: Any, why: str) -> None:
    copy(folder, tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(run | {key: value}))
    with pytest.raises(InputError, match=why):
        read_pools(open_trace(tmp_path), "specblock")


def test_a_token_outside_the_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    trace = copy(folder, tmp_path)
    path = part_path(tmp_path, "episodes", 0)
    pq.write_table(changed("prompt_tokens", first_row(lambda x: [VOCAB, *x[1:]]))(pq.read_table(path)), path)
    with pytest.raises(InputError, match="outside the target's vocabulary of 32"):
        read_text(trace)


def test_odd_features_are_refused(folder: Path, tmp_path: Path) -> None:
    trace = copy(folder, tmp_path)
    path = part_path(tmp_path, "features", 0)
    table = pq.read_table(path)
    for change, why in (
        (lambda t: t.slice(0, t.num_rows - 1), "not the indices"),
        (lambda t: pa.concat_tables([t, t.slice(0, 1)]), "goes on"),
        (changed("final", first_row(lambda x: x[:-1])), "another width"),
        (lambda t: t, "repeats values by a dictionary"),
    ):
        pq.write_table(change(table), path, use_dictionary=why.startswith("repeats"))
        with pytest.raises(InputError, match=why):
            list(read_recordings(trace))


def test_without_pools_nothing_is_kept(tmp_path: Path, target_folder: Path, prompt_file: Path) -> None:
    out = tmp_path / "trace"
    assert main(arguments(target_folder, prompt_file, out, ("lookup",), "--limit", "1", "--no-pools")) == 0
    assert {path.name.split("-")[0] for path in out.glob("*.parquet")} == {"steps", "episodes"}
    with pytest.raises(InputError, match="there are none"):
        read_pools(open_trace(out), "lookup")
    with pytest.raises(InputError, match="without features"):
        list(read_recordings(open_trace(out)))


# ---------------------------------------------------------------------------------------- check


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = check_main(["check", str(folder), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_check_says_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked(folder, capsys)
    text = read_text(open_trace(folder))
    assert status == 0 and found["is_whole"] and found["faults"] == [] and found["status"] == "finished"
    assert (found["n_prompts"], found["n_episodes"], found["temperature"]) == (2, 3 * 6, 1.0)
    assert found["n_positions"] == text.n_rows and list(found["pools"]) == [*KINDS, "lookup"]
    assert all(about["n_rows"] == text.n_rows for about in found["pools"].values())
    assert found["n_feature_rows"] == sum(map(len, text.prompt_tokens)) + len(text.token) - 3
    assert check_main(["check", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("The trace is whole.\n") and "pools of lookup: " in out


def swapped_starts(table: pa.Table) -> pa.Table:
    """Two starts of the first row in each other's place: a pool that its envelope would not have made."""
    return changed("creator", first_row(lambda x: [x[1], x[0], *x[2:]]))(table)


@pytest.mark.parametrize(
    "part,change,why",
    [
        ("pools-specblock", swapped_starts, "starts their envelope chooses at level 1"),
        ("pools-medusa", lambda t: t.slice(1), "not the positions"),
        ("pools-medusa", changed("token", first_row(lambda x: [1000, *x[1:]])), "beyond the vocabulary"),
        ("features", lambda t: t.slice(1), "of .* indices"),
        ("features", changed("final", first_row(lambda x: b"\xff" * len(x))), "not finite"),
        ("steps", lambda t: t.slice(1), "do not make its text"),
        ("episodes", lambda t: t.slice(0, 1), "steps of no episode"),
    ],
)
def test_check_finds_what_is_broken(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, change: Any, why: str
) -> None:
    copy(folder, tmp_path)
    path = part_path(tmp_path, part, 0)
    pq.write_table(change(pq.read_table(path)), path, use_dictionary=False)
    status, found = checked(tmp_path, capsys)
    assert status == 1 and not found["is_whole"] and re.search(why, " ".join(found["faults"]))
    assert check_main(["check", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("The trace is NOT whole.\n")


def test_check_of_unfinished_and_missing_traces(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy(folder, tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(run | {"status": "running"}))
    status, found = checked(tmp_path, capsys)
    assert status == 1 and "did not finish" in found["faults"][0]
    (tmp_path / "run.json").write_text(json.dumps(run))
    part_path(tmp_path, "episodes", 1).unlink()
    assert "1 of 2 prompts" in checked(tmp_path, capsys)[1]["faults"][0]
    assert check_main(["check", str(tmp_path / "nowhere")]) == 2
    assert "no trace here" in capsys.readouterr().err
