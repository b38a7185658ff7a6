"""Recording end to end on a tiny target saved to disk: durable, resumable, honest about what went wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from conftest import HIDDEN, STOP, VOCAB
from tiny_drafters import save_drafter

from workbench import trace as trace_module
from workbench.record import main
from workbench.recorder import divergence, rotation
from workbench.recordrun import load_arms, split_specs
from workbench.sampling import Sampling
from workbench.target import Target, load_target
from workbench.trace import Trace, open_trace

REPOSITORY = Path(__file__).resolve().parent.parent


Recorder = Callable[..., int]


@pytest.fixture
def run_record(target_folder: Path, prompt_file: Path) -> Recorder:
    """The verb on the tiny target: `run_record(out, *more)` returns the exit status."""

    def run(out: Path, *more: str, prompts: Path = prompt_file, drafters: tuple[str, ...] = ("lookup",)) -> int:
        return main(arguments(target_folder, prompts, out, drafters, *more))

    return run


def arguments(target: Path, prompts: Path, out: Path, drafters: tuple[str, ...], *more: str) -> list[str]:
    fixed = ["--target", str(target), "--dtype", "float64", "--prompts", str(prompts), "--threads", "1"]
    return [*fixed, "--max-new-tokens", "12", "--drafters", *drafters, "--out", str(out), *more]


def untimed(trace: Trace, table: str) -> pa.Table:
    data = trace.load(table)
    return data.drop_columns([name for name in data.column_names if name.endswith("_ms")])


def assert_same_but_for_time(a: Path, b: Path) -> None:
    left, right = open_trace(a), open_trace(b)
    for table in ("steps", "episodes"):
        assert untimed(left, table).equals(untimed(right, table))
    assert left.run | {"sessions": []} == right.run | {"sessions": []}


# ---------------------------------------------------------------------------------------- what is recorded


def test_a_recording_holds_every_prompt_turn_and_policy(run_record: Recorder, tmp_path: Path) -> None:
    assert run_record(tmp_path / "a", drafters=("lookup", "lookup:length=2")) == 0
    trace = open_trace(tmp_path / "a")
    assert trace.is_finished and trace.prompts == list(range(6)) and trace.problems() == []
    episodes = trace.load("episodes").to_pylist()
    assert len(episodes) == 3 * (6 + 2)  # prompts 0 and 3 have two turns
    plain = {(e["prompt"], e["turn"]): e for e in episodes if e["policy"] == "plain"}
    for episode in episodes:
        twin = plain[episode["prompt"], episode["turn"]]
        assert episode["prompt_tokens"] == twin["prompt_tokens"] and episode["tokens"] == twin["tokens"]
        assert episode["divergence"] is None and episode["divergence_gap"] is None
        assert episode["stop_reason"] == ("stop" if episode["tokens"][-1] == STOP else "length")
        assert len(episode["tokens"]) == 12 or episode["tokens"][-1] == STOP
    steps = trace.load("steps").to_pylist()
    for episode in episodes:
        key = {name: episode[name] for name in ("prompt", "turn", "policy")}
        mine = [row for row in steps if all(row[name] == value for name, value in key.items())]
        assert [row["step"] for row in mine] == list(range(episode["n_steps"]))
        assert [token for row in mine for token in row["tokens"]] == episode["tokens"][1:]
        assert {(row["plan"], row["task"]) for row in mine} <= {(episode["plan"], episode["task"])}
        times = sum(row["drafter_ms"] + row["verification_ms"] + row["other_ms"] for row in mine)
        assert times == pytest.approx(episode["decode_ms"])


def test_later_turns_ask_with_plain_decoding_s_answer(
    run_record: Recorder, tmp_path: Path, target_folder: Path
) -> None:
    assert run_record(tmp_path / "a") == 0
    target = load_target(str(target_folder), dtype="float64")
    rows = [e for e in open_trace(tmp_path / "a").load("episodes").to_pylist() if e["prompt"] == 0]
    first = next(e for e in rows if e["turn"] == 0 and e["policy"] == "plain")
    answer = [token for token in first["tokens"] if token != STOP]
    assert first["text"] == target.decode_text(answer)
    chat = [("user", "w0 w7 w9"), ("assistant", first["text"]), ("user", "w20 w21")]
    expected = target.render([{"role": role, "content": text} for role, text in chat])
    assert [e["prompt_tokens"] for e in rows if e["turn"] == 1] == [expected, expected]


def test_runs_are_interleaved_and_rotated(run_record: Recorder, tmp_path: Path) -> None:
    assert run_record(tmp_path / "a", drafters=("lookup", "lookup:length=2")) == 0
    episodes = open_trace(tmp_path / "a").load("episodes").to_pylist()
    places = {(e["policy"], e["order"]) for e in episodes}
    assert places == {(policy, place) for policy in ("plain", "lookup", "lookup:length=2") for place in range(3)}
    for prompt in range(6):
        assert sorted(e["order"] for e in episodes if (e["prompt"], e["turn"]) == (prompt, 0)) == [0, 1, 2]
    assert rotation(3, 4) == [1, 2, 0]


def test_run_json_says_what_fixed_the_result(run_record: Recorder, tmp_path: Path) -> None:
    more = ("--temperature", "0.7", "--top-p", "0.9", "--top-k", "5", "--seed", "11", "--system", "w1")
    assert run_record(tmp_path / "a", *more) == 0
    run = open_trace(tmp_path / "a").run
    assert run["sampling"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 11}
    assert (run["max_new_tokens"], run["system"], run["threads"]) == (12, "w1", 1)
    target = run["target"]
    assert (target["dtype"], target["feature_dtype"], target["stop_ids"]) == ("float64", "float16", [STOP])
    assert len(target["weights_hash"]) == 64 and len(target["template_hash"]) == 64
    assert [plan["policy"] for plan in run["plans"]] == ["plain", "lookup"]
    assert run["plans"][1]["plan"]["kind"] == "product"
    (session,) = run["sessions"]
    assert session["argv"][-10:] == [*more]
    assert session["versions"]["torch"] == torch.__version__ and session["git"].keys() == {"sha", "is_dirty"}


def test_sampled_text_does_not_depend_on_the_drafter_and_does_on_the_seed(run_record: Recorder, tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "2"):
        assert run_record(tmp_path / seed, "--temperature", "1", "--seed", seed) == 0
        episodes = open_trace(tmp_path / seed).load("episodes").to_pylist()
        assert all(e["divergence"] is None for e in episodes)
        texts.append([e["tokens"] for e in episodes if e["policy"] == "plain"])
    assert texts[0] != texts[1]


def test_trained_drafters_are_loaded_from_folders(run_record: Recorder, tmp_path: Path) -> None:
    kinds = ("specblock", "eagle3", "medusa", "parallelspec")
    for kind in kinds:
        save_drafter(tmp_path / kind, kind, HIDDEN, VOCAB)
    weights = [f"{kind}={tmp_path / kind}" for kind in kinds]
    out = tmp_path / "a"
    specs = ("specblock:root=4,budget=12,eagle3:depth=2,budget=9", "medusa", "parallelspec", "specblock-chain")
    assert run_record(out, "--limit", "3", "--weights", *weights, drafters=specs) == 0
    trace = open_trace(out)
    policies = ["plain", "specblock:root=4,budget=12", "eagle3:depth=2,budget=9", *specs[1:]]
    assert [plan["policy"] for plan in trace.run["plans"]] == policies
    assert trace.run["plans"][1]["weights_hash"] == trace.run["plans"][5]["weights_hash"]
    steps = trace.load("steps").to_pylist()
    assert max(row["n_nodes"] for row in steps if row["plan"] == 1) == 12
    assert {len(row["forward_kind"]) for row in steps if row["plan"] == 2} == {3}
    assert all(row["n_starts"][0] == 1 for row in steps if row["plan"])
    tiers = [tier for row in steps if row["drafter"] == "specblock" for tier in row["slot_tier"]]
    assert tiers and set(tiers) <= {0, 1, 2, 3}
    assert all(e["divergence"] is None for e in trace.load("episodes").to_pylist())


# ---------------------------------------------------------------------------------------- readouts


def test_json_goes_to_standard_output_alone(
    run_record: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_record(tmp_path / "a", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    steps = open_trace(tmp_path / "a").load("steps").to_pylist()
    for task in ("all", "a", "b"):
        mine = [r["n_committed"] for r in steps if r["policy"] == "lookup" and task in ("all", r["task"])]
        assert found["tau"]["lookup"][task] == pytest.approx(sum(mine) / len(mine))
    assert found["tau"]["plain"]["all"] == 1.0 == found["speedup"]["plain"]["all"]
    assert found["problems"] == [] and found["trace"] == str(tmp_path / "a")
    assert {row["policy"] for row in found["rows"]} == {"plain", "lookup"}


def test_the_table_names_every_policy_and_task(
    run_record: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_record(tmp_path / "a", drafters=("lookup,lookup:length=2",)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:10]] == [
        [policy, task] for policy in ("plain", "lookup", "lookup:length=2") for task in ("all", "a", "b")
    ]


# ---------------------------------------------------------------------------------------- faults


def test_a_killed_run_is_resumed_to_the_same_result(run_record: Recorder, target_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "many.txt"  # enough of them that the kill falls among them
    prompts.write_text("".join(f"w{i} w{i + 1}\n" for i in range(30)))
    assert run_record(tmp_path / "whole", prompts=prompts) == 0
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "workbench.record", *arguments(target_folder, prompts, out, ("lookup",))]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 600
        while not (out / "episodes-000001.parquet").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    done = open_trace(out).prompts
    assert {0, 1} <= set(done) and not open_trace(out).is_finished
    assert open_trace(out).load("steps").num_rows > 0
    assert run_record(out, "--resume", prompts=prompts) == 0
    assert_same_but_for_time(tmp_path / "whole", out)
    assert len(open_trace(out).run["sessions"]) == 2


def test_a_prompt_cut_between_its_two_parts_is_run_again(
    run_record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_record(tmp_path / "whole") == 0
    write, written = trace_module.write_durably, []

    def interrupted(path: Path, payload: bytes) -> None:
        if path.name == "episodes-000002.parquet":
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, payload)

    monkeypatch.setattr(trace_module, "write_durably", interrupted)
    out = tmp_path / "cut"
    assert run_record(out) == 130
    assert written[-1] == "steps-000002.parquet" and open_trace(out).prompts == [0, 1]
    monkeypatch.undo()
    assert run_record(out, "--resume") == 0
    assert_same_but_for_time(tmp_path / "whole", out)


def test_resuming_a_finished_run_changes_nothing(run_record: Recorder, tmp_path: Path) -> None:
    assert run_record(tmp_path / "a", "--limit", "2") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").glob("*.parquet")}
    assert run_record(tmp_path / "a", "--limit", "2", "--resume") == 0
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").glob("*.parquet")}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (["--max-new-tokens", "13"], "max_new_tokens"),
        (["--temperature", "0.5"], "sampling.temperature"),
        (["--seed", "4"], "sampling.seed"),
        (["--limit", "3"], "prompts.n"),
        (["--drafters", "lookup:length=3"], "plans.1.policy"),
        (["--dtype", "float32"], "target.dtype"),
    ],
)
def test_only_the_same_run_can_be_resumed(
    run_record: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], key: str
) -> None:
    assert run_record(tmp_path / "a", "--limit", "2") == 0
    limit = [] if "--limit" in change else ["--limit", "2"]
    assert run_record(tmp_path / "a", "--resume", *limit, *change) == 2
    assert f"since {key} differs" in capsys.readouterr().err


def test_a_folder_in_use_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    assert main(["--out", str(tmp_path / "a"), "--target", "no-such-model"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "a"), "--resume"]) == 2
    assert "no trace here" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "a" / "notes.txt")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_full_disk_stops_the_run_and_leaves_what_was_recorded(
    run_record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    n_flushes = 0

    def full(handle: int) -> None:
        nonlocal n_flushes
        n_flushes += 1
        if n_flushes > 10:  # two flushes a file: run.json, then two files a prompt
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "a"
    assert run_record(out) == 2
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    trace = open_trace(out)
    assert trace.prompts == [0, 1] and not trace.is_finished
    assert set(trace.load("episodes").column("prompt").to_pylist()) == {0, 1}
    assert run_record(out, "--resume") == 0


def test_an_unwritable_folder_is_one_sentence(
    run_record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", denied)
    assert run_record(tmp_path / "a") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].endswith("cannot be written (Permission denied); every prompt recorded before is whole.")


def test_prompts_that_cannot_run_are_named_and_the_others_recorded(
    run_record: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [
        {"question_id": 1, "category": "a", "turns": ["w1 w2"]},
        {"question_id": 2, "category": "a", "turns": ["w1 " * 300]},
        {"question_id": 3, "category": "a", "turns": ["w3", "w4 " * 240]},
        {"question_id": 4, "category": "a", "turns": [""]},
        {"question_id": 5, "category": "a", "turns": ["w5"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n")
    out = tmp_path / "a"
    assert run_record(out, prompts=path) == 2
    error = capsys.readouterr().err
    assert f"{path}:2: prompt '2', turn 1: " in error and "context of 256" in error
    assert f"{path}:3: prompt '3', turn 2: " in error
    assert f"{path}:4: " in error and f"{path}:6: " in error
    trace = open_trace(out)
    assert trace.is_finished and len(trace.run["problems"]) == 4
    episodes = trace.load("episodes").to_pylist()
    assert [(e["prompt_id"], e["turn"]) for e in episodes if e["policy"] == "plain"] == [("1", 0), ("3", 0), ("5", 0)]
    assert {e["source"] for e in episodes} == {f"{path}:{line}" for line in (1, 3, 5)}
    assert run_record(out, "--resume", prompts=path) == 2  # the problems are still there
    assert len(open_trace(out).run["problems"]) == 4


def test_a_text_that_meets_the_context_s_end_says_so(run_record: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"question_id": 1, "turns": ["w1 " * 240]}) + "\n")
    assert run_record(tmp_path / "a", prompts=path, drafters=("lookup",)) == 0
    for episode in open_trace(tmp_path / "a").load("episodes").to_pylist():
        n_prompt, n_new = len(episode["prompt_tokens"]), len(episode["tokens"])
        assert episode["stop_reason"] == "stop" or (episode["stop_reason"] == "context" and n_prompt + n_new == 256)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--drafters", "speckblock"], "no plan 'speckblock'"),
        (["--drafters", "lookup", "lookup"], "'lookup' is listed twice"),
        (["--drafters", "lookup:tokens=3"], "no option 'tokens'"),
        (["--drafters", "specblock", "--weights", "specblock=nowhere"], "'nowhere' is neither a drafter"),
        (["--weights", "eagle3=x"], "not among the drafters"),
        (["--weights", "eagle3"], "NAME=FOLDER"),
        (["--max-new-tokens", "0"], "at least 1, not 0"),
        (["--temperature", "-1"], "temperature must be"),
        (["--tasks", "poems"], "No prompt has the task 'poems'"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--target", "nowhere-at-all"], "nowhere-at-all"),
        (["--device", "tpu9"], "device"),
        (["--dtype", "int4"], "Unknown dtype 'int4'"),
        (["--threads", "0"], "threads"),
        (["--limit", "0"], "at least 1, not 0"),
    ],
)
def test_bad_settings_are_one_sentence_and_leave_no_folder(
    run_record: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], sentence: str
) -> None:
    assert run_record(tmp_path / "a", *change) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == ""
    assert "Traceback" not in captured.err
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=2)])
def test_the_gap_at_a_divergence_is_the_target_s(make_target: Any, make_model: Any, sampling: Sampling) -> None:
    target: Target = make_target(vocab_size=16)
    ids, plain = [1, 2, 3, 4], [5, 6, 7, 8, 9]
    other = [5, 6, 7, 3, 9]
    found = divergence(target, ids, plain, other, sampling, 0)
    assert found["divergence"] == 3
    with torch.no_grad():
        logits = make_model(vocab_size=16)(torch.tensor([ids + plain[:3]])).logits[0, -1]
    if sampling.is_greedy:
        # float64 both ways; the forwards differ in shape, hence the last bits
        assert found["divergence_gap"] == pytest.approx(abs(float(logits[8] - logits[3])), abs=1e-9)
    else:
        assert found["divergence_gap"] > 0
    assert divergence(target, ids, plain, plain, sampling, 0) == {"divergence": None, "divergence_gap": None}


def test_specs_are_split_at_commas_that_do_not_belong_to_options() -> None:
    assert split_specs(["a,b", "c"]) == ["a", "b", "c"]
    assert split_specs(["a:x=1,y=2-3,b", "c:z=1"]) == ["a:x=1,y=2-3", "b", "c:z=1"]
    assert split_specs(["a:x=1,b:y=2,z=3"]) == ["a:x=1", "b:y=2,z=3"]
    assert split_specs(["", " a , "]) == ["a"]


def test_drafters_of_one_kind_are_loaded_once(make_target: Any) -> None:
    arms = load_arms(["lookup", "lookup:length=2"], [], make_target())
    assert arms[0].drafter is None and arms[1].drafter is arms[2].drafter
