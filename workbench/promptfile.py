"""Prompts from files: every good line becomes a `Prompt`, every bad one a `Problem` that names file and line.

Layouts, told apart line by line in JSON-lines files:

- `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`: the `question.jsonl` of Spec-Bench and EAGLE;
- `{"messages": [{"role": "user", "content": "..."}, ...]}`: a chat. User messages are the turns, a leading system
  message is the system prompt, assistant messages are dropped (the target writes its own);
- `{"task_id": "HumanEval/0", "prompt": "..."}`: HumanEval's; the code is asked for as EAGLE does (`COMPLETE_CODE`).

The first and the last may carry `"system": "..."`; other keys are ignored. Any other file is plain text: one prompt
per line that is not blank. The task of a prompt is its `category`, else the file's name without its ending; its id
is `question_id`, `task_id` or `id`, else `line-N`.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from workbench.errors import InputError

BUILT_IN_FOLDER = Path(__file__).parent / "prompts"
MAX_LINE_BYTES = 1 << 20
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
COMPLETE_CODE = "Complete the code I provided.\n\n"
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Prompt:
    """One conversation to decode: the user's turns in order; the answers between them are the target's own."""

    id: str
    task: str
    turns: tuple[str, ...]
    system: str | None = None
    file: str = ""
    line: int = 0

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """Chat messages up to the user turn that follows `answers` (one answer for every turn before it)."""
        if len(answers) >= len(self.turns):
            raise ValueError(f"prompt {self.id} has {len(self.turns)} turns; {len(answers)} answers leave none to ask")
        chat = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn, answer in zip(self.turns, answers):
            chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": self.turns[len(answers)]}]


@dataclass(frozen=True)
class Problem:
    """A line (1-based) that gave no prompt, and why, in one sentence."""

    file: str
    line: int
    sentence: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.sentence}"


def load_prompts(
    path: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    limit_per_task: int | None = None,
) -> tuple[list[Prompt], list[Problem]]:
    """Prompts of a file (None: the built-in set) and the problems of its bad lines.

    Prompts come in turn from the tasks, tasks in order of first appearance: the first of every task, then the second
    of every task, and so on. `tasks` keeps these tasks only; `limit_per_task` keeps the first so many of every task;
    `limit` then keeps the first so many in all, so a smaller limit gives the beginning of what a larger one gives.

    Raises InputError where nothing can be read, no line is usable, a task is unknown or a limit is below 1.
    """
    for name, value in (("limit", limit), ("limit per task", limit_per_task)):
        if value is not None and value < 1:
            raise InputError(f"The {name} must be at least 1, not {value}.")
    files = sorted(BUILT_IN_FOLDER.glob("*.jsonl")) if path is None else [Path(path)]
    prompts, problems = _read_files(files)
    if path is None:  # a trace names its prompts' source; where the package lies on this machine is no part of it
        prompts = [replace(prompt, file=f"built-in/{Path(prompt.file).name}") for prompt in prompts]
    if not prompts:
        why = f"; the first problem is {problems[0]}" if problems else "."
        raise InputError(f"{path or BUILT_IN_FOLDER} holds no usable prompt{why}")
    return take_in_turn(_of_tasks(prompts, tasks), limit, limit_per_task), problems


def take_in_turn(prompts: Sequence[Prompt], limit: int | None, limit_per_task: int | None) -> list[Prompt]:
    """The first prompt of every task, then the second of every task, ..., cut as `load_prompts` says."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    rounds = zip_longest(*(group[:limit_per_task] for group in by_task.values()))
    return [prompt for one_round in rounds for prompt in one_round if prompt is not None][:limit]


def _of_tasks(prompts: list[Prompt], tasks: Sequence[str] | None) -> list[Prompt]:
    if not tasks:
        return prompts
    known = Counter(prompt.task for prompt in prompts)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise InputError(f"No prompt has the task {unknown[0]!r}; the tasks are {', '.join(known)}.")
    return [prompt for prompt in prompts if prompt.task in tasks]


def _read_files(files: Sequence[Path]) -> tuple[list[Prompt], list[Problem]]:
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    first_line: dict[str, int] = {}
    for file in files:
        for found in _read_file(file):
            if isinstance(found, Prompt) and found.id in first_line:
                sentence = f"the id {found.id!r} was used before, in line {first_line[found.id]}."
                found = Problem(found.file, found.line, sentence)
            if isinstance(found, Problem):
                problems.append(found)
            else:
                first_line[found.id] = found.line
                prompts.append(found)
    return prompts, problems


def _read_file(file: Path) -> Iterator[Prompt | Problem]:
    """Every line that is not blank, read without ever holding more than one line of at most `MAX_LINE_BYTES`."""
    try:
        with file.open("rb") as stream:
            yield from _read_stream(stream, file)
    except FileNotFoundError:
        raise InputError(f"The prompt file {file} does not exist.") from None
    except IsADirectoryError:
        raise InputError(f"{file} is a folder, not a prompt file.") from None
    except OSError as error:
        raise InputError(f"The prompt file {file} cannot be read: {error.strerror}.") from error


