"""Fitting a checkpoint to a target: sizes, vocabulary, tapped layers and a carried embedding must be the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from workbench.drafters.base import Drafter
from workbench.drafters.checkpoint import EMBED, Published, hash_weights, load_net
from workbench.drafters.nets import NetConfig
from workbench.errors import InputError


class TargetEmbedding(Protocol):
    """What a drafter of pairs (feature, next token) needs of a target."""

    name: str
    hidden_size: int
    vocab_size: int
    feature_layers: tuple[int, int, int]
    embed_weight: Tensor  # [V, H]


AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)


def fit_drafter(
    make: Callable[[Any, Tensor, Tensor | None, str, str], AnyDrafter],
    published: Published,
    target: TargetEmbedding,
    name: str,
) -> AnyDrafter:
    """The checkpoint on this target, in its embedding's dtype and on its device. InputError if it does not fit."""
    checkpoint, embed = published.checkpoint, target.embed_weight
    config = cast(NetConfig, checkpoint.config)
    layers = tuple(target.feature_layers)
    for what, own, theirs in (
        ("features of width", config.feature_size, 3 * target.hidden_size),
        ("a hidden size of", config.hidden_size, target.hidden_size),
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("features of the layers", published.feature_layers or layers, layers),
    ):
        if own != theirs:
            raise InputError(
                f"The {checkpoint.kind} drafter {name} is made for {what} {own}, {target.name} has {theirs}."
            )
    if published.embed is not None and not _is_close(published.embed, embed):
        raise InputError(
            f"The {checkpoint.kind} drafter {name} carries an '{EMBED}' unlike the embedding of {target.name}."
        )
    assert checkpoint.draft_ids is not None
    is_whole = config.draft_vocab_size == config.vocab_size
    ids = None if is_whole else torch.from_numpy(checkpoint.draft_ids).to(embed.device)
    net = load_net(checkpoint, embed.dtype, embed.device)
    return make(net, embed, ids, name, hash_weights(checkpoint.state, checkpoint.draft_ids))


def _is_close(own: Tensor, embed: Tensor, n_rows: int = 4096) -> bool:
    """Equal up to the rounding of half precision, compared a few rows at a time."""
    for begin in range(0, len(own), n_rows):
        a, b = own[begin : begin + n_rows].float(), embed[begin : begin + n_rows].float().cpu()
        if not torch.allclose(a, b, rtol=1e-2, atol=1e-4):
            return False
    return True
