"""Record real runs: every prompt by plain decoding and by each drafter, interleaved, a durable part each.

The arms of one turn run back to back on the same prompt, in an order rotated from turn to turn and prompt to prompt, so
that drift of the machine's speed cancels. Later turns of a conversation are asked with plain decoding's answers, the
same for every arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from workbench import provenance
from workbench.decode import Clock, Episode, decode
from workbench.drafters import CATALOGUE, load_drafter
from workbench.errors import InputError
from workbench.promptfile import Problem, Prompt, load_prompts
from workbench.sampling import Sampling, gumbel, processed_logprobs, prompt_key
from workbench.schema import PLAIN, SCHEMA_VERSION, to_table
from workbench.target import Target, load_target
from workbench.trace import (
    FORMAT,
    begin_run,
    disk_faults_told,
    finished_prompts,
    open_trace,
    refuse_if_taken,
    write_prompt,
    write_run,
)
from workbench.tree import Plan, check_plan, parse_plan, plan_to_dict

if TYPE_CHECKING:
    from workbench.drafters.base import Drafter

WARM_UP_TOKENS = 6


@dataclass(frozen=True)
class RecordConfig:
    """Decode prompts with a target, plainly and with each drafter, and record every step."""

    out: Path
    """Folder of the trace; must be new or empty, unless resumed."""
    target: str = "smollm2"
    """Target model: `smollm2` (embedded), a hub name, a local folder or a GGUF file."""
    device: str = "cpu"
    """Where the models run: `cpu`, `cuda`, `cuda:1`, ..."""
    dtype: str = "float32"
    """Number type of the target: `float32`, `bfloat16`, `float16` or `float64`."""
    threads: int | None = None
    """Threads of the CPU's matrix products; the library's own choice if not given."""
    prompts: Path | None = None
    """Prompt file; the built-in prompts if not given."""
    tasks: tuple[str, ...] = ()
    """Only these task families."""
    limit: int | None = None
    """At most so many prompts, taken in turn from the tasks."""
    limit_per_task: int | None = None
    """At most so many prompts of each task."""
    drafters: tuple[str, ...] = CATALOGUE
    """Drafters or plans, separated by spaces or commas: `specblock`, `eagle3:budget=59`, `medusa-chain`, ..."""
    weights: tuple[str, ...] = ()
    """Drafter checkpoints to load instead of the shipped ones, as NAME=FOLDER."""
    max_new_tokens: int = 128
    """Tokens to generate for each turn, unless a stop id comes first."""
    temperature: float = 0.0
    """0 is greedy; above 0 samples, with noise keyed to the position."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities add up to this."""
    top_k: int = 0
    """Keep the so many most probable tokens; 0 keeps all."""
    seed: int = 0
    """Seed of the sampling noise."""
    system: str | None = None
    """System prompt for prompts that bring none."""
    resume: bool = False
    """Continue the run that stands in the folder."""
    json: bool = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class Arm:
    """One way to decode: a drafter under a plan, or plain decoding (both None). Its place in a list is its plan id."""

    policy: str
    drafter: Drafter | None = None
    plan: Plan | None = None

    @property
    def drafter_name(self) -> str:
        """The drafter's catalogue name, `none` for plain decoding."""
        return "none" if self.drafter is None else self.drafter.kind


@dataclass(frozen=True)
class Settings:
    """What fixes the text of a recording, the target and the prompts excepted."""

    sampling: Sampling
    max_new_tokens: int
    system: str | None = None


