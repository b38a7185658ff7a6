"""The text of a corpus: prompts the target writes itself or finds in chats, filters, and its answers, a part at a time.

Own prompts are sampled behind the bare user header of the chat template (arXiv:2406.08464), steered towards task
families by a few opening words. A part depends on the settings, its number and the parts before it alone.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from workbench.batchdecode import Picker, generate
from workbench.errors import InputError
from workbench.promptfile import COMPLETE_CODE, Prompt, load_prompts
from workbench.target import Target
from workbench.training.openings import OPENINGS

PROMPT_TEMPERATURE, PROMPT_TOP_K = 1.0, 50


@dataclass(frozen=True)
class CorpusConfig:
    """Let a target write training text: its own prompts with its answers, or its answers to the chats of a file."""

    out: Path
    """Folder of the corpus; must be new or empty, unless resumed."""
    target: str = "smollm2"
    """Target model: `smollm2` (embedded), a hub name, a local folder or a GGUF file."""
    device: str = "cpu"
    """Where the model runs: `cpu`, `cuda`, `cuda:1`, ..."""
    dtype: str = "float32"
    """Number type of the model: `float32`, `bfloat16`, `float16` or `float64`."""
    threads: int | None = None
    """Threads of the CPU's matrix products; the library's own choice if not given."""
    chats: Path | None = None
    """Prompt file (chats, `turns` or text) whose turns are answered in order; own prompts if not given."""
    exclude: tuple[Path, ...] = ()
    """Prompt files of which no turn may enter the corpus (letter case and spacing aside)."""
    answers: int | None = None
    """Stop after the part that reaches so many answers; 1000 for own prompts, all of the chats if not given."""
    kinds: tuple[str, ...] = ()
    """Task families of own prompts: chat code math instruct qa summary translation; all if not given."""
    greedy_share: float = 0.7
    """Share of answers decoded greedily; the others are sampled."""
    temperature: float = 0.7
    """Temperature of the sampled answers."""
    max_new_tokens: int = 384
    """Tokens of an answer at most."""
    max_prompt_tokens: int = 192
    """Tokens of an own prompt at most; those that do not end by then are dropped."""
    batch: int = 64
    """Prompts decoded together; one part each batch."""
    seed: int = 0
    """Seed of prompts, temperatures and sampled answers."""
    resume: bool = False
    """Continue the corpus that stands in the folder."""
    json: bool = False
    """Print one JSON object instead of the summary."""


def check_config(config: CorpusConfig) -> None:
    """Raise InputError for a setting that is out of range or goes unused."""
    for name in ("max_new_tokens", "max_prompt_tokens", "batch", *(["answers"] if config.answers is not None else [])):
        if getattr(config, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(config, name)}.")
    if not 0 <= config.greedy_share <= 1:
        raise InputError(f"--greedy-share must lie between 0 and 1, not {config.greedy_share}.")
    if not (config.temperature > 0 and math.isfinite(config.temperature)):
        raise InputError(f"--temperature must be a number above 0, not {config.temperature}.")
    if unknown := [kind for kind in config.kinds if kind not in OPENINGS]:
        raise InputError(f"Unknown task family {unknown[0]!r}; known are {', '.join(OPENINGS)}.")
    if config.kinds and config.chats is not None:
        raise InputError("--kinds steers the target's own prompts and does not go with --chats.")


@dataclass(frozen=True)
class Row:
    """One answered prompt, as COLUMNS says."""

    kind: str
    temperature: float
    prompt_ids: list[int]
    response_ids: list[int]


@dataclass
class Part:
    """The rows of one batch, how many prompts were dropped, by reason, and the hashes of those admitted."""

    rows: list[Row] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    admitted: set[bytes] = field(default_factory=set)


@dataclass(frozen=True)
class Ask:
    """A prompt to be answered."""

    kind: str
    temperature: float
    ids: list[int]


def plain(text: str) -> str:
    """A prompt as it is compared with excluded ones: without letter case and spacing."""
    return " ".join(text.split()).casefold()


def excluded_turns(files: Sequence[Path]) -> frozenset[str]:
    """Every turn of the prompt files, as `plain` text. Raises InputError for a line that cannot be read."""
    found: set[str] = set()
    for file in files:
        for prompt in strict_prompts(file):
            found |= {plain(text) for turn in prompt.turns for text in (turn, turn.removeprefix(COMPLETE_CODE))}
    return frozenset(found)


def strict_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file in their own order. Raises InputError for the first line that cannot be read."""
    prompts, problems = load_prompts(file)
    if problems:
        raise InputError(str(problems[0]))
    return sorted(prompts, key=lambda prompt: prompt.line)


