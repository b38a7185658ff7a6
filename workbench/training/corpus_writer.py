"""Training text written by the target itself: its own prompts or those of given chats, and its own answers.

A part depends on the settings, its number and the parts before it alone, so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from workbench import provenance
from workbench.errors import InputError
from workbench.promptfile import Prompt
from workbench.target import Target, load_target
from workbench.trace import disk_faults_told, first_difference
from workbench.training.corpus_files import (
    FORMAT,
    FORMAT_VERSION,
    count_parts,
    read_rows,
    read_run,
    refuse_if_taken,
    summarise,
    write_part,
    write_run,
)
from workbench.training.corpus_text import (
    PROMPT_TEMPERATURE,
    PROMPT_TOP_K,
    CorpusConfig,
    CorpusWriter,
    check_config,
    excluded_turns,
    strict_prompts,
)
from workbench.training.openings import OPENINGS

MAX_EMPTY_PARTS = 4  # parts in a row without a usable answer, after which own prompts are given up
DEFAULT_ANSWERS = 1000


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