def _read_stream(stream: BinaryIO, file: Path) -> Iterator[Prompt | Problem]:
    is_json: bool | None = None
    number = 0
    for number, raw in enumerate(_lines(stream), start=1):
        try:
            text = _decode(raw.removeprefix(BYTE_ORDER_MARK) if raw and number == 1 else raw, file)
            if not text.strip():
                continue
            is_json = _is_json(file, text) if is_json is None else is_json
            yield _json_prompt(text, file, number) if is_json else _text_prompt(text, file, number)
        except _BadLine as bad:
            yield Problem(str(file), number, str(bad))
    if number == 0:
        raise InputError(f"The prompt file {file} is empty.")


def _lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Lines without their end; None for one that is too long."""
    while piece := stream.readline(MAX_LINE_BYTES + 2):
        body = piece.removesuffix(b"\n").removesuffix(b"\r")
        is_whole = piece.endswith(b"\n") or len(piece) < MAX_LINE_BYTES + 2
        yield body if is_whole and len(body) <= MAX_LINE_BYTES else None
        while piece and not piece.endswith(b"\n"):
            piece = stream.readline(MAX_LINE_BYTES)


def _is_json(file: Path, first_text: str) -> bool:
    """By the file's ending; a file of another name that begins like a JSON object is not taken for text."""
    ending = file.suffix.lower()
    return ending in JSON_ENDINGS or (ending != ".txt" and first_text.lstrip().startswith('{"'))


class _BadLine(Exception):
    """Why a line gives no prompt; never leaves this module."""


def _decode(raw: bytes | None, file: Path) -> str:
    if raw is None:
        raise _BadLine(f"the line is longer than {MAX_LINE_BYTES} bytes.")
    if raw.startswith(GZIP_MAGIC):
        raise InputError(f"The prompt file {file} is compressed; unpack it first.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLine(f"the line is not valid UTF-8 (byte {error.start + 1}).") from None


def _text_prompt(text: str, file: Path, line: int) -> Prompt:
    return Prompt(f"line-{line}", file.stem, (_turn(text, "the prompt"),), None, str(file), line)


def _json_prompt(text: str, file: Path, line: int) -> Prompt:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise _BadLine(f"the line is not valid JSON ({error.msg}, column {error.colno}).") from None
    except (ValueError, RecursionError):
        raise _BadLine("the line is not usable JSON (nested too deep, or a number too long).") from None
    if not isinstance(record, dict):
        raise _BadLine(f"the line must be a JSON object, not {_kind(record)}.")
    task = record.get("category", file.stem)
    if not isinstance(task, str) or not task.strip():
        raise _BadLine(f"`category` must be a name, not {_kind(task)}.")
    if not _is_clean(task):
        raise _BadLine("`category` holds a control character.")
    turns, system = _turns_and_system(record)
    return Prompt(_identity(record, line), task, turns, system, str(file), line)


def _turns_and_system(record: dict[str, Any]) -> tuple[tuple[str, ...], str | None]:
    if "turns" in record:
        turns = _filled_list(record["turns"], "turns")
        return tuple(_turn(turn, f"turn {n}") for n, turn in enumerate(turns, start=1)), _system(record)
    if "messages" in record:
        return _chat(_filled_list(record["messages"], "messages"))
    if "prompt" in record:
        ask = COMPLETE_CODE if "task_id" in record else ""
        return (ask + _turn(record["prompt"], "`prompt`"),), _system(record)
    raise _BadLine("the line has none of the keys `turns`, `messages` and `prompt`.")


def _chat(messages: list[Any]) -> tuple[tuple[str, ...], str | None]:
    """Turns and system prompt of alternating user and assistant messages, with or without a system message first."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    has_system = roles[0] == "system"
    wanted = ["system"] * has_system + [("user", "assistant")[n % 2] for n in range(len(roles) - has_system)]
    for n, (role, want) in enumerate(zip(roles, wanted), start=1):
        if role != want:
            raise _BadLine(f"message {n} must have the role {want!r}, not {role!r}.")
    turns = tuple(
        _turn(message.get("content"), f"message {n}")
        for n, (role, message) in enumerate(zip(roles, messages), start=1)
        if role == "user"
    )
    if not turns:
        raise _BadLine("`messages` has no user message.")
    return turns, _turn(messages[0].get("content"), "message 1") if has_system else None


def _identity(record: dict[str, Any], line: int) -> str:
    value = next((record[key] for key in ("question_id", "task_id", "id") if key in record), f"line-{line}")
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise _BadLine(f"the id must be a number or a text, not {_kind(value)}.")
    if not _is_clean(str(value)):
        raise _BadLine("the id holds a control character.")
    return str(value)


def _is_clean(name: str) -> bool:
    """Whether a name has nothing in it that moves a terminal's cursor or is no character."""
    return all(unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029" for c in name)


def _system(record: dict[str, Any]) -> str | None:
    value = record.get("system")
    return None if value is None else _turn(value, "`system`")


def _filled_list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _BadLine(f"`{key}` must be a list with at least one entry, not {_kind(value)}.")
    return value


def _turn(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _BadLine(f"{what} must be a text, not {_kind(value)}.")
    if not value.strip():
        raise _BadLine(f"{what} is empty.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLine(f"{what} holds half of a surrogate pair, which is no character.") from None
    return value


def _kind(value: Any) -> str:
    """A JSON value in words, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return "a number"
    noun = "text" if isinstance(value, str) else "list" if isinstance(value, list) else "object"
    if not value:
        return f"an empty {noun}"
    return f"an {noun}" if noun == "object" else f"a {noun}"