@dataclass
class DeviceClock:
    """Milliseconds since the clock was made, read once the device has finished its queue."""

    device: str

    def now(self) -> float:
        """Wait for the device, then read the monotonic clock."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        return perf_counter() * 1e3


@dataclass(frozen=True)
class PromptRecord:
    """Rows of one finished prompt and the sentences about turns that could not be run."""

    steps: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    problems: list[str]


def record_prompt(
    target: Target,
    arms: Sequence[Arm],
    prompt: Prompt,
    index: int,
    settings: Settings,
    clock: Clock,
    tick: Callable[[], Any] = lambda: None,
) -> PromptRecord:
    """Decode every turn of a prompt by every arm (arm 0 is plain decoding). A turn that cannot run ends the prompt."""
    record = PromptRecord([], [], [])
    if prompt.system is None:
        prompt = replace(prompt, system=settings.system)
    answers: list[str] = []
    for turn in range(len(prompt.turns)):
        try:
            ids, room = render_turn(target, prompt, answers, settings.max_new_tokens)
            order = rotation(len(arms), index + turn)
            episodes = {i: _run(target, arms[i], ids, turn, room, settings.sampling, clock, tick) for i in order}
        except InputError as error:
            record.problems.append(f"{prompt.file}:{prompt.line}: prompt {prompt.id!r}, turn {turn + 1}: {error}")
            break
        keys = {"prompt": index, "prompt_id": prompt.id, "task": prompt.task, "turn": turn}
        about = {"source": f"{prompt.file}:{prompt.line}", "sample_seed": settings.sampling.seed, "prompt_tokens": ids}
        for i, arm in enumerate(arms):
            arm_keys = keys | {"policy": arm.policy, "drafter": arm.drafter_name, "plan": i}
            episode = episodes[i]
            record.steps.extend(arm_keys | row for row in episode.steps)
            parted = divergence(target, ids, episodes[0].tokens, episode.tokens, settings.sampling, turn)
            limit = "length" if room == settings.max_new_tokens else "context"
            row = _episode_row(target, episode, limit) | parted
            record.episodes.append(arm_keys | about | {"order": order.index(i)} | row)
        answers.append(answer_text(target, episodes[0]))
    return record


def divergence(
    target: Target, ids: Sequence[int], plain: list[int], tokens: list[int], sampling: Sampling, turn: int
) -> dict[str, Any]:
    """Where a text leaves plain decoding's and by what gap of the target's scores; both None where it does not."""
    position = next((i for i, (a, b) in enumerate(zip(plain, tokens)) if a != b), None)
    if position is None:
        return {"divergence": None, "divergence_gap": None}
    scores = next_logits(target, [*ids, *plain[:position]]).double()  # [V]
    if not sampling.is_greedy:
        noise = gumbel(sampling.seed, prompt_key(ids), turn, position, len(scores), scores.device)
        scores = processed_logprobs(scores, sampling) + noise
    gap = abs(float(scores[plain[position]] - scores[tokens[position]]))
    return {"divergence": position, "divergence_gap": gap}


@torch.inference_mode()
def next_logits(target: Target, context: Sequence[int]) -> torch.Tensor:
    """The target's logits [V] after `context` (two tokens or more), the last of them run alone as in plain decoding."""
    session = target.session(len(context), Sampling())
    session.prefill(context[:-1])
    last = torch.tensor([context[-1]], device=target.device)
    rows = target.network.forward(last, session.cache, session.length, None, None, ())
    return target.network.logits(rows.final)[0]


def rotation(n: int, shift: int) -> list[int]:
    """0 … n − 1, begun at `shift` modulo n."""
    return [(shift + i) % n for i in range(n)]


def render_turn(target: Target, prompt: Prompt, answers: Sequence[str], max_new_tokens: int) -> tuple[list[int], int]:
    """Token ids of a turn and the tokens that may follow; `InputError` where the context has no room for one."""
    ids = target.render(prompt.messages(answers))
    room = min(max_new_tokens, target.max_context - len(ids))
    if room < 1:
        raise InputError(f"{len(ids)} tokens are too long for the target's context of {target.max_context}.")
    return ids, room


def _run(
    target: Target, arm: Arm, ids: list[int], turn: int, room: int, sampling: Sampling, clock: Clock, tick: Callable
) -> Episode:
    episode = decode(
        target,
        arm.drafter,
        arm.plan,
        ids,
        sampling=sampling,
        turn=turn,
        max_new_tokens=room,
        stop_ids=target.stop_ids,
        clock=clock,
    )
    tick()
    return episode


def answer_text(target: Target, episode: Episode) -> str:
    """The text of an answer, its stop id excluded."""
    return target.decode_text(episode.tokens[:-1] if episode.is_stopped else episode.tokens)


def _episode_row(target: Target, episode: Episode, limit: str) -> dict[str, Any]:
    times = ("drafter_ms", "verification_ms", "other_ms")
    return {
        "tokens": episode.tokens,
        "text": answer_text(target, episode),
        "n_steps": len(episode.steps),
        "stop_reason": "stop" if episode.is_stopped else limit,
        "prefill_ms": episode.prefill_ms,
        "drafter_prefill_ms": episode.drafter_prefill_ms,
        "decode_ms": sum(row[name] for row in episode.steps for name in times),
    }


# ------------------------------------------------------------------------------------------------ the whole run


def record(config: RecordConfig, argv: Sequence[str], say: Callable[[str], Any]) -> list[str]:
    """Record all prompts of a run into `config.out`; returns the sentences about what could not be run.

    `say` is called with each such sentence as it is met. Raises InputError on bad settings, files or disk.
    """
    refuse_if_taken(config.out, config.resume)
    settings = Settings(
        Sampling(config.temperature, config.top_p, config.top_k, config.seed), config.max_new_tokens, config.system
    )
    for what, value in (("new tokens of a turn", config.max_new_tokens), ("threads", config.threads)):
        if value is not None and value < 1:
            raise InputError(f"The {what} must be at least 1, not {value}.")
    prompts, bad_lines = load_prompts(config.prompts, config.tasks, config.limit, config.limit_per_task)
    for problem in bad_lines:
        say(str(problem))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_target(config.target, config.device, config.dtype)
    arms = load_arms(config.drafters, config.weights, target)
    session = {
        "argv": list(argv),
        "started": provenance.timestamp(),
        "versions": provenance.versions(),
        "git": provenance.git_state(),
        "machine": provenance.machine() | {"device": device_name(config.device)},
    }
    run = begin_run(config.out, describe(config, target, arms, prompts, bad_lines), session)
    record_all(config.out, target, arms, prompts, settings, say)
    problems = [str(problem) for problem in bad_lines] + open_trace(config.out).problems()
    run["sessions"][-1]["finished"] = provenance.timestamp()
    with disk_faults_told(config.out):
        write_run(config.out, run | {"status": "finished", "problems": problems})
    return problems


