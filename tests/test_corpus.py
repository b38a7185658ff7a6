"""The corpus verb: batched decoding against plain decoding, filters, durable parts, resuming, one-sentence refusals."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from workbench import batchdecode, corpus, trace
from workbench.batchdecode import Picker, generate, sampled
from workbench.errors import InputError
from workbench.sampling import Sampling
from workbench.target import Target
from workbench.training import corpus_files, corpus_text, corpus_writer
from workbench.training.corpus_files import COLUMNS
from workbench.training.corpus_text import CorpusConfig, CorpusWriter, plain, user_frame
from workbench.training.corpus_writer import write_corpus
from workbench.training.openings import OPENINGS

END = "\x03"
ALPHABET = END + " abcdefghijklmnopqrstuvwxyz<>\n?"  # 32 characters; the end-of-turn token is token 0


class LetterTokenizer:
    """One token a character; what is not in the alphabet is a blank. The template wraps a turn as `<role>...END`."""

    chat_template = "<role>content"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [max(ALPHABET.find(letter), 0) or ALPHABET.find(" ") * (letter != END) for letter in text.lower()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(ALPHABET[i] for i in ids).replace(END, "")

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
    ) -> Any:
        text = "".join(f"<{message['role']}>{message['content']}{END}" for message in messages)
        text += "<assistant>" * add_generation_prompt
        return self.encode(text) if tokenize else text


@pytest.fixture(scope="module")
def target(make_model: Callable[..., Any]) -> Target:
    """A random model that ends a text after some thirty tokens in the mean."""
    model = make_model(vocab_size=len(ALPHABET), eos_token_id=0, max_position_embeddings=256, sharpness=0.5)
    return Target.from_model(model, LetterTokenizer(), name="letters", feature_dtype=None)


@pytest.fixture
def loaded(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The same, as what the verb loads."""
    monkeypatch.setattr(corpus_writer, "load_target", lambda *_: target)
    return target


def settings(out: Path, **changes: Any) -> CorpusConfig:
    small: dict[str, Any] = {"answers": 8, "batch": 6, "max_new_tokens": 20, "max_prompt_tokens": 60}
    return CorpusConfig(out=out, **(small | changes))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("part-*")) for row in pq.read_table(path).to_pylist()]


# Batched decoding


def plain_text(target: Target, prompt: list[int], n_new: int) -> list[int]:
    session = target.session(len(prompt) + n_new, Sampling())
    text = [session.prefill(prompt).token]
    while text[-1] not in target.stop_ids and len(text) < n_new:
        text.append(session.step())
    return text


