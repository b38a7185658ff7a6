"""The doors replay and verify on a trace recorded by the door record; the report against counts by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HIDDEN, VOCAB
from test_record import arguments
from tiny_drafters import KINDS, save_drafter

from workbench import verifyrun
from workbench.livecauses import DRAFT, OTHER, TIER, draft_difference
from workbench.policy import Arm
from workbench.pools import Text
from workbench.readings import PROB_UNIT, calibration, rank_counts, rank_shares
from workbench.record import main as record
from workbench.replay import main as replay
from workbench.replayreport import Walked, arm_shares, average_tau, format_replay, ranking, replay_rows
from workbench.report import summary
from workbench.trace import open_trace
from workbench.tree import PRESETS, Expansion
from workbench.verify import main as verify
from workbench.walk import Menu, Steps, streams, walk

PLANS = ("specblock:budget=12,blocks=2", "eagle3:depth=2,top_k=4,budget=12", "medusa:budget=9,width=4")
MORE = ("parallelspec:budget=9,width=4", "lookup")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for kind in KINDS:
        save_drafter(folder / kind, kind, HIDDEN, VOCAB)
    return folder


@pytest.fixture(scope="module", params=["0", "1"], ids=["greedy", "sampled"])
def folder(
    request: Any, tmp_path_factory: pytest.TempPathFactory, target_folder: Path, prompt_file: Path, weights: Path
) -> Path:
    """A trace of four prompts recorded live under PLANS and MORE, with pools."""
    out = tmp_path_factory.mktemp("replay") / "trace"
    more = ["--limit", "4", "--temperature", request.param, "--weights"]
    more += [f"{kind}={weights / kind}" for kind in KINDS]
    assert record(arguments(target_folder, prompt_file, out, (*PLANS, *MORE), *more)) == 0
    return out


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_replay_s_tau_is_the_live_run_s(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace's own steps were decoded live under the same plans: equal τ, policy by policy and task by task."""
    trace = open_trace(folder)
    live = summary(trace.load("steps"), trace.load("episodes"))
    assert replay([str(folder), "--policy", *PLANS, *MORE, "--json"]) == 0
    found = printed(capsys)
    exact = [name for name in (*PLANS, *MORE) if not next(r for r in found["rows"] if r["policy"] == name)["n_missed"]]
    assert len(exact) >= 4
    for name in exact:
        assert found["tau"][name] == live["tau"][name]
        assert found["accept_at_depth"][name]["all"] == live["accept_at_depth"][name]
    assert set(found["ranking"]) == set(exact)
    assert found["baseline"] == PLANS[0]


def test_streamed_pools_give_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [str(folder), "--policy", PLANS[1], "ucb:arms=medusa:budget=9,width=4+lookup", "--seeds", "2", "--json"]
    assert replay(args) == 0
    whole = printed(capsys)
    assert replay([*args, "--stream"]) == 0
    assert printed(capsys) == whole


def test_the_tables_say_what_they_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(folder), "--policy", *PLANS, "thompson:arms=lookup+medusa", "--baseline", PLANS[1]]) == 0
    said = capsys.readouterr().out
    for words in (
        "acceptance at depth",
        "rank head of specblock",
        "arms of thompson",
        "Hindsight",
        "modelled",
        "slots of",
    ):
        assert words in said


