"""`python -m workbench.train` from a corpus to a drafter that decodes: a tiny llama, all four kinds, a real kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
import transformers
from conftest import tiny_model

from workbench.decode import decode
from workbench.drafters import load_drafter
from workbench.drafters.checkpoint import load_checkpoint
from workbench.sampling import Sampling
from workbench.target import Target, load_target
from workbench.train import main
from workbench.training import run
from workbench.training.data import FeatureStore
from workbench.training.features import read_corpus, write_features
from workbench.tree import PRESETS

VOCAB, STOP = 64, 5
KINDS = ("specblock", "eagle3", "medusa", "parallelspec")
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class World:
    """A target's folder and a corpus folder that it has written."""

    target: Path
    corpus: Path
    features: Path

    def arguments(self, kind: str, out: Path, *more: str) -> list[str]:
        given = {"--kind": kind, "--out": out, "--features": self.features, "--target": self.target, "--threads": 1}
        small = {"--n-positions": 900, "--batch-tokens": 160, "--draft-vocab-size": 40, "--n-steps": 2}
        return [str(word) for pair in (given | small).items() for word in pair] + list(more)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A random llama of 64 words, and its greedy answers to 30 prompts."""
    folder = tmp_path_factory.mktemp("world")
    places = World(folder / "target", folder / "corpus", folder / "features")
    model = tiny_model(vocab_size=VOCAB, dtype=torch.float32, sharpness=2.0, eos_token_id=STOP, is_exact=False)
    model.save_pretrained(places.target)
    words = {f"w{i}": i for i in range(VOCAB)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"w{STOP}").save_pretrained(places.target)
    target, rng = load_target(str(places.target)), np.random.default_rng(0)
    rows = []
    for n in rng.integers(3, 9, 30).tolist():
        prompt = rng.integers(6, VOCAB, n).tolist()
        rows.append({"kind": "qa", "temperature": 0.0, "prompt_ids": prompt, "response_ids": answer(target, prompt)})
    write_corpus(places.corpus, rows)
    return places


def answer(target: Target, prompt: list[int], n_new: int = 24) -> list[int]:
    session = target.session(len(prompt) + n_new, Sampling())
    text = [session.prefill(prompt).token]
    while text[-1] != STOP and len(text) < n_new:
        text.append(session.step())
    return text


def write_corpus(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")


class NoClock:
    def now(self) -> float:
        return 0.0


def test_features_hold_what_the_target_says(world: World, tmp_path: Path) -> None:
    """The best soft label at every label index is the token the target wrote next (float32, no near-ties here)."""
    target, corpus = load_target(str(world.target)), read_corpus(world.corpus)
    write_features(target, corpus, tmp_path / "features")
    store = FeatureStore(tmp_path / "features")
    assert store.note is not None and store.note["target"] == target.weights_hash
    assert sorted(a.answer_id for a in store.answers) == list(range(30))
    for a in store.answers:
        shard, exchange = store.shards[a.shard], corpus[a.answer_id]
        assert shard["tok"][a.row : a.row + a.length].tolist() == exchange.prompt_ids + exchange.response_ids
        best = shard["soft_id"][a.label_row : a.label_row + a.length - a.prompt_length, 0]
        assert best.tolist() == exchange.response_ids
        rows = target.session(a.length, Sampling()).prefill(exchange.prompt_ids + exchange.response_ids)
        assert np.array_equal(shard["feat"][a.row : a.row + a.length], rows.features.half().numpy())


def test_features_resume_shard_by_shard(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.training.features.SHARD_ANSWERS", 8)
    target, corpus = load_target(str(world.target)), read_corpus(world.corpus)
    write_features(target, corpus, tmp_path / "whole")
    write_features(target, corpus, tmp_path / "cut")
    shards = sorted(p for p in (tmp_path / "cut").iterdir() if p.is_dir())
    assert len(shards) == 4
    for shard in shards[2:]:
        shard.rename(shard.with_name(shard.name + ".tmp"))  # what a kill leaves behind: a shard under its first name
    assert len(FeatureStore(tmp_path / "cut").shards) == 2
    write_features(target, corpus, tmp_path / "cut")
    for shard in shards:
        for file in shard.iterdir():
            assert file.read_bytes() == (tmp_path / "whole" / shard.name / file.name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_corpus_to_a_drafter_that_decodes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Every kind trains, leaves a card and a checkpoint, and drafts losslessly for the target (float64: no ties)."""
    assert main(world.arguments(kind, tmp_path / "out", "--corpus", str(world.corpus), "--json")) == 0
    card = json.loads(capsys.readouterr().out)
    assert card == json.loads((tmp_path / "out/checkpoint/card.json").read_text())
    assert (card["drafter"], card["held_out"]["n_positions"]) == (kind, card["n_positions"])
    assert card["n_positions"] >= 900 and 0 < card["held_out_coverage"] <= 1
    target = load_target(str(world.target), dtype="float64", feature_dtype="float32")
    assert card["target_weights_hash"] == target.weights_hash
    drafter = load_drafter(tmp_path / "out/checkpoint", target)
    assert drafter.kind == kind
    for prompt in ([7, 8, 9], [40]):
        kwargs: dict[str, Any] = {"sampling": Sampling(), "max_new_tokens": 30, "stop_ids": (STOP,), "clock": NoClock()}
        plain = decode(target, None, None, prompt, **kwargs)
        drafted = decode(target, drafter, PRESETS[kind], prompt, **kwargs)
        assert drafted.tokens == plain.tokens
        assert sum(row["n_nodes"] for row in drafted.steps) > 0