class CorpusWriter:
    """Writes parts: prompts, filters, answers. `seen` holds the hashes of the prompts of all rows so far."""

    def __init__(self, target: Target, config: CorpusConfig, excluded: frozenset[str] = frozenset()) -> None:
        self.target, self.config, self.excluded = target, config, excluded
        self.kinds = config.kinds or tuple(OPENINGS)
        self.seen: set[bytes] = set()

    def take(self, rows: Sequence[Row]) -> None:
        """Remember the prompts of rows that are in the corpus."""
        self.seen |= {_digest(row.prompt_ids) for row in rows}

    def own_part(self, index: int) -> Part:
        """A batch of the target's own prompts, answered."""
        part, rng, size = Part(), self._rng(index), self.config.batch
        kinds = [self.kinds[(index * size + i) % len(self.kinds)] for i in range(size)]
        openings = [str(rng.choice(OPENINGS[kind])) for kind in kinds]
        temperatures = self._temperatures(rng, size)
        asks: list[Ask] = []
        for kind, text, temperature in zip(kinds, self.own_prompts(openings, rng), temperatures):
            if not text:
                part.dropped["unfinished prompt" if text is None else "empty prompt"] += 1
            elif ids := self._admit([{"role": "user", "content": text}], part):
                asks.append(Ask(kind, float(temperature), ids))
        part.rows = [row for row in self._answered(asks, rng, part) if row is not None]
        return part

    def own_prompts(self, openings: Sequence[str], rng: np.random.Generator) -> list[str | None]:
        """What the target writes as a user after each opening; None where it does not come to an end."""
        target, (header, end_ids) = self.target, user_frame(self.target)
        prompts = [target.encode(header + opening) for opening in openings]
        n_new = self.config.max_prompt_tokens
        if (n_most := max(map(len, prompts)) + n_new) > target.max_context:
            raise InputError(f"Prompts of {n_most} tokens exceed the target's context of {target.max_context}.")
        pick = Picker(np.full(len(prompts), PROMPT_TEMPERATURE), rng, PROMPT_TOP_K)
        texts = generate(target.network, prompts, n_new, end_ids, pick)
        return [
            target.decode_text([*target.encode(opening), *ids[:-1]]).strip() if ids[-1] in end_ids else None
            for opening, ids in zip(openings, texts)
        ]

    def chat_part(self, index: int, chats: Sequence[Prompt]) -> Part:
        """A batch of chats, answered turn by turn; a chat ends with its first turn that is dropped."""
        part, rng = Part(), self._rng(index)
        temperatures = self._temperatures(rng, len(chats))
        answers: list[list[str]] = [[] for _ in chats]
        for turn in range(max(len(chat.turns) for chat in chats)):
            asks: list[Ask] = []
            asked: list[int] = []
            for i, chat in enumerate(chats):
                if turn < len(chat.turns) and len(answers[i]) == turn:
                    if ids := self._admit(chat.messages(answers[i]), part):
                        asks.append(Ask(chat.task, float(temperatures[i]), ids))
                        asked.append(i)
            for i, row in zip(asked, self._answered(asks, rng, part)):
                if row is not None:
                    part.rows.append(row)
                    answers[i].append(self._text(row.response_ids))
        return part

    def _admit(self, messages: list[dict[str, str]], part: Part) -> list[int]:
        """Token ids of a chat that may enter; empty, with the reason counted, where it may not."""
        ids, reason = self._rendered(messages)
        if not reason and (_digest(ids) in self.seen or _digest(ids) in part.admitted):
            reason = "duplicate prompt"
        if reason:
            part.dropped[reason] += 1
            return []
        part.admitted.add(_digest(ids))
        return ids

    def _rendered(self, messages: list[dict[str, str]]) -> tuple[list[int], str]:
        """(token ids, why they may not enter or "")."""
        if plain(messages[-1]["content"]) in self.excluded:
            return [], "excluded prompt"
        try:
            ids = self.target.render(messages)
        except InputError:
            return [], "prompt refused by the template or the context"
        is_long = len(ids) + self.config.max_new_tokens > self.target.max_context
        return ids, "prompt without room for an answer" if is_long else ""

    def _answered(self, asks: Sequence[Ask], rng: np.random.Generator, part: Part) -> list[Row | None]:
        """A row for every ask; None, counted, where the answer is empty."""
        pick = Picker(np.array([ask.temperature for ask in asks]), rng)
        prompts, n_new = [ask.ids for ask in asks], self.config.max_new_tokens
        texts = generate(self.target.network, prompts, n_new, self.target.stop_ids, pick)
        rows = [Row(ask.kind, ask.temperature, ask.ids, ids) for ask, ids in zip(asks, texts)]
        found = [row if self._text(row.response_ids).strip() else None for row in rows]
        if n_empty := found.count(None):
            part.dropped["empty answer"] += n_empty
        return found

    def _text(self, response: Sequence[int]) -> str:
        return self.target.decode_text(response[:-1] if response[-1] in self.target.stop_ids else response)

    def _temperatures(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """The temperature of each answer [n]."""
        return np.where(rng.random(n) < self.config.greedy_share, 0.0, self.config.temperature)

    def _rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed % (1 << 63), index])


def user_frame(target: Target) -> tuple[str, tuple[int, ...]]:
    """The chat template's text before a first user's words, and the ids that end them. Raises InputError."""
    mark = "WORDSOFTHEUSER"
    if target.template_hash == "none":
        raise InputError(f"The target {target.name!r} has no chat template to write own prompts with; give --chats.")
    try:
        text = target.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    except Exception as error:  # templates raise their own refusals
        raise InputError(f"The model's chat template refuses a user message: {error}.") from error
    header, found, tail = text.partition(mark)
    if not found:
        raise InputError("The model's chat template changes a user's words, so the target cannot write own prompts.")
    return header, tuple(dict.fromkeys([*target.stop_ids, *target.encode(tail)[:1]]))


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).digest()
