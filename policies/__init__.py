"""The catalogue of policies, and the words that name them. A new policy is a file here and a line in `CATALOGUE`.

specblock:blocks=2,budget=60                  a plan (see tree.parse_plan): one arm, always
stop:mass=0.3,arm=eagle3:budget=59            a plan that stops deepening (depth_stop)
tree:drafter=medusa,budget=63                 the tree that the trace's own ranks favour (static_trees.medusa_tree)
sequoia:drafter=medusa,budget=63,depth=4      Sequoia's programme on the same ranks
ucb:c=0.2,arms=specblock+eagle3:budget=59+lookup      a bandit; arms come last and are joined by +
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.depth_stop import DepthStopPlan
from policies.discounted_ucb import DiscountedUcb
from policies.epsilon_greedy import EpsilonGreedy
from policies.fixed import Fixed
from policies.static_trees import medusa_tree, sequoia_tree
from policies.thompson import Thompson
from policies.ucb import Ucb
from workbench.errors import InputError
from workbench.policy import Arm, Policy
from workbench.tree import DRAFTER_PLAN_KINDS, parse_plan, plan_from_dict

Ranks = Callable[[str], NDArray[np.float64]]  # drafter -> [K, W], how often each rank of each slot is the text's token
MAX_POLICY_BYTES = 1 << 20
_JOIN = "+"


@dataclass(frozen=True)
class _Bandit:
    """A policy over several arms: its class and its own options, each with the range it must lie in."""

    make: Callable[..., Policy]
    options: Mapping[str, tuple[float, float]]


CATALOGUE: dict[str, _Bandit] = {
    "egreedy": _Bandit(EpsilonGreedy, {"epsilon": (0.0, 1.0)}),
    "ucb": _Bandit(Ucb, {"c": (0.0, 1e6)}),
    "ducb": _Bandit(DiscountedUcb, {"c": (0.0, 1e6), "discount": (0.5, 1.0)}),
    "thompson": _Bandit(Thompson, {}),
}


def parse_policy(spec: str, ranks: Ranks | None = None) -> Policy:
    """A policy from its words. `ranks` serves the trees that are chosen from a trace. InputError on what is unknown."""
    name, _, text = (piece.strip() for piece in spec.partition(":"))
    if name not in CATALOGUE:
        return Fixed(parse_arm(spec, ranks))
    words, mark, arms = text.partition("arms=")
    if not mark:
        raise InputError(f"policy {name}: name its arms, as in {name}:arms=specblock{_JOIN}lookup")
    options = _options(name, words.strip().rstrip(","), tuple(CATALOGUE[name].options))
    return _bandit(name, options, [parse_arm(arm, ranks) for arm in arms.split(_JOIN)])


def parse_arm(spec: str, ranks: Ranks | None = None) -> Arm:
    """An arm from its words."""
    spec = spec.strip()
    name, _, text = (piece.strip() for piece in spec.partition(":"))
    if name == "stop":
        words, mark, inner = text.partition("arm=")
        options = _options(name, words.strip().rstrip(","), ("mass",))
        if not mark or "mass" not in options:
            raise InputError("stop: give mass and, last, the arm, as in stop:mass=0.3,arm=eagle3")
        arm = parse_arm(inner, ranks)
        return Arm(spec, arm.drafter, DepthStopPlan(arm.plan, _number(name, "mass", options["mass"], 0.0, 1e6)))
    if name in ("tree", "sequoia"):
        return _chosen_tree(spec, name, text, ranks)
    drafter, plan = parse_plan(spec)
    return Arm(spec, drafter, plan)


def _chosen_tree(spec: str, name: str, text: str, ranks: Ranks | None) -> Arm:
    options = _options(name, text, ("drafter", "budget") + ("depth",) * (name == "sequoia"))
    drafter = options.get("drafter", "medusa")
    if "static" not in DRAFTER_PLAN_KINDS.get(drafter, ()):
        raise InputError(f"{name}: a tree of ranks does not fit the drafter {drafter!r}")
    if ranks is None:
        raise InputError(f"{name}: this tree is chosen from a trace's ranks, and there is no trace here")
    by_slot = ranks(drafter)
    budget = int(_number(name, "budget", options.get("budget", "63"), 1, 1000))
    if name == "tree":
        return Arm(spec, drafter, medusa_tree(by_slot, budget))
    depth = int(_number(name, "depth", options.get("depth", str(len(by_slot))), 1, len(by_slot)))
    return Arm(spec, drafter, sequoia_tree(by_slot.mean(axis=0), budget, depth))


def _options(name: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    out: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, mark, value = (piece.strip() for piece in part.partition("="))
        if not mark or key not in known:
            raise InputError(f"{name}: no option {key!r}; there are {', '.join(known) or 'none'}")
        if key in out:
            raise InputError(f"{name}: the option {key!r} stands twice")
        out[key] = value
    return out


def _number(name: str, key: str, value: Any, least: float, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not least <= number <= most or isinstance(value, bool):
        raise InputError(f"{name}: {key} must be a number from {least:g} to {most:g}, not {value!r}")
    return number


def _bandit(name: str, options: Mapping[str, Any], arms: list[Arm]) -> Policy:
    names = [arm.name for arm in arms]
    if len(set(names)) < max(2, len(names)):
        raise InputError(f"policy {name}: it chooses among at least 2 different arms, not {', '.join(names)}")
    kind = CATALOGUE[name]
    given = {key: _number(name, key, value, *kind.options[key]) for key, value in options.items()}
    return kind.make(tuple(arms), **given)


# ------------------------------------------------------------------------------------------------ from JSON


def read_policies(path: Path, ranks: Ranks | None = None) -> list[tuple[str, Policy]]:
    """Named policies of a JSON file: a list (or one) of specs, arms or bandits. InputError on anything else.

    An arm is {"drafter": ..., "plan": {"kind": ...}}, a bandit {"policy": "ucb", "c": 0.2, "arms": [...]}, both with
    an optional "name".
    """
    try:
        if path.stat().st_size > MAX_POLICY_BYTES:
            raise InputError(f"{path}: larger than {MAX_POLICY_BYTES >> 20} MiB; this is no policy file.")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON.") from error
    entries = found if isinstance(found, list) else [found]
    return [_from_json(entry, f"{path.stem}-{i + 1}", ranks) for i, entry in enumerate(entries)]


def _from_json(entry: Any, name: str, ranks: Ranks | None) -> tuple[str, Policy]:
    if isinstance(entry, str):
        return entry, parse_policy(entry, ranks)
    if not isinstance(entry, dict):
        raise InputError(f"a policy is a spec or an object, not {str(entry)[:80]}")
    entry = dict(entry)
    name = str(entry.pop("name", name))
    kind = entry.pop("policy", None)
    if kind is None:
        return name, Fixed(_arm_from_json(entry, name, ranks))
    if kind not in tuple(CATALOGUE):
        raise InputError(f"no policy {str(kind)[:80]!r}; there are {', '.join(CATALOGUE)}")
    arms = entry.pop("arms", None)
    if not isinstance(arms, list):
        raise InputError(f"policy {kind}: arms must be a list")
    if odd := sorted(set(entry) - set(CATALOGUE[kind].options)):
        raise InputError(f"{kind}: no option {odd[0]!r}; there are {', '.join(CATALOGUE[kind].options) or 'none'}")
    return name, _bandit(kind, entry, [_arm_from_json(arm, f"arm {i + 1}", ranks) for i, arm in enumerate(arms)])


def _arm_from_json(entry: Any, name: str, ranks: Ranks | None) -> Arm:
    if isinstance(entry, str):
        return parse_arm(entry, ranks)
    if not isinstance(entry, dict) or not {"drafter", "plan"} <= set(entry) <= {"drafter", "plan", "name"}:
        raise InputError("an arm is a spec or an object with drafter and plan")
    if entry["drafter"] not in tuple(DRAFTER_PLAN_KINDS):
        raise InputError(f"no drafter {str(entry['drafter'])[:80]!r}; there are {', '.join(DRAFTER_PLAN_KINDS)}")
    return Arm(str(entry.get("name", name)), entry["drafter"], plan_from_dict(entry["plan"]))