KILL = """
import os, signal, sys
from workbench.training import statefile
real, n_left = os.replace, [int(sys.argv.pop(1))]
def replace(source, place):
    if str(place).endswith("training_state.pt"):
        n_left[0] -= 1
        if not n_left[0]:
            open(source, "r+b").truncate(1000)  # half a state, under its first name
            os.kill(os.getpid(), signal.SIGKILL)
    real(source, place)
statefile.os.replace = replace
from workbench.train import main
main()
"""


def test_a_killed_training_resumes_to_the_same_bytes(world: World, tmp_path: Path) -> None:
    """SIGKILL while the state of step 20 is written, after the metrics of step 20: the same command goes on from 19."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ["--corpus", str(world.corpus), "--save-every-s", "0", "--n-positions", "3000"]
    killed = subprocess.run(
        [sys.executable, "-c", KILL, "20", *world.arguments("specblock", cut, *arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    state = torch.load(cut / "training_state.pt", weights_only=True)
    assert state["n_steps"] == 19
    assert metrics(cut)[-1]["n_steps"] == 20
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"split": "tra')  # a line the kill has torn
    assert main(world.arguments("specblock", cut, *arguments)) == 0
    assert main(world.arguments("specblock", whole, *arguments)) == 0
    for name in ("model.safetensors", "config.json", "vocab_mapping.pt"):
        assert (cut / "checkpoint" / name).read_bytes() == (whole / "checkpoint" / name).read_bytes(), name
    assert metrics(cut) == metrics(whole)
    assert [row["is_last"] for row in metrics(cut)] == [False, True]  # step 20's line stands once
    assert main(world.arguments("specblock", cut, *arguments)) == 0  # a finished run stays as it is
    assert metrics(cut) == metrics(whole)
    assert (cut / "checkpoint/model.safetensors").read_bytes() == (whole / "checkpoint/model.safetensors").read_bytes()


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_config_names_layers_and_blocks(world: World, tmp_path: Path) -> None:
    """A checkpoint names the layers it was trained on, and the blocks; a target that taps others is refused."""
    arguments = ["--corpus", str(world.corpus), "--n-positions", "1", "--n-blocks", "2"]
    assert main(world.arguments("specblock", tmp_path, *arguments)) == 0
    raw = json.loads((tmp_path / "checkpoint/config.json").read_text())
    assert (raw["eagle_aux_hidden_state_layer_ids"], raw["num_ttt_blocks"]) == ([1, 2, 3], 2)
    assert load_checkpoint(tmp_path / "checkpoint").kind == "specblock"
    other = load_target(str(world.target), feature_layers=(0, 1, 2))
    with pytest.raises(ValueError, match=r"made for features of the layers \(1, 2, 3\)"):
        load_drafter(tmp_path / "checkpoint", other)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kind", "eagle4"], "Unknown drafter kind 'eagle4'; known are specblock, eagle3, medusa, parallelspec."),
        (["--n-positions", "0"], "--n-positions must be at least 1, not 0."),
        (["--n-slots", "0"], "--n-slots must be at least 1, not 0."),
        (["--n-blocks", "65"], "--n-blocks must be at most 64, not 65."),
        (["--matrix-lr", "nan"], "--matrix-lr must be a number above 0, not nan."),
        (["--threads", "-1"], "must not be negative"),
        (["--seed", "-1"], "must not be negative"),
        (["--features", "absent"], "absent: there is no feature store; give --corpus"),
        (["--out", "file"], "file: is not a folder"),
        (["--out", "file/inner"], "file/inner: cannot be written (Not a directory)"),
        (["--features", "file"], "file: there is no feature store"),
        (["--features", "file", "--corpus", "good"], "file: cannot be written (File exists)"),
        (["--features", "none"], "none holds 0 feature shards"),
        (["--features", "torn"], "0000: not a whole feature shard"),
        (["--features", "foreign"], "foreign holds features of another target than"),
        (["--corpus", "absent"], "absent holds no corpus (no .parquet file)"),
        (["--corpus", "none"], "none holds no corpus (no .parquet file)"),
        (["--corpus", "broken"], "part-00000.parquet: not a corpus file with the columns"),
        (["--corpus", "other_columns"], "part-00000.parquet: not a corpus file with the columns"),
        (["--corpus", "empty"], "empty holds a corpus without any answer"),
        (["--corpus", "one", "--features", "new"], "new holds 1 answer(s); two are needed"),
        (["--corpus", "too_wide"], "another target than"),
        (["--corpus", "by_another"], "the target 'another model' wrote this corpus"),
        (["--corpus", "second"], "holds features of another target or corpus (corpus differs)"),
        (["--target", "absent"], "Cannot load the target 'absent'"),
        (["--device", "quantum"], "Unknown device 'quantum'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    good = {"kind": "qa", "temperature": 0.0, "prompt_ids": [7, 8], "response_ids": [9, 10, 11]}
    write_corpus(Path("good"), [good] * 4)
    write_corpus(Path("second"), [good | {"response_ids": [9, 10, 12]}] * 30)
    write_corpus(Path("one"), [good])
    write_corpus(Path("empty"), [good | {"response_ids": list[int]()}])
    write_corpus(Path("too_wide"), [good | {"prompt_ids": [VOCAB]}])
    write_corpus(Path("other_columns"), [{"text": "w1"}])
    write_corpus(Path("broken"), [good])
    Path("broken/part-00000.parquet").write_bytes(b"PAR1")
    write_corpus(Path("by_another"), [good] * 4)
    run_json = {"format": "speculation-corpus", "format_version": 1, "sessions": []}
    run_json["target"] = {"name": "another model", "weights_hash": "0"}
    Path("by_another/run.json").write_text(json.dumps(run_json))
    Path("file").write_text("mine")
    Path("none").mkdir()
    Path("torn/0000").mkdir(parents=True)
    write_features(load_target(str(world.target)), read_corpus(Path("good")), Path("foreign"))
    note = json.loads(Path("foreign/store.json").read_text())
    Path("foreign/store.json").write_text(json.dumps(note | {"target": "0"}))
    if not (world.features / "store.json").exists():
        write_features(load_target(str(world.target)), read_corpus(world.corpus), world.features)
    capsys.readouterr()
    assert main([*world.arguments("eagle3", tmp_path / "out"), *arguments]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "shard/s" not in line and line.strip()]
    assert len(told) == 1 and sentence in told[0], told


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in run.TrainArgs.__dataclass_fields__)
