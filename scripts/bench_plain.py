"""Plain decoding against `transformers` generate, side by side: greedy, same weights, dtype, threads and token counts.

Rounds are interleaved (each round: every prompt with the one, then with the other, the order swapping from round to
round), so that whatever else the machine does falls on both. Reported: the median over rounds, and their ratio.

    python scripts/bench_plain.py --new-tokens 64 --rounds 5 --json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
import tyro

from workbench.errors import InputError
from workbench.modelload import DTYPES, find_source, quiet_library
from workbench.sampling import Sampling
from workbench.target import Target, load_target

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and show how to call it.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey, and what is its speed over 246 km?",
)


@dataclass(frozen=True)
class Config:
    """What to time."""

    target: str = "smollm2"
    device: str = "cpu"
    dtype: str = "float32"
    new_tokens: int = 64  # tokens each side generates for each prompt; stop ids are ignored on both sides
    rounds: int = 5  # timed rounds, after one that is not
    threads: int = 0  # threads of PyTorch; 0 leaves its default
    json: bool = False  # print JSON only


def plain(target: Target, prompt: list[int], n_new: int) -> list[int]:
    """Our plain loop: n_new greedy tokens."""
    session = target.session(len(prompt) + n_new, Sampling())
    tokens = [session.prefill(prompt).token]
    while len(tokens) < n_new:
        tokens.append(session.step())
    return tokens


def generate(model: Any, prompt: list[int], n_new: int) -> list[int]:
    """The library's greedy generate: n_new tokens."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n_new)
    return [int(token) for token in out[0, len(prompt) :]]


def reference_model(config: Config) -> Any:
    """The same weights in the library's own model, its stop ids and sampling defaults removed."""
    with quiet_library():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            find_source(config.target), dtype=DTYPES[config.dtype], attn_implementation="sdpa"
        )
    model = model.to(config.device).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def timed(run: Any, prompts: list[list[int]], n_new: int, device: str) -> tuple[float, list[list[int]]]:
    """Milliseconds per new token over all prompts (prefill included), and the texts."""
    _wait(device)
    begin = time.perf_counter()
    texts = [run(prompt, n_new) for prompt in prompts]
    _wait(device)
    return (time.perf_counter() - begin) * 1e3 / (n_new * len(prompts)), texts


def compare(config: Config) -> dict[str, Any]:
    """Time both sides and return the table's fields."""
    if config.new_tokens < 1 or config.rounds < 1:
        raise InputError("new_tokens and rounds must be at least 1.")
    if config.threads:
        torch.set_num_threads(config.threads)
    target = load_target(config.target, config.device, config.dtype)
    model = reference_model(config)
    prompts = [target.render([{"role": "user", "content": text}]) for text in PROMPTS]
    sides = {"plain": lambda p, n: plain(target, p, n), "generate": lambda p, n: generate(model, p, n)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[list[int]]] = {}
    for i in range(config.rounds + 1):
        for name in sorted(sides, reverse=i % 2 == 0):
            ms, texts[name] = timed(sides[name], prompts, config.new_tokens, config.device)
            times[name] += [ms] if i else []  # round 0 warms up
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "plain_ms_per_token": medians["plain"],
        "generate_ms_per_token": medians["generate"],
        "plain_speed_over_generate": medians["generate"] / medians["plain"],
        "ratio_by_round": [b / a for a, b in zip(times["plain"], times["generate"])],
        "n_equal_texts": sum(a == b for a, b in zip(texts["plain"], texts["generate"])),
        "n_texts": len(prompts),
        "n_threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": asdict(config),
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> int:
    """Parse, compare, print."""
    config = tyro.cli(Config, description=__doc__)
    try:
        found = compare(config)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if config.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"plain decoding      {found['plain_ms_per_token']:8.2f} ms per token")
    print(f"transformers        {found['generate_ms_per_token']:8.2f} ms per token")
    print(f"plain is {found['plain_speed_over_generate']:.2f} times as fast (medians of {config.rounds} rounds)")
    print(f"equal texts: {found['n_equal_texts']} of {found['n_texts']}; threads: {found['n_threads']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
