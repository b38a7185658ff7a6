"""Prompt files: every layout read, every bad line named, no good line lost; and the built-in set."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.promptfile import COMPLETE_CODE, MAX_LINE_BYTES, Prompt, load_prompts, take_in_turn

BUILT_IN_TASKS = ["chat", "code", "instructions", "math", "qa", "translation"]


def write(folder: Path, *lines: object, name: str = "some.jsonl") -> Path:
    """A file of these lines: bytes as they are, texts in UTF-8, anything else as JSON."""
    path = folder / name
    as_bytes = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(line + b"\n" for line in as_bytes))
    return path


def question(number: int | str, task: str = "math", *turns: str) -> dict[str, object]:
    return {"question_id": number, "category": task, "turns": list(turns or (f"Question {number}?",))}


def test_question_layout(tmp_path: Path) -> None:
    path = write(tmp_path, {**question(81, "writing", "Write.", "Again."), "reference": []}, question("b", "math"))
    prompts, problems = load_prompts(path)
    assert problems == []
    assert prompts == [
        Prompt("81", "writing", ("Write.", "Again."), None, str(path), 1),
        Prompt("b", "math", ("Question b?",), None, str(path), 2),
    ]


def test_humaneval_layout_asks_for_the_code(tmp_path: Path) -> None:
    code = 'def one():\n    """Return 1."""\n'
    path = write(tmp_path, {"task_id": "HumanEval/0", "prompt": code, "entry_point": "one"}, name="HumanEval.jsonl")
    (prompt,), problems = load_prompts(path)
    assert problems == []
    assert (prompt.id, prompt.task, prompt.turns) == ("HumanEval/0", "HumanEval", (COMPLETE_CODE + code,))


def test_chat_layout_drops_the_answers_and_keeps_the_system_prompt(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "user"]
    chat = {"messages": [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]}
    (prompt,), problems = load_prompts(write(tmp_path, chat, name="chats.jsonl"))
    assert problems == []
    assert (prompt.id, prompt.task, prompt.system) == ("line-1", "chats", "system 0")
    assert prompt.turns == ("user 1", "user 3")


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b'\xef\xbb\xbfFirst.\r\n\r\n   \n{"second": 1}\nThird, without an end')
    prompts, problems = load_prompts(path)
    assert problems == []
    assert [(p.id, p.task, p.turns) for p in prompts] == [
        ("line-1", "mine", ("First.",)),
        ("line-4", "mine", ('{"second": 1}',)),
        ("line-5", "mine", ("Third, without an end",)),
    ]


def test_json_lines_under_another_name_are_not_taken_for_text(tmp_path: Path) -> None:
    (prompt,), _ = load_prompts(write(tmp_path, question(1), name="questions.data"))
    assert prompt.turns == ("Question 1?",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 20000, "not usable JSON"),
        ("[1]", "must be a JSON object, not a list"),
        ({"question_id": 1}, "none of the keys"),
        ({"turns": "text"}, "`turns` must be a list with at least one entry, not a text"),
        ({"turns": []}, "not an empty list"),
        ({"turns": ["fine", " \n"]}, "turn 2 is empty"),
        ({"turns": [3]}, "turn 1 must be a text, not a number"),
        ({"turns": ["x"], "category": None}, "`category` must be a name, not null"),
        ({"turns": ["x"], "question_id": True}, "the id must be a number or a text, not true"),
        ({"turns": ["x"], "question_id": {}}, "the id must be a number or a text, not an empty object"),
        ({"turns": ["x"], "category": "a\x1b[2J"}, "`category` holds a control character"),
        ({"turns": ["x"], "question_id": "1\n"}, "the id holds a control character"),
        ({"turns": ["x"], "question_id": "\ud800"}, "the id holds a control character"),
        ({"turns": ["x"], "system": 5}, "`system` must be a text, not a number"),
        ({"task_id": "a", "prompt": ""}, "`prompt` is empty"),
        ({"prompt": None}, "`prompt` must be a text, not null"),
        ({"turns": ["\ud800"]}, "surrogate"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "message 1 must have the role 'user', not 'assistant'"),
        ({"messages": [{"role": "user", "content": "x"}] * 2}, "message 2 must have the role 'assistant'"),
        ({"messages": ["x"]}, "message 1 must have the role 'user', not None"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "message 1 must be a text, not a list"),
        (b'{"turns": ["\xff"]}', "not valid UTF-8 (byte 13)"),
        ('{"turns": ["' + "x" * MAX_LINE_BYTES + '"]}', "longer than 1048576 bytes"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_kept(tmp_path: Path, line: object, words: str) -> None:
    path = write(tmp_path, question("a"), line, question("z"))
    prompts, (problem,) = load_prompts(path)
    assert [prompt.id for prompt in prompts] == ["a", "z"]
    assert (problem.file, problem.line) == (str(path), 2)
    assert words in problem.sentence
    assert str(problem).startswith(f"{path}:2: ")


def test_a_repeated_id_is_a_problem_and_the_first_is_kept(tmp_path: Path) -> None:
    prompts, (problem,) = load_prompts(write(tmp_path, question(1), question("1", "qa", "Other?"), question(2)))
    assert [prompt.turns[0] for prompt in prompts] == ["Question 1?", "Question 2?"]
    assert (problem.line, problem.sentence) == (2, "the id '1' was used before, in line 1.")


@pytest.mark.parametrize("n_bytes", [MAX_LINE_BYTES - 1, MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_the_longest_line(tmp_path: Path, n_bytes: int, end: bytes) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" * n_bytes + end + b"next" + end)
    prompts, problems = load_prompts(path)
    is_fine = n_bytes <= MAX_LINE_BYTES
    assert [problem.line for problem in problems] == ([] if is_fine else [1])
    assert [len(prompt.turns[0]) for prompt in prompts] == ([n_bytes, 4] if is_fine else [4])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n  \n", "holds no usable prompt."),
        (b"{\n", "holds no usable prompt; the first problem is"),
        (b"\x1f\x8b\x08\x00rest\n", "is compressed; unpack it first"),
    ],
)
def test_a_file_without_a_prompt_is_an_input_error(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "none.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="none.jsonl") as caught:
        load_prompts(path)
    assert words in str(caught.value)


def test_missing_file_and_folder_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        load_prompts(tmp_path)


def test_tasks_and_limits(tmp_path: Path) -> None:
    lines = [question(n, task) for n, task in enumerate(["a", "a", "a", "b", "c", "c"])]
    path = write(tmp_path, *lines)

    def ids(**options: object) -> str:
        return "".join(prompt.id for prompt in load_prompts(path, **options)[0])  # type: ignore[arg-type]

    assert ids() == "034152"  # the first of a, b, c; the second of a, c; the third of a
    assert ids(limit=4) == "0341"
    assert ids(limit_per_task=1) == "034"
    assert ids(limit_per_task=2, limit=4) == "0341"
    assert ids(tasks=["c", "a"]) == "04152"
    assert ids(limit=99) == "034152"
    with pytest.raises(InputError, match="No prompt has the task 'd'; the tasks are a, b, c."):
        ids(tasks=["a", "d"])
    for options in ({"limit": 0}, {"limit_per_task": -1}):
        with pytest.raises(InputError, match="must be at least 1"):
            ids(**options)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=30), st.integers(1, 40))
@settings(deadline=None)
def test_a_smaller_limit_gives_the_beginning_and_covers_tasks_evenly(tasks: list[str], limit: int) -> None:
    prompts = [Prompt(str(n), task, ("x",)) for n, task in enumerate(tasks)]
    everything = take_in_turn(prompts, None, None)
    assert sorted(everything, key=lambda p: int(p.id)) == prompts
    some = take_in_turn(prompts, limit, None)
    assert some == everything[:limit]
    taken, there = Counter(p.task for p in some), Counter(tasks)
    most = max(taken.values())
    assert all(taken[task] >= min(most - 1, there[task]) for task in there)


def test_messages_of_a_turn() -> None:
    prompt = Prompt("1", "chat", ("Hi", "And?"), "Be brief.")
    assert prompt.messages() == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt.messages(["Hello"])[1:] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    with pytest.raises(ValueError, match="leave none to ask"):
        prompt.messages(["Hello", "Bye"])


def test_built_in_prompts() -> None:
    prompts, problems = load_prompts()
    assert problems == []
    assert [prompt.task for prompt in prompts[:6]] == BUILT_IN_TASKS
    counts = Counter(prompt.task for prompt in prompts)
    assert set(counts) == set(BUILT_IN_TASKS) and min(counts.values()) >= 24
    assert all(len(prompt.turns) == (2 if prompt.task == "chat" else 1) for prompt in prompts)
    first_turns = Counter(prompt.turns[0] for prompt in prompts)
    assert max(first_turns.values()) == 1


def test_built_in_prompts_name_their_file_and_no_place_on_the_machine():
    prompts, _ = load_prompts(limit=6)
    assert [prompt.file for prompt in prompts] == [f"built-in/{prompt.task}.jsonl" for prompt in prompts]