@pytest.mark.parametrize("prefill_rows", [8192, 12])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_ragged_batch_equals_single_runs(
    make_target: Callable[..., Target], family: str, prefill_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding, closing up and chunked prompts leave no trace: float64, so argmax agrees where no two logits tie."""
    monkeypatch.setattr(batchdecode, "PREFILL_ROWS", prefill_rows)
    target = make_target(family=family)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 64, n).tolist() for n in (7, 1, 12, 3, 30)]
    free = [plain_text(target, prompt, 24) for prompt in prompts]
    target.stop_ids = (free[0][2], free[2][5], free[3][9])  # rows end at different times
    expected = [plain_text(target, prompt, 24) for prompt in prompts]
    assert len({len(text) for text in expected}) >= 3
    pick = Picker(np.zeros(5), np.random.default_rng(0))
    assert generate(target.network, prompts, 24, target.stop_ids, pick) == expected
    assert generate(target.network, [], 24, target.stop_ids, pick) == []


@pytest.mark.parametrize("n_new", [1, 2, 7])
def test_the_length_limit_is_exact(target: Target, n_new: int) -> None:
    pick = Picker(np.ones(3), np.random.default_rng(0))
    texts = generate(target.network, [[5, 6], [7], [8, 9, 10]], n_new, (), pick)
    assert [len(text) for text in texts] == [n_new] * 3


def test_inverting_the_distribution() -> None:
    """Probabilities .5 .125 .25 .125: every eighth of [0, 1) falls to one token."""
    scores = torch.tensor([[0.5, 0.125, 0.25, 0.125]], dtype=torch.float64).log().expand(8, 4)
    draw = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    assert sampled(scores, draw).tolist() == [0, 0, 0, 0, 1, 2, 2, 3]
    # The best two, renormalised: 2/3 and 1/3.
    assert sampled(scores, draw, top_k=2).tolist() == [0, 0, 0, 0, 0, 2, 2, 2]
    assert sampled(scores[:2], torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [0, 3]
    with_zeros = torch.tensor([[-torch.inf, 0.0, -torch.inf]], dtype=torch.float64)
    assert sampled(with_zeros, torch.zeros(1, dtype=torch.float64)).tolist() == [1]


def test_temperature_is_applied_per_row() -> None:
    """A greedy row takes the best; temperature 0.5 squares probabilities .8 .2 into 16/17 and 1/17."""
    logits = torch.tensor([0.8, 0.2]).log().expand(4000, 2)
    pick = Picker(np.repeat([0.0, 0.5], 2000), np.random.default_rng(0))
    token = pick(logits, torch.arange(4000))
    assert token[:2000].sum() == 0
    # Binomial with mean 117.6 and deviation 10.5: within five deviations.
    assert abs(int(token[2000:].sum()) - 2000 / 17) < 53


def test_sampled_text_does_not_hang_on_when_others_end(target: Target) -> None:
    """The same draws with and without stop ids: every row's text is the beginning of its unstopped one."""
    prompts = [[3, 4], [5], [6, 7, 8], [9, 2]]
    runs = [
        generate(target.network, prompts, 40, stops, Picker(np.full(4, 1.0), np.random.default_rng(5)))
        for stops in ((), (0, 4, 9))
    ]
    for whole, cut in zip(*runs):
        assert whole[: len(cut)] == cut
        assert len(cut) == 40 or cut[-1] in (0, 4, 9)
    assert min(len(cut) for cut in runs[1]) < 40


# Own prompts


def test_user_frame(target: Target, make_target: Callable[..., Target]) -> None:
    assert user_frame(target) == ("<user>", (0,))
    with pytest.raises(InputError, match="no chat template"):
        user_frame(make_target(has_template=False))


def test_own_corpus(loaded: Target, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    summary = write_corpus(settings(out, answers=20, batch=14), ["corpus"])
    found = rows(out)
    assert all(pq.read_schema(path).equals(COLUMNS) for path in out.glob("part-*"))
    assert summary["answers"] == len(found) >= 20
    assert summary["response_tokens"] == sum(len(row["response_ids"]) for row in found)
    assert summary["prompt_tokens"] == sum(len(row["prompt_ids"]) for row in found)
    assert summary["greedy_answers"] == sum(row["temperature"] == 0 for row in found)
    assert set(summary["by_kind"]) <= set(OPENINGS) and sum(summary["by_kind"].values()) == len(found)
    assert summary["answers"] + sum(summary["dropped"].values()) == 14 * len(list(out.glob("part-*")))
    assert len({tuple(row["prompt_ids"]) for row in found}) == len(found)
    for row in found:
        text = loaded.decode_text(row["prompt_ids"])
        words = text.removeprefix("<user>").removesuffix("<assistant>")
        assert row["prompt_ids"] == loaded.render([{"role": "user", "content": words}])
        blank = LetterTokenizer()
        assert any(words.startswith(blank.decode(blank.encode(opening)).strip()) for opening in OPENINGS[row["kind"]])
        assert 1 <= len(row["response_ids"]) <= 20
        assert 0 not in row["response_ids"][:-1]
        if row["temperature"] == 0:
            assert row["response_ids"] == plain_text(loaded, row["prompt_ids"], 20)
        else:
            assert row["temperature"] == np.float32(0.7)


def test_kinds_and_share(loaded: Target, tmp_path: Path) -> None:
    summary = write_corpus(settings(tmp_path, kinds=("code", "qa"), greedy_share=1.0), ["corpus"])
    assert set(summary["by_kind"]) == {"code", "qa"}
    assert summary["greedy_answers"] == summary["answers"]


def test_excluded_prompts_never_enter(loaded: Target, tmp_path: Path) -> None:
    """A first corpus's prompt in an excluded file, as the second turn of a chat and in other case and spacing."""
    write_corpus(settings(tmp_path / "first"), ["corpus"])
    texts = [
        loaded.decode_text(row["prompt_ids"])[len("<user>") : -len("<assistant>")] for row in rows(tmp_path / "first")
    ]
    turns = ["unrelated", f"  {texts[0].upper()} \n"]
    (tmp_path / "report.jsonl").write_text(json.dumps({"turns": turns}) + "\n")
    summary = write_corpus(settings(tmp_path / "second", exclude=(tmp_path / "report.jsonl",)), ["corpus"])
    assert summary["dropped"]["excluded prompt"] == 1
    kept = [plain(loaded.decode_text(row["prompt_ids"])) for row in rows(tmp_path / "second")]
    assert plain(f"<user>{texts[0]}<assistant>") not in kept
    assert plain(f"<user>{texts[1]}<assistant>") in kept


def test_filters(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripted own prompts: one of each kind of drop, by name."""
    long = "x" * 220
    script = ["what is it", None, "", "what is it", long, "Report Prompt", "empty one", "kept"]
    config = settings(tmp_path, batch=len(script))
    writer = CorpusWriter(target, config, frozenset({"report prompt"}))
    monkeypatch.setattr(writer, "own_prompts", lambda openings, rng: script)
    texts = iter([[5, 6, 0], [1, 1, 0], [7, 0]])
    monkeypatch.setattr(corpus_text, "generate", lambda network, prompts, *_: [next(texts) for _ in prompts])
    part = writer.own_part(0)
    assert dict(part.dropped) == {
        "unfinished prompt": 1,
        "empty prompt": 1,
        "duplicate prompt": 1,
        "prompt without room for an answer": 1,
        "excluded prompt": 1,
        "empty answer": 1,  # blanks and the stop id
    }
    assert [(row.kind, row.response_ids) for row in part.rows] == [("chat", [5, 6, 0]), ("chat", [7, 0])]
    writer.take(part.rows)
    texts = iter([[4, 0]])  # what was in an earlier part is a duplicate; what was dropped there is not
    monkeypatch.setattr(writer, "own_prompts", lambda openings, rng: ["what is it", "empty one"])
    assert [row.response_ids for row in writer.own_part(1).rows] == [[4, 0]]


# Durability


def test_a_resumed_corpus_equals_an_uninterrupted_one(loaded: Target, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    summary = write_corpus(settings(whole, answers=15), ["corpus"])
    write_corpus(settings(cut, answers=15), ["corpus"])
    parts = sorted(cut.glob("part-*"))
    assert len(parts) >= 3
    for path in parts[1:]:
        path.unlink()
    (cut / ".part-00001.parquet.tmp").write_bytes(b"half a part")  # what a kill leaves behind
    resumed = write_corpus(settings(cut, answers=15, resume=True), ["corpus", "--resume"])
    assert [pq.read_table(a).equals(pq.read_table(b)) for a, b in zip(sorted(whole.glob("part-*")), parts)] == [
        True
    ] * len(parts)
    assert rows(whole) == rows(cut)
    timed = ("out", "seconds", "tokens_per_second")
    assert {k: v for k, v in summary.items() if k not in timed} == {k: v for k, v in resumed.items() if k not in timed}
    run = json.loads((cut / "run.json").read_text())
    assert (run["status"], len(run["sessions"])) == ("finished", 2)
    assert run["sessions"][1]["argv"] == ["corpus", "--resume"]
    assert {"torch", "transformers"} <= set(run["sessions"][0]["versions"])
    assert run["target"]["weights_hash"] == loaded.weights_hash
    # A corpus may be made longer, but not go on under other settings.
    assert write_corpus(settings(cut, answers=22, resume=True), ["corpus"])["answers"] >= 22
    with pytest.raises(InputError, match="since settings.seed differs"):
        write_corpus(settings(cut, answers=40, seed=1, resume=True), ["corpus"])


def test_a_full_disk_leaves_whole_parts(
    loaded: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = trace.write_durably

    def full(path: Path, payload: bytes) -> None:
        if path.name == "part-00001.parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, payload)

    monkeypatch.setattr(corpus_files, "write_durably", full)
    arguments = ["--out", str(tmp_path / "c"), "--answers", "40", "--batch", "6", "--max-new-tokens", "9"]
    assert corpus.main(arguments) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "c").glob("part-*")] == ["part-00000.parquet"]
    assert len(rows(tmp_path / "c")) > 0


# Chats


def chats(path: Path, *turns: list[str]) -> Path:
    path.write_text("".join(json.dumps({"category": f"kind{len(t)}", "turns": t}) + "\n" for t in turns))
    return path


def test_chats_are_answered_turn_by_turn(loaded: Target, tmp_path: Path) -> None:
    file = chats(tmp_path / "chats.jsonl", ["first", "second", "third"], ["alone"], ["other", "last"])
    config = settings(tmp_path / "out", chats=file, answers=None, greedy_share=1.0, batch=2, max_new_tokens=12)
    summary = write_corpus(config, ["corpus"])
    found = rows(tmp_path / "out")
    expected = []
    for group in ([["first", "second", "third"], ["alone"]], [["other", "last"]]):  # parts of two chats
        history: list[list[dict[str, str]]] = [[] for _ in group]
        for turn in range(3):
            for messages, turns in zip(history, group):
                if turn < len(turns):
                    messages.append({"role": "user", "content": turns[turn]})
                    ids = loaded.render(messages)
                    answer = plain_text(loaded, ids, 12)
                    expected.append((f"kind{len(turns)}", ids, answer))
                    messages.append({"role": "assistant", "content": loaded.decode_text(answer)})
    assert [(row["kind"], row["prompt_ids"], row["response_ids"]) for row in found] == expected
    assert (summary["answers"], summary["by_kind"], summary["dropped"]) == (6, {"kind1": 1, "kind2": 2, "kind3": 3}, {})


def test_a_chat_ends_with_its_first_dropped_turn(loaded: Target, tmp_path: Path) -> None:
    file = chats(tmp_path / "chats.jsonl", ["one", "report prompt", "three"], ["one"], ["x" * 250], ["two"])
    report = chats(tmp_path / "report.jsonl", ["Report  prompt"])
    config = settings(tmp_path / "out", chats=file, exclude=(report,), answers=None, batch=4)
    summary = write_corpus(config, ["corpus"])
    words = [loaded.decode_text(row["prompt_ids"]) for row in rows(tmp_path / "out")]
    assert words == ["<user>one<assistant>", "<user>two<assistant>"]
    assert summary["dropped"] == {
        "duplicate prompt": 1,
        "excluded prompt": 1,
        "prompt refused by the template or the context": 1,
    }


def test_chats_of_which_nothing_is_left(loaded: Target, tmp_path: Path) -> None:
    file = chats(tmp_path / "chats.jsonl", ["one"])
    with pytest.raises(InputError, match=r"No prompt could be answered \(1 times excluded prompt\)"):
        write_corpus(settings(tmp_path / "out", chats=file, exclude=(file,), answers=None), ["corpus"])


# The door


def test_json_and_summary(loaded: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--answers", "3", "--batch", "6", "--max-new-tokens", "9", "--max-prompt-tokens", "60"]
    assert corpus.main(["--out", str(tmp_path / "a"), "--json", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["answers"] == len(rows(tmp_path / "a")) and told["out"] == str(tmp_path / "a")
    assert corpus.main(["--out", str(tmp_path / "b"), *arguments]) == 0
    assert f"{told['answers']} answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--answers", "0"], "--answers must be at least 1, not 0."),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0."),
        (["--batch", "-2"], "--batch must be at least 1, not -2."),
        (["--greedy-share", "1.5"], "--greedy-share must lie between 0 and 1, not 1.5."),
        (["--temperature", "0"], "--temperature must be a number above 0, not 0.0."),
        (["--temperature", "nan"], "--temperature must be a number above 0, not nan."),
        (["--kinds", "poetry"], "Unknown task family 'poetry'"),
        (["--kinds", "code", "--chats", "good.jsonl"], "does not go with --chats"),
        (["--chats", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--chats", "bad.jsonl"], "bad.jsonl:2: the line is not valid JSON"),
        (["--exclude", "good.jsonl", "bad.jsonl"], "bad.jsonl:2: the line is not valid JSON"),
        (["--max-prompt-tokens", "300"], "exceed the target's context of 256"),
        (["--max-new-tokens", "300", "--max-prompt-tokens", "60"], "wrote no usable text in 4 batches"),
        (["--max-prompt-tokens", "1", "--seed", "3"], "wrote no usable text in 4 batches"),
        (["--resume", "--out", "taken"], "no corpus here"),
        (["--out", "taken"], "is not empty"),
        (["--out", "good.jsonl"], "is not a folder"),
        (["--out", "good.jsonl/inner"], "cannot be written (Not a directory)"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    loaded: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_text('{"turns": ["one"]}\n')
    Path("bad.jsonl").write_text('{"turns": ["one"]}\n{"turns": [\n')
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    out = [] if "--out" in arguments else ["--out", "out"]
    assert corpus.main([*out, *arguments, "--batch", "2", *arguments]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "answer/s" not in line and line.strip()]
    assert len(told) == 1 and sentence in told[0]


def test_a_part_that_is_missing_or_foreign(loaded: Target, tmp_path: Path) -> None:
    write_corpus(settings(tmp_path, answers=12), ["corpus"])
    first = tmp_path / "part-00000.parquet"
    content = first.read_bytes()
    first.write_bytes(content[:100])
    with pytest.raises(InputError, match="part-00000.parquet: not a whole parquet file"):
        write_corpus(settings(tmp_path, answers=12, resume=True), ["corpus"])
    first.unlink()
    with pytest.raises(InputError, match="a part before the last is missing"):
        write_corpus(settings(tmp_path, answers=12, resume=True), ["corpus"])
