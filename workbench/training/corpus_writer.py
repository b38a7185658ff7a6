"""Training text written by the target itself: its own prompts or those of given chats, and its own answers.

Own prompts are sampled behind the bare user header of the chat template (arXiv:2406.08464), steered towards task
families by a few opening words. A corpus folder holds run.json and one parquet part per batch (COLUMNS), each written
whole or not at all. A part depends on the settings, its number and the parts before it alone, so a resumed run equals
an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from workbench import provenance
from workbench.errors import InputError
from workbench.network import Layer, Network
from workbench.promptfile import COMPLETE_CODE, Prompt, load_prompts
from workbench.target import Target, load_target
from workbench.trace import disk_faults_told, first_difference, write_durably

FORMAT = "speculation-corpus"
FORMAT_VERSION = 1
COLUMNS = pa.schema(
    [
        ("kind", pa.string()),  # task family
        ("temperature", pa.float32()),  # of the answer; 0 is greedy
        ("prompt_ids", pa.list_(pa.int32())),  # chat template included
        ("response_ids", pa.list_(pa.int32())),  # ends with a stop id where the answer finished
    ]
)
PROMPT_TEMPERATURE, PROMPT_TOP_K = 1.0, 50
PREFILL_ROWS = 8192  # rows of one forward over prompts
MAX_EMPTY_PARTS = 4  # parts in a row without a usable answer, after which own prompts are given up
DEFAULT_ANSWERS = 1000

OPENINGS = {
    kind: tuple(words.split("|"))
    for kind, words in {
        "chat": "|I|How do I|What do you think about|Can you help me|My friend|I've been|Tell me|Hi|Why do people|"
        "Do you|What should I|I want to|Let's talk about|I feel|Could you recommend|Imagine|It's my",
        "code": "Write a Python function that|Write a function in JavaScript that|Write an SQL query that|"
        "Fix the bug in this code:\n|What does this code do?\n\n```python\n|Implement a class for|"
        "In Python, how do I|Write a bash script that|Write a unit test for|Given a list of|Create an HTML page|"
        "I get an error when|Write a C program that|def|Refactor this function:\n\n|Write a regular expression that",
        "math": "Solve|What is the sum of|A train|If x|Find the|There are|Calculate|A shop sells|How many|Anna has|"
        "What is the probability that|The area of|A farmer|Prove that|In a class of|Simplify",
        "instruct": "Write a short story about|Write a poem about|Give me five|List the|Describe|Write an email to|"
        "Create a plan for|Explain how to|Compare|Suggest|Write a product description for|Write step by step|"
        "Make a table of|Draft a speech|Rewrite this sentence|Classify",
        "qa": "What is|Who|When did|Where is|Why is|How does|Which|What are the|How many|What happened|Is it true|"
        "Who wrote|What causes|How long|What does|In which country",
        "summary": "Summarize the following text:\n\n|Summarise this article in two sentences:\n\n|"
        "Give the main points of this text:\n\n|Write a headline for this story:\n\n|Shorten this paragraph:\n\n|"
        "What is this passage about?\n\n|TL;DR:\n\n|Summarize this conversation:\n\n",
        "translation": "Translate to French:|Translate to Spanish:|Translate into German:|"
        "Translate this sentence into Italian:|How do you say in French|Translate into English: Le|"
        "Translate into English: Der|Translate into English: El|Translate the following into Portuguese:|"
        "What is the Spanish word for|Translate from French to English:|Translate from English to Dutch:",
    }.items()
}


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


# ------------------------------------------------------------------------------------------------ batched decoding


class Lockstep:
    """Left-padded prompts decoded in lockstep; keys and values lie in one slab, allocated once, written in place.

    Letters: B rows (prompts still running), L new columns, C columns of the slab.
    """

    def __init__(self, network: Network, prompts: Sequence[Sequence[int]], n_new: int) -> None:
        self.network, self.length = network, 0
        device, width = network.device, max(map(len, prompts))
        pad = [width - len(prompt) for prompt in prompts]
        self.ids = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(pad, prompts)], device=device)  # [B, C']
        self.pad = torch.tensor(pad, device=device)  # [B]
        self.is_real = torch.arange(width + n_new, device=device) >= self.pad[:, None]  # [B, C]
        shape = (len(network.layers), 2, len(prompts), network.n_kv, width + n_new, network.head_dim)
        self.slab = torch.empty(shape, dtype=network.dtype, device=device)

    def prefill(self) -> Tensor:
        """Run the prompts a few columns at a time -> final hidden state of the last column [B, H]."""
        n_columns = max(1, PREFILL_ROWS // len(self.pad))
        return [self.forward(ids) for ids in self.ids.split(n_columns, dim=1)][-1]

    def forward(self, ids: Tensor) -> Tensor:
        """Run new columns `ids` [B, L] -> final hidden state of the last one [B, H]."""
        network, (n_b, n_new) = self.network, ids.shape
        end = self.length + n_new
        index = torch.arange(self.length, end, device=ids.device)
        position = (index - self.pad[:, None]).clamp(min=0)
        angles = [table[position.flatten()] for table in network.rotary(end)]  # each [B * L, 1, d]
        mask = self._mask(index, end)
        x = F.embedding(ids.flatten(), network.embed_weight)  # [B * L, H]
        for layer, (keys, values) in zip(network.layers, self.slab):
            x = layer.out.plus(self._attend(layer, x, keys[:n_b], values[:n_b], angles, mask), x)
            h = layer.post_norm(x)
            x = layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)
        self.length = end
        return network.norm(x.view(n_b, n_new, -1)[:, -1])

    def _mask(self, index: Tensor, end: int) -> Tensor:
        """bool [B, 1, L, end]: real columns up to a row's own; padding sees itself, to stay finite."""
        column = torch.arange(end, device=index.device)
        is_seen = (column <= index[:, None]) & self.is_real[:, None, :end]
        return (is_seen | (column == index[:, None]))[:, None]

    def _attend(
        self, layer: Layer, x: Tensor, keys: Tensor, values: Tensor, angles: Sequence[Tensor], mask: Tensor
    ) -> Tensor:
        """Attention of the new columns [B * L, heads * d]; their keys and values go into [B, h_kv, C, d]."""
        network, (n_b, _, n_new, end) = self.network, mask.shape
        n_heads, n_kv, d = network.n_heads, network.n_kv, network.head_dim
        heads = layer.qkv(layer.input_norm(x)).view(n_b * n_new, -1, d)
        qk, v = heads[:, : n_heads + n_kv], heads[:, n_heads + n_kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, :n_heads]), layer.k_norm(qk[:, n_heads:])), 1)
        qk = torch.addcmul(qk * angles[0], torch.roll(qk, d // 2, -1), angles[1])
        q, k, v = (y.view(n_b, n_new, -1, d).transpose(1, 2) for y in (qk[:, :n_heads], qk[:, n_heads:], v))
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        k, v = keys[:, :, :end], values[:, :, :end]
        if n_new == 1:  # the query heads of a group become its rows: keys and values are read once
            mixed = F.scaled_dot_product_attention(q.reshape(n_b, n_kv, -1, d), k, v, attn_mask=mask)
            return mixed.reshape(n_b, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=n_heads != n_kv)
        return mixed.transpose(1, 2).reshape(n_b * n_new, -1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, moved to the front of the slab."""
        for part in self.slab.flatten(0, 1):
            part[: len(rows), :, : self.length] = part[rows, :, : self.length]
        self.pad, self.is_real = self.pad[rows], self.is_real[rows]


class Picker:
    """The next token of every running row: greedy at temperature 0, else sampled by inverting the distribution.

    Each step draws one uniform number for every prompt, running or not, so that a row's text does not hang on when
    others end. (Corpus text is never replayed; it needs no noise keyed to the position.)
    """

    def __init__(self, temperature: np.ndarray, rng: np.random.Generator, top_k: int = 0) -> None:
        self.temperature, self.rng, self.top_k = torch.from_numpy(temperature), rng, top_k

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Tokens [R] for logits [R, V] of the prompts `rows` [R], int64 on the CPU as is `rows`."""
        draw = torch.from_numpy(self.rng.random(len(self.temperature)))[rows]
        temperature, token = self.temperature[rows], logits.argmax(-1).cpu()
        hot = (temperature > 0).nonzero().flatten()
        if len(hot):
            scores = logits[hot.to(logits.device)].double() / temperature[hot, None].to(logits.device)
            token[hot] = sampled(scores, draw[hot].to(logits.device), self.top_k).cpu()
        return token


def sampled(scores: Tensor, draw: Tensor, top_k: int = 0) -> Tensor:
    """Tokens [R] where the cumulative probability of scores [R, V] passes draw [R] in [0, 1); best `top_k` only."""
    if 0 < top_k < scores.shape[-1]:
        scores, ids = scores.topk(top_k, dim=-1)
        return ids.gather(-1, sampled(scores, draw)[:, None])[:, 0]
    cumulative = torch.softmax(scores, -1).cumsum(-1)
    place = torch.searchsorted(cumulative, draw[:, None] * cumulative[:, -1:], right=True)
    return place[:, 0].clamp(max=scores.shape[-1] - 1)


@torch.inference_mode()
def generate(
    network: Network,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    stop_ids: Sequence[int],
    pick: Callable[[Tensor, Tensor], Tensor],
) -> list[list[int]]:
    """The continuation of every prompt: to its first stop id, which is kept, or `n_new` tokens."""
    if not prompts:
        return []
    texts: list[list[int]] = [[] for _ in prompts]
    stops, running = set(stop_ids), torch.arange(len(prompts))  # the prompt of every row
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    rows = Lockstep(network, prompts, n_new)
    final = rows.prefill()
    for step in range(n_new):
        token = pick(network.logits(final), running)
        for i, (prompt, t) in enumerate(zip(running.tolist(), token.tolist())):
            if not is_done[i]:
                texts[prompt].append(t)
                is_done[i] = t in stops
        if step == n_new - 1 or bool(is_done.all()):
            break
        if int(is_done.sum()) * 8 >= len(is_done):  # an eighth has ended: the others close up
            going = (~is_done).nonzero().flatten()
            rows.keep(going.to(network.device))
            running, token, is_done = running[going], token[going], is_done[going]
        final = rows.forward(token[:, None].to(network.device))
    return texts


# ------------------------------------------------------------------------------------------------ one part


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


# ------------------------------------------------------------------------------------------------ the whole corpus


def write_corpus(config: CorpusConfig, argv: Sequence[str]) -> dict[str, Any]:
    """Write the corpus into `config.out`, or go on with it; returns its summary. Raises InputError."""
    check_config(config)
    refuse_if_taken(config.out, config.resume)
    chats = None if config.chats is None else strict_prompts(config.chats)
    excluded = excluded_turns(config.exclude)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_target(config.target, config.device, config.dtype)
    with disk_faults_told(config.out):
        run = begin_run(config, target, argv)
        started = perf_counter()
        n_before = write_parts(config, CorpusWriter(target, config, excluded), chats)
        seconds, summary = perf_counter() - started, summarise(config.out)
        speed = (summary["response_tokens"] - n_before) / seconds
        summary |= {"seconds": round(seconds, 1), "tokens_per_second": round(speed, 1)}
        run["sessions"][-1]["finished"] = provenance.timestamp()
        write_run(config.out, run | {"status": "finished", "summary": summary})
    if not summary["answers"]:
        raise InputError(f"No prompt could be answered ({_reasons(summary['dropped'])}).")
    return {"out": str(config.out)} | summary


def write_parts(config: CorpusConfig, writer: CorpusWriter, chats: Sequence[Prompt] | None) -> int:
    """Write the parts that are missing; returns the response tokens that stood there before."""
    folder, n_parts = config.out, count_parts(config.out)
    rows = [row for index in range(n_parts) for row in read_rows(folder, index)]
    writer.take(rows)
    n_rows, n_empty = len(rows), 0
    n_wanted = config.answers or (DEFAULT_ANSWERS if chats is None else sum(len(chat.turns) for chat in chats))
    with tqdm(total=n_wanted, initial=min(n_rows, n_wanted), unit="answer", desc=writer.target.name) as bar:
        for index in range(n_parts, 1 << 31):
            batch = None if chats is None else chats[index * config.batch : (index + 1) * config.batch]
            if n_rows >= n_wanted or (batch is not None and not batch):
                break
            part = writer.own_part(index) if batch is None else writer.chat_part(index, batch)
            n_empty = 0 if part.rows else n_empty + 1
            if batch is None and n_empty == MAX_EMPTY_PARTS:
                why = _reasons(part.dropped)
                raise InputError(f"{writer.target.name!r} wrote no usable text in {n_empty} batches (the last: {why}).")
            write_part(folder, index, part)
            writer.take(part.rows)
            n_rows += len(part.rows)
            bar.update(len(part.rows))
    return sum(len(row.response_ids) for row in rows)


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{n} times {why}" for why, n in dropped.items())


def part_path(folder: Path, index: int) -> Path:
    """Where a part stands."""
    return folder / f"part-{index:05d}.parquet"


def count_parts(folder: Path) -> int:
    """Parts in the folder. Raises InputError if one before the last is missing."""
    names = sorted(path.name for path in folder.glob("part-*.parquet"))
    if names != [part_path(folder, index).name for index in range(len(names))]:
        raise InputError(f"{folder}: a part before the last is missing, or a file there is none of this corpus.")
    return len(names)


def write_part(folder: Path, index: int, part: Part) -> None:
    """Write a part durably; the counts of dropped prompts travel in its metadata."""
    columns = {name: [getattr(row, name) for row in part.rows] for name in COLUMNS.names}
    table = pa.table(columns, schema=COLUMNS.with_metadata({b"dropped": json.dumps(part.dropped).encode()}))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_durably(part_path(folder, index), sink.getvalue().to_pybytes())


def read_part(folder: Path, index: int) -> pa.Table:
    """A part as a table of COLUMNS. Raises InputError for a file that is none."""
    path = part_path(folder, index)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a whole parquet file.") from error
    if not table.schema.equals(COLUMNS):
        raise InputError(f"{path}: its columns are not those of a corpus ({', '.join(COLUMNS.names)}).")
    return table


def read_rows(folder: Path, index: int) -> Iterator[Row]:
    """The rows of a part."""
    for row in read_part(folder, index).to_pylist():
        yield Row(**row)


def summarise(folder: Path) -> dict[str, Any]:
    """Counts of the whole corpus, from its parts."""
    dropped: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    n_prompt = n_response = n_greedy = 0
    for index in range(count_parts(folder)):
        table = read_part(folder, index)
        dropped.update(json.loads((table.schema.metadata or {}).get(b"dropped", b"{}")))
        by_kind.update(table["kind"].to_pylist())
        n_greedy += sum(value == 0 for value in table["temperature"].to_pylist())
        n_prompt += sum(map(len, table["prompt_ids"].to_pylist()))
        n_response += sum(map(len, table["response_ids"].to_pylist()))
    return {
        "answers": by_kind.total(),
        "greedy_answers": n_greedy,
        "prompt_tokens": n_prompt,
        "response_tokens": n_response,
        "by_kind": dict(sorted(by_kind.items())),
        "dropped": dict(sorted(dropped.items())),
    }


def refuse_if_taken(folder: Path, is_resumed: bool) -> None:
    """InputError unless a corpus can be written there: an empty or new folder, or, to be resumed, a corpus."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is not a folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not is_resumed:
        raise InputError(f"{folder}: is not empty; choose another folder, or continue the corpus there with --resume.")
    read_run(folder)


def begin_run(config: CorpusConfig, target: Target, argv: Sequence[str]) -> dict[str, Any]:
    """Write run.json with status `running`, or take up the one there if it is of the same corpus."""
    folder, fixed, sessions = config.out, describe(config, target), []
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "run.json").exists():
        known = read_run(folder)
        sessions = known["sessions"]
        if key := first_difference({name: known.get(name) for name in fixed}, fixed):
            raise InputError(f"{folder}: cannot be resumed, since {key} differs from the corpus there.")
    session = {
        "argv": list(argv),
        "started": provenance.timestamp(),
        "versions": provenance.versions(),
        "git": provenance.git_state(),
        "machine": provenance.machine() | {"device": config.device, "threads": torch.get_num_threads()},
    }
    run = fixed | {"status": "running", "sessions": [*sessions, session]}
    write_run(folder, run)
    return run


def describe(config: CorpusConfig, target: Target) -> dict[str, Any]:
    """What fixes a corpus, as run.json holds it; how long it is to be is no part of that."""
    names = ("greedy_share", "temperature", "max_new_tokens", "max_prompt_tokens", "batch", "seed")
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "target": {
            "name": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "weights_hash": target.weights_hash,
            "template_hash": target.template_hash,
        },
        "settings": {name: getattr(config, name) for name in names} | {"kinds": list(config.kinds)},
        "own_prompts": {
            "temperature": PROMPT_TEMPERATURE,
            "top_k": PROMPT_TOP_K,
            "openings": provenance.text_hash(repr(OPENINGS)),
        },
        "chats": None if config.chats is None else provenance.file_hash(config.chats),
        "exclude": sorted(provenance.file_hash(file) for file in config.exclude),
    }


def read_run(folder: Path) -> dict[str, Any]:
    """run.json of a corpus folder. Raises InputError if there is none of this format."""
    path = folder / "run.json"
    try:
        run = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{folder}: no corpus here (no readable run.json).") from None
    if not isinstance(run, dict) or (run.get("format"), run.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise InputError(f"{path}: not the run file of a corpus of format {FORMAT_VERSION}.")
    if not isinstance(run.get("sessions"), list):
        raise InputError(f"{path}: its list of sessions is damaged.")
    return run


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write run.json durably."""
    write_durably(folder / "run.json", json.dumps(run, indent=1, ensure_ascii=False, allow_nan=False).encode())