def test_every_preset_is_replayed_unless_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(folder), "--json", "--no-readings"]) == 0
    assert list(printed(capsys)["tau"]) == list(PRESETS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "nothing"], "no plan 'nothing'"),
        (["--policy", "specblock", "--baseline", "eagle3"], "the baseline 'eagle3' is not among"),
        (["--policy", "lookup", "lookup"], "listed twice"),
        (["--policy", "specblock:root=11"], "looks at 11 candidates a slot"),
        (["--policy", "medusa:depth=9,width=2"], "needs 9 slots"),
        (["--policy", "none.json"], "cannot be read"),
        (["--policy", "ucb:arms=lookup+medusa", "--seeds", "0"], "at least 1 seed"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay([str(folder), *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_no_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(tmp_path)]) == 2
    assert "no trace here" in capsys.readouterr().err


def test_verify_agrees_on_every_step(folder: Path, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiny float64 models: every column of every step, for fixed plans and for a bandit that switches drafters."""
    args = [
        str(folder),
        "--policy",
        *PLANS,
        *MORE,
        "egreedy:epsilon=0.5,arms=eagle3:depth=2,top_k=4,budget=12+medusa:width=4,budget=9+lookup",
    ]
    args += ["--weights", *(f"{kind}={weights / kind}" for kind in KINDS), "--json"]
    assert verify(args) == 0
    found = printed(capsys)["policies"]
    assert len(found) == 6 and all(v["n_steps"] > 15 for v in found.values())
    assert {d["cause"] for v in found.values() for d in v["found"]} <= {"miss"}
    assert [v["agreement"] for v in list(found.values())[1:]] == [1.0] * 5


def test_verify_finds_what_is_wrong(
    folder: Path, weights: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that says something else than live decoding is caught, named, and the exit status tells."""
    real = verifyrun._job

    def wrong(engine: Any, named: Any) -> Any:
        job = real(engine, named)
        job.steps.n_nodes[3] += 1
        return job

    monkeypatch.setattr(verifyrun, "_job", wrong)
    args = [str(folder), "--policy", PLANS[2], "--weights", f"medusa={weights / 'medusa'}"]
    assert verify(args) == 1
    said = capsys.readouterr().out
    assert re.search(r"position \d+: other \(n_nodes\)", said)


def test_verify_refuses_other_weights(
    folder: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_drafter(tmp_path / "other", "medusa", HIDDEN, VOCAB, seed=1)
    assert verify([str(folder), "--policy", PLANS[2], "--weights", f"medusa={tmp_path / 'other'}"]) == 2
    assert "has other weights than those recorded" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ causes


def one(token: list[int], logp: list[int], tier: int = -1) -> Expansion:
    return Expansion(np.array([[[token]]], np.int32), np.array([[[logp]]], np.int16), np.array([[[tier]]], np.int8))


@pytest.mark.parametrize(
    ("live", "recorded", "cause"),
    [
        (one([1, 2, 3], [-5, -9, -9]), one([1, 2, 3], [-5, -9, -9]), OTHER),
        (one([1, 2, 3], [-5, -9, -9]), one([1, 2, 3], [-5, -9, -10]), DRAFT),
        (one([1, 2, 3], [-5, -9, -9]), one([1, 3, 2], [-5, -9, -9]), DRAFT),
        (one([1, 2, 3], [-5, -9, -9]), one([1, 2, 4], [-5, -9, -9]), DRAFT),
        (one([1, 2, 3], [-5, -9, -9]), one([1, 2, 3], [-5, -9, -20]), OTHER),
        (one([1, 2, 3], [-5, -9, -9]), one([2, 1, 3], [-5, -9, -9]), OTHER),
        (one([1, 2, 3], [-5, -9, -9]), one([4, 2, 3], [-5, -9, -9]), OTHER),
        (one([1, 2, -1], [-5, -9, 0]), one([1, 2, 3], [-5, -9, -9]), OTHER),
        (one([1, 2], [-5, -9]), one([1, 1 << 25], [-5, -9]), OTHER),  # a label says nothing of its token
        (one([1, 2], [-5, -9], 0), one([1, 2], [-5, -9], 3), TIER),
    ],
)
def test_what_ties_and_what_does_not(live: Expansion, recorded: Expansion, cause: str) -> None:
    assert draft_difference([live], [recorded], [np.array([[5e-4]])])[0] == cause


def test_a_tier_far_from_another_is_no_tie() -> None:
    pair = one([1], [-5], 0), one([1], [-5], 3)
    assert draft_difference([pair[0]], [pair[1]], [np.array([[0.2]])]) == (OTHER, 0.2)


# ------------------------------------------------------------------------------------------------ the report by hand


class Always:
    n_uniforms = 0

    def __init__(self, n_arms: int = 1) -> None:
        self.arms = tuple(Arm(f"a{i}", "medusa", PRESETS["medusa"]) for i in range(n_arms))

    def init(self, n_streams: int) -> Any:
        raise AssertionError("one arm is walked at once")

    choose = update = init


def walked(name: str, accepted: list[int], text: Text, missed: tuple[int, ...] = ()) -> Walked:
    from test_walk import table_of

    table = table_of(accepted, n_nodes=4)
    table.is_missed[list(missed)] = True
    steps = walk(Always(), Menu([table], ["medusa"], [4]), text, streams(text.n_episodes))
    return Walked(name, "medusa", ["a0"], steps, average_tau(table.n_accepted, text))


@pytest.fixture
def text() -> Text:
    from test_walk import text_of

    found = text_of(6, 4)
    return Text(**{**found.__dict__, "task": ["a", "b"]})


def test_rows_by_hand(text: Text) -> None:
    """Episode 0: 1, 3, 5 → 2 + 2 + 1 tokens; episode 1: 1, 2 → 1 + 2 tokens; 8 tokens in 5 steps."""
    first = walked("first", [1, 0, 1, 0, 0, 0, 1, 0], text)
    plain = walked("plain", [0] * 8, text)
    rows = {(row.policy, row.task): row for row in replay_rows([first, plain], text, "plain")}
    row = rows["first", "all"]
    assert (row.n_steps, row.n_tokens, row.n_missed, row.tau.value) == (5, 8, 0, 8 / 5)
    assert row.difference.value == pytest.approx(8 / 5 - 1)
    assert (rows["first", "a"].tau.value, rows["first", "b"].tau.value) == (5 / 3, 3 / 2)
    assert row.draft_efficiency == 3 / 20 and row.nodes_per_step == 4 and row.forwards_per_step == 1
    assert row.position_average_tau == pytest.approx((2 + 1 + 2 + 1 + 1 + 1 + 2 + 1) / 8)
    assert np.isnan(rows["first", "a"].position_average_tau)
    assert row.ms_per_token == pytest.approx((30 + 0.3 * 4 + 5) * 5 / 8)
    assert ranking(list(rows.values())) == ["first", "plain"]


def test_missed_rows_are_bounds_and_leave_rankings_and_pairs(text: Text) -> None:
    first, plain = walked("first", [1, 0, 1, 0, 0, 0, 1, 0], text, missed=(2,)), walked("plain", [0] * 8, text)
    rows = replay_rows([first, plain], text, "plain")
    by = {(row.policy, row.task): row for row in rows}
    assert by["first", "all"].n_missed == by["first", "a"].n_missed == 1 and by["first", "b"].n_missed == 0
    assert np.isnan(by["first", "all"].difference.value) and np.isnan(by["first", "a"].difference.value)
    assert by["first", "b"].difference.value == pytest.approx(0.5)
    assert ranking(rows) == ["plain"]
    assert "≥1.60" in format_replay(rows) and "≥1.00" not in format_replay(rows)
    against = replay_rows([plain, first], text, "first")
    assert np.isnan(against[0].difference.value)


def test_arm_shares() -> None:
    n = {name: np.zeros(4, int) for name in Steps.__dataclass_fields__} | {"arm": np.array([0, 1, 1, 1])}
    assert arm_shares(Walked("x", "y", ["a", "b", "c"], Steps(**n), 0.0)) == {"a": 0.25, "b": 0.75, "c": 0.0}


def test_rank_counts_and_calibration_by_hand() -> None:
    """One row, two slots of two candidates, the text 7 5: rank 2 at slot 0, rank 1 at slot 1."""
    from test_walk import text_of

    from workbench.outcomes import Span
    from workbench.pools import DraftPools, PoolLevel, root_starts
    from workbench.tree import ProductPlan

    text = text_of(3)
    text.token[:] = [1, 7, 5]
    token = np.array([[[[6, 7], [5, 4]]], [[[5, 6], [9, 8]]]], np.int32)
    logp = np.array([[[[-100, -1024], [0, -2048]]], [[[0, -1], [0, -1]]]], np.int16)
    level = PoolLevel(Expansion(token, logp, np.full((2, 1, 2), -1, np.int8)), root_starts(2))
    pools, span = DraftPools("medusa", 2, False, [level]), Span.of(text)
    assert rank_counts(pools, span).tolist() == [[0, 1, 1], [0, 1, 0]]
    assert rank_shares(rank_counts(pools, span)).tolist() == [[0.5, 0.5], [1.0, 0.0]]
    found = calibration(ProductPlan(budget=4, max_depth=2, width=2), pools, span, np.array([0]))
    # nodes 6 (e^-.1 = .907), 6 5 (.907), 7 (e^-1 = .368), 7 5 (.368): the last two stand on the text
    assert found.n_nodes[[3, 9]].tolist() == [2, 2] and found.n_nodes.sum() == 4
    assert found.n_accepted[[3, 9]].tolist() == [2, 0]
    assert found.prob_sum[3] / PROB_UNIT == pytest.approx(2 * np.exp(-1))
