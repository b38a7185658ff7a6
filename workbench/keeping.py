"""What a recording keeps along the text of plain decoding, beside the steps: pools of candidates, and features.

The order of things: plain decoding gives the text; one prefill over prompt + text gives the features of every index,
rounded as live features are; the drafters' pools come from those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from workbench.poolrecorder import record_pools
from workbench.pools import DraftPools, Envelope, Text, stack_levels
from workbench.poolstore import WRITING, PoolShape, pool_table
from workbench.sampling import Sampling
from workbench.schema import arrow_schema
from workbench.target import Target
from workbench.trace import Part

if TYPE_CHECKING:
    from workbench.drafters.base import Drafter

LOOKUP = "lookup"  # its pools follow from the tokens
FEATURES_WRITING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "row_group_size": 256,
    "use_dictionary": ["turn", "prompt"],
}


@dataclass(frozen=True)
class Keeping:
    """What to keep: pools of these drafters (by kind) along an envelope, and features."""

    drafters: Mapping[str, Drafter] = field(default_factory=dict)
    envelope: Envelope = Envelope()
    has_features: bool = False

    def described(self) -> dict[str, Any]:
        """run.json's `pools`: of each drafter what all its rows share, and the weights."""
        return {kind: self._described(drafter) for kind, drafter in self.drafters.items()}

    def _described(self, drafter: Any) -> dict[str, Any]:
        kind, k = drafter.kind, drafter.n_slots
        more = {"weights_hash": drafter.weights_hash}
        if kind == LOOKUP:
            return PoolShape(kind, k, 1, False, None).to_dict() | more | {"max_ngram": drafter.max_ngram}
        shape = PoolShape(kind, k, self.envelope.width_of(kind), drafter.has_tiers, self.envelope.plan(kind, k))
        return shape.to_dict() | more


NOTHING = Keeping()


@dataclass(frozen=True)
class KeptTurn:
    """What was kept along one turn's text."""

    turn: int
    prompt_ids: list[int]
    tokens: list[int]
    pools: list[DraftPools]
    features: Tensor | None = None  # [S + L - 1, 3H]
    final: Tensor | None = None  # [S + L - 1, H]


def keep_turn(target: Target, keeping: Keeping, prompt_ids: list[int], tokens: list[int], turn: int) -> KeptTurn:
    """Run the text once through the target and the drafters over all its positions."""
    drafters = [drafter for kind, drafter in keeping.drafters.items() if kind != LOOKUP]
    if not (drafters or keeping.has_features):
        return KeptTurn(turn, prompt_ids, tokens, [])
    text = prompt_ids + tokens[:-1]
    rows = target.session(len(text) + 1, Sampling()).prefill(text)
    pools = [
        record_pools(drafter, keeping.envelope, prompt_ids, tokens, rows.features, rows.final) for drafter in drafters
    ]
    if not keeping.has_features:
        return KeptTurn(turn, prompt_ids, tokens, pools)
    stored = target.feature_dtype or target.dtype
    return KeptTurn(turn, prompt_ids, tokens, pools, rows.features.to(stored).cpu(), rows.final.to(stored).cpu())


def kept_parts(prompt: int, turns: Sequence[KeptTurn]) -> list[Part]:
    """The parts of one prompt: a pools table a drafter, and the features."""
    parts = []
    for same in zip(*(turn.pools for turn in turns)):
        one = same[0]
        levels = stack_levels([pools.levels for pools in same], one.n_slots, one.width)
        pools = DraftPools(one.kind, one.n_slots, one.has_tiers, levels, one.envelope)
        parts.append(Part(f"pools-{one.kind}", pool_table(pools, _text(prompt, turns)), WRITING))
    if turns and turns[0].features is not None:
        parts.append(Part("features", _feature_table(prompt, turns), FEATURES_WRITING))
    return parts


def _text(prompt: int, turns: Sequence[KeptTurn]) -> Text:
    """The turns of one prompt as a text; of its keys the place alone matters here."""
    tokens = [turn.tokens for turn in turns]
    return Text(
        token=np.concatenate([np.asarray(x, np.int32) for x in tokens]),
        offset=np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        prompt=[prompt] * len(turns),
        prompt_id=[""] * len(turns),
        task=[""] * len(turns),
        turn=[turn.turn for turn in turns],
        prompt_tokens=[np.asarray(turn.prompt_ids, np.int32) for turn in turns],
        room=np.array([len(x) for x in tokens], np.int32),
        stop_ids=(),
    )


def _feature_table(prompt: int, turns: Sequence[KeptTurn]) -> pa.Table:
    """One row an index of prompt + text, a turn after the other."""
    n_rows = [len(turn.prompt_ids) + len(turn.tokens) - 1 for turn in turns]
    columns = [
        pa.array(np.full(sum(n_rows), prompt, np.int32)),
        pa.array(np.repeat(np.array([turn.turn for turn in turns], np.int16), n_rows)),
        pa.array(np.concatenate([np.arange(n, dtype=np.int32) for n in n_rows])),
        pa.array([row for turn in turns for row in _rows_of_bytes(turn.features)], pa.binary()),
        pa.array([row for turn in turns for row in _rows_of_bytes(turn.final)], pa.binary()),
    ]
    return pa.Table.from_arrays(columns, schema=arrow_schema("features"))


def _rows_of_bytes(x: Tensor | None) -> list[bytes]:
    """Every row's values, little-endian."""
    assert x is not None
    return [row.tobytes() for row in x.contiguous().view(torch.uint8).numpy()]


def target_hashes(target: Target) -> dict[str, str]:
    """Hashes of what a replay with features needs of the target beside them: its embedding and its head."""
    return {"embed_hash": tensor_hash(target.embed_weight), "head_hash": tensor_hash(target.head_weight)}


def tensor_hash(x: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    content = x.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{content.dtype} {tuple(content.shape)}".encode())
    digest.update(content.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