def record_all(
    out: Path,
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: Settings,
    say: Callable[[str], Any],
) -> None:
    """Record every prompt that is not finished yet, each durable before the next begins."""
    done = set(finished_prompts(out))
    n_episodes = [len(prompt.turns) * len(arms) for prompt in prompts]
    clock = DeviceClock(str(target.device))
    if len(done) < len(prompts):
        warm_up(target, arms, settings, clock)
    with tqdm(total=sum(n_episodes), initial=sum(n_episodes[i] for i in done), unit="episode") as bar:
        for index, prompt in enumerate(prompts):
            if index in done:
                continue
            bar.set_postfix_str(f"{prompt.task} {prompt.id}")
            before = bar.n
            found = record_prompt(target, arms, prompt, index, settings, clock, bar.update)
            for problem in found.problems:
                say(problem)
            with disk_faults_told(out):
                write_prompt(
                    out, index, to_table(found.steps, "steps"), to_table(found.episodes, "episodes"), found.problems
                )
            bar.update(n_episodes[index] - (bar.n - before))


def warm_up(target: Target, arms: Sequence[Arm], settings: Settings, clock: Clock) -> None:
    """Run a few tokens by each arm, unrecorded, so that compiling and first allocations charge no prompt."""
    ids = target.render([{"role": "user", "content": "Say hello."}])
    room = min(WARM_UP_TOKENS, target.max_context - len(ids))
    for arm in arms if room > 0 else ():
        _run(target, arm, ids, 0, room, settings.sampling, clock, lambda: None)


def device_name(device: str) -> str:
    """The accelerator's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def load_arms(specs: Sequence[str], weights: Sequence[str], target: Target) -> list[Arm]:
    """Plain decoding, then an arm a spec. Raises InputError on an unknown drafter, a plan it cannot serve, a repeat."""
    places = dict(_weights(entry) for entry in weights)
    drafters: dict[str, Drafter] = {}
    arms = [Arm(PLAIN)]
    for spec in split_specs(specs):
        if any(arm.policy == spec for arm in arms):
            raise InputError(f"The drafter {spec!r} is listed twice.")
        name, plan = parse_plan(spec)
        if name not in drafters:
            drafters[name] = load_drafter(places.get(name, name), target)
        drafter = drafters[name]
        check_plan(plan, drafter.kind, drafter.n_slots, drafter.max_width, drafter.n_levels)
        arms.append(Arm(spec, drafter, plan))
    unused = [name for name in places if name not in drafters]
    if unused:
        raise InputError(f"Weights are given for {unused[0]!r}, which is not among the drafters.")
    return arms


def _weights(entry: str) -> tuple[str, str]:
    name, mark, place = entry.partition("=")
    if not mark or not name or not place:
        raise InputError(f"Weights are given as NAME=FOLDER, not {entry!r}.")
    return name, place


def split_specs(specs: Sequence[str]) -> list[str]:
    """Specs separated by commas or given apart; a comma inside a spec's options (`a:x=1,y=2`) does not separate."""
    found: list[str] = []
    for piece in ",".join(specs).split(","):
        is_option = "=" in piece and ":" not in piece.partition("=")[0]
        if is_option and found:
            found[-1] += "," + piece.strip()
        elif piece.strip():
            found.append(piece.strip())
    return found


def describe(
    config: RecordConfig,
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    bad_lines: Sequence[Problem],
) -> dict[str, Any]:
    """What fixes a run's result, as run.json holds it: settings, target, plans with weights, prompts by content."""
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "sampling": asdict(Sampling(config.temperature, config.top_p, config.top_k, config.seed)),
        "max_new_tokens": config.max_new_tokens,
        "system": config.system,
        "threads": torch.get_num_threads(),
        "target": {
            "name": target.name,
            "device": str(target.device),
            "dtype": _plain_dtype(target.dtype),
            "feature_dtype": _plain_dtype(target.feature_dtype),
            "feature_layers": list(target.feature_layers),
            "n_layers": target.n_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "max_context": target.max_context,
            "stop_ids": list(target.stop_ids),
            "weights_hash": target.weights_hash,
            "template_hash": target.template_hash,
        },
        "plans": [
            {
                "policy": arm.policy,
                "drafter": arm.drafter_name,
                "plan": None if arm.plan is None else plan_to_dict(arm.plan),
                "weights_hash": None if arm.drafter is None else arm.drafter.weights_hash,
            }
            for arm in arms
        ],
        "prompts": {
            "file": "built in" if config.prompts is None else config.prompts.name,
            "n": len(prompts),
            "n_bad_lines": len(bad_lines),
            "tasks": sorted({prompt.task for prompt in prompts}),
            "hash": provenance.text_hash(repr([(p.id, p.task, p.turns, p.system) for p in prompts])),
        },
    }


def _plain_dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
