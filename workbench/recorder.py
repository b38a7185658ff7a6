"""Record real runs: every prompt by plain decoding and by each drafter, interleaved, a durable part each.

The arms of one turn run back to back on the same prompt, in an order rotated from turn to turn and prompt to prompt, so
that drift of the machine's speed cancels. Later turns of a conversation are asked with plain decoding's answers, the
same for every arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from workbench.decode import Clock, Episode, decode
from workbench.errors import InputError
from workbench.keeping import NOTHING, Keeping, KeptTurn, keep_turn, kept_parts
from workbench.promptfile import Prompt
from workbench.sampling import Sampling, gumbel, processed_logprobs, prompt_key
from workbench.schema import to_table
from workbench.target import Target
from workbench.trace import disk_faults_told, finished_prompts, write_prompt
from workbench.tree import Plan

if TYPE_CHECKING:
    from workbench.drafters.base import Drafter

WARM_UP_TOKENS = 6


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
    """Rows of one finished prompt, what was kept along its text, and the sentences about turns that could not run."""

    steps: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    problems: list[str]
    kept: list[KeptTurn]


def record_prompt(
    target: Target,
    arms: Sequence[Arm],
    prompt: Prompt,
    index: int,
    settings: Settings,
    clock: Clock,
    keeping: Keeping = NOTHING,
    tick: Callable[[], Any] = lambda: None,
) -> PromptRecord:
    """Decode every turn of a prompt by every arm (arm 0: plainly), then keep what is to be kept along plain's text.

    A turn that cannot run ends the prompt.
    """
    record = PromptRecord([], [], [], [])
    if prompt.system is None:
        prompt = replace(prompt, system=settings.system)
    answers: list[str] = []
    for turn in range(len(prompt.turns)):
        try:
            ids, room = render_turn(target, prompt, answers, settings.max_new_tokens)
            order = rotation(len(arms), index + turn)
            episodes = {i: _run(target, arms[i], ids, turn, room, settings.sampling, clock, tick) for i in order}
            kept = keep_turn(target, keeping, ids, episodes[0].tokens, turn)
        except (InputError, torch.OutOfMemoryError) as error:
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
        record.kept.append(kept)
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


def record_all(
    out: Path,
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: Settings,
    say: Callable[[str], Any],
    keeping: Keeping = NOTHING,
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
            found = record_prompt(target, arms, prompt, index, settings, clock, keeping, bar.update)
            for problem in found.problems:
                say(problem)
            with disk_faults_told(out):
                tables = to_table(found.steps, "steps"), to_table(found.episodes, "episodes")
                write_prompt(out, index, *tables, found.problems, kept_parts(index, found.kept))
            bar.update(n_episodes[index] - (bar.n - before))


def warm_up(target: Target, arms: Sequence[Arm], settings: Settings, clock: Clock) -> None:
    """Run a few tokens by each arm, unrecorded, so that compiling and first allocations charge no prompt."""
    ids = target.render([{"role": "user", "content": "Say hello."}])
    room = min(WARM_UP_TOKENS, target.max_context - len(ids))
    for arm in arms if room > 0 else ():
        _run(target, arm, ids, 0, room, settings.sampling, clock, lambda: None)
