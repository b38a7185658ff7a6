"""A recording run from its configuration to its folder: what is loaded, what fixes the result, what run.json says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench import provenance
from workbench.drafters import CATALOGUE, load_drafter
from workbench.errors import InputError
from workbench.keeping import Keeping, target_hashes
from workbench.pools import ENVELOPES
from workbench.promptfile import Problem, Prompt, load_prompts
from workbench.recorder import Arm, Settings, record_all
from workbench.sampling import Sampling
from workbench.schema import PLAIN, SCHEMA_VERSION
from workbench.target import Target, load_target
from workbench.trace import FORMAT, begin_run, disk_faults_told, open_trace, refuse_if_taken, write_run
from workbench.tree import check_plan, parse_plan, plan_to_dict

if TYPE_CHECKING:
    from workbench.drafters.base import Drafter


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
    pools: bool = True
    """Record, for every position of the text, what each drafter would offer there, so that any plan can be replayed."""
    envelope: str = "default"
    """How wide the pools are: `default` (10 candidates a slot, 24 and 10 starts, beam 10), `two-blocks` or `small`."""
    features: bool = False
    """Record the target's features for every prompt and committed position, so that drafters can run without it."""
    resume: bool = False
    """Continue the run that stands in the folder."""
    json: bool = False
    """Print one JSON object instead of the table."""

    def settings(self) -> Settings:
        """What fixes the text. Raises InputError on values that make none."""
        for what, value in (("new tokens of a turn", self.max_new_tokens), ("threads", self.threads)):
            if value is not None and value < 1:
                raise InputError(f"The {what} must be at least 1, not {value}.")
        sampling = Sampling(self.temperature, self.top_p, self.top_k, self.seed)
        return Settings(sampling, self.max_new_tokens, self.system)


def record(config: RecordConfig, argv: Sequence[str], say: Callable[[str], Any]) -> list[str]:
    """Record all prompts of a run into `config.out`; returns the sentences about what could not be run.

    `say` is called with each such sentence as it is met. Raises InputError on bad settings, files or disk.
    """
    refuse_if_taken(config.out, config.resume)
    settings = config.settings()
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
    keeping = load_keeping(config, arms)
    run = begin_run(config.out, describe(config, target, arms, prompts, bad_lines, keeping), session)
    record_all(config.out, target, arms, prompts, settings, say, keeping)
    problems = [str(problem) for problem in bad_lines] + open_trace(config.out).problems()
    run["sessions"][-1]["finished"] = provenance.timestamp()
    with disk_faults_told(config.out):
        write_run(config.out, run | {"status": "finished", "problems": problems})
    return problems


def load_keeping(config: RecordConfig, arms: Sequence[Arm]) -> Keeping:
    """What is kept along the text. InputError on an envelope that is not known."""
    if config.envelope not in ENVELOPES:
        raise InputError(f"There is no envelope {config.envelope!r}; there are {', '.join(ENVELOPES)}.")
    drafters = {arm.drafter.kind: arm.drafter for arm in arms if arm.drafter is not None} if config.pools else {}
    return Keeping(drafters, ENVELOPES[config.envelope], config.features)


def device_name(device: str) -> str:
    """The accelerator's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def load_arms(specs: Sequence[str], weights: Sequence[str], target: Target) -> list[Arm]:
    """Plain decoding, then an arm a spec. Raises InputError on an unknown drafter, a plan it cannot serve, a repeat."""
    places = dict(_weights(entry) for entry in weights)
    drafters: dict[str, Drafter] = {}
    arms = [Arm(PLAIN)]
    for spec in split_specs(specs):
        if spec == PLAIN:  # always there
            continue
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
    keeping: Keeping,
) -> dict[str, Any]:
    """What fixes a run's result, as run.json holds it: settings, target, plans with weights, prompts by content."""
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "sampling": asdict(config.settings().sampling),
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
        "envelope": {"name": config.envelope} | asdict(keeping.envelope),
        "pools": keeping.described(),
        "features": target_hashes(target) if keeping.has_features else None,
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
