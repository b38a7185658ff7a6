"""The target: a Hugging Face causal LM that prefills prompts, verifies draft trees and decodes plainly.

A session serves one request. Its cache holds the prompt and every committed token but the last, the *root*; the next
forward starts with the root. Invariant: length = prompt length + n_committed - 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InputError
from workbench.modelload import DTYPES, check_family, check_generation, load_model, model_hash, stop_ids_of
from workbench.network import Cache, Network
from workbench.sampling import Chooser, Sampling
from workbench.tree import Tree, accept, ancestor_mask

PREFILL_CHUNK = 512  # prompt tokens per forward
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prefill:
    """What a prompt of S tokens yields: position 0, and features and final hidden state of every prompt index."""

    token: int
    features: Tensor  # [S, 3H]
    final: Tensor  # [S, H]


@dataclass(frozen=True)
class Verdict:
    """What a verification yields. Rows of `features` and `final`: the root, then the path. Nothing else leaves."""

    path: list[int]  # accepted nodes
    tokens: list[int]  # their tokens
    bonus: int
    features: Tensor  # [n + 1, 3H]
    final: Tensor  # [n + 1, H]


def default_feature_layers(n_layers: int) -> tuple[int, int, int]:
    """Three distinct hidden_states entries: (2, n//2, n-3) from 7 layers on, (1, n//2, n-1) for 4-6, (0, 1, 2) for 3.

    Entry i is the stream entering layer i (0 = the embedding). Raises InputError below 3 layers.
    Source: EAGLE-3's convention; the small cases, where it collides, are ours.
    """
    if n_layers >= 7:
        return 2, n_layers // 2, n_layers - 3
    if n_layers >= 4:
        return 1, n_layers // 2, n_layers - 1
    if n_layers == 3:
        return 0, 1, 2
    raise InputError(f"A target of {n_layers} layer(s) has no three distinct feature layers; name them explicitly.")


def feature_layers_from(convention: str, ids: Sequence[int]) -> tuple[int, ...]:
    """hidden_states entries of published ids that mean a layer's "input" (EAGLE, vLLM) or its "output" (SpecForge)."""
    shift = {"input": 0, "output": 1}.get(convention)
    if shift is None:
        raise InputError(f"Unknown layer convention {convention!r}; use 'input' or 'output'.")
    return tuple(int(layer) + shift for layer in ids)


def load_target(
    name: str,
    device: str = "cpu",
    dtype: str = "float32",
    feature_dtype: str | None = "float16",
    feature_layers: Sequence[int] | None = None,
) -> Target:
    """Load a target: `smollm2`, a hub name, a directory or a GGUF file. Raises InputError for anything unfit."""
    kind = _dtype(dtype)
    loaded = load_model(name, _device(device), kind)
    return Target(
        Network(loaded.model, is_consumed=True),
        loaded.model,
        loaded.tokenizer,
        name=name,
        weights_hash=loaded.weights_hash,
        feature_dtype=feature_dtype,
        feature_layers=feature_layers,
    )


class Target:
    """The model whose text must be preserved."""

    def __init__(
        self,
        network: Network,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        weights_hash: str,
        feature_dtype: str | torch.dtype | None = "float16",
        feature_layers: Sequence[int] | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ):
        config, generation = model.config, getattr(model, "generation_config", None)
        check_generation(*([generation] if generation is not None else []), _text_options(config))
        self.network, self.tokenizer, self.name, self.weights_hash = network, tokenizer, name, weights_hash
        self.n_layers, self.hidden_size = len(network.layers), int(config.hidden_size)
        self.vocab_size, self.max_context = len(network.head_weight), int(config.max_position_embeddings)
        self.stop_ids = stop_ids_of(generation, config)
        self.dtype, self.device = network.dtype, network.device
        self.feature_dtype = None if feature_dtype is None else _dtype(feature_dtype)
        self.feature_layers = _checked_layers(feature_layers, self.n_layers)
        self.embed_weight, self.head_weight = network.embed_weight, network.head_weight  # [V, H] each
        self.prefill_chunk = prefill_chunk
        template = _template(tokenizer)
        self.template_hash = "none" if template is None else hashlib.sha256(template.encode()).hexdigest()

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = "model",
        feature_dtype: str | torch.dtype | None = "float16",
        feature_layers: Sequence[int] | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Target:
        """A target from a Hugging Face model in memory, which stays usable (its weights may be held twice)."""
        check_family(model.config)
        return cls(
            Network(model.eval()),
            model,
            tokenizer,
            name=name,
            weights_hash=model_hash(model),
            feature_dtype=feature_dtype,
            feature_layers=feature_layers,
            prefill_chunk=prefill_chunk,
        )

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a chat (role and content each; a system prompt is a message), ready for the assistant's answer.

        The model's own chat template is used; without one, contents are joined by blank lines and the prompt ends
        with one. Raises InputError for malformed messages, a template that refuses them, or more than the context.
        """
        tokenizer = self._tokenizer()
        _check_messages(messages)
        if self.template_hash == "none":
            ids = tokenizer.encode("".join(f"{message['content']}\n\n" for message in messages))
        else:
            try:
                ids = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            except Exception as error:  # templates raise their own refusals
                raise InputError(f"The model's chat template refuses these messages: {error}.") from error
        return self.check_prompt([int(token) for token in ids])

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text without any template or special tokens."""
        return [int(token) for token in self._tokenizer().encode(text, add_special_tokens=False)]

    def decode_text(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer().decode(list(ids), skip_special_tokens=True))

    def check_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt as a list; InputError when it is empty, longer than the context or outside the vocabulary."""
        prompt = list(prompt_ids)
        if not prompt:
            raise InputError("The prompt is empty.")
        if len(prompt) > self.max_context:
            raise InputError(
                f"The prompt has {len(prompt)} tokens, more than the target's context of {self.max_context}."
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise InputError(f"The prompt holds token ids outside the target's vocabulary of {self.vocab_size}.")
        return prompt

    def session(self, capacity_tokens: int, sampling: Sampling, turn: int = 0) -> Session:
        """A new request. capacity_tokens: cache rows; prompt + new tokens + the largest draft tree suffice."""
        if capacity_tokens < 1:
            raise InputError(f"A session needs room for at least one token, got {capacity_tokens}.")
        return Session(self, capacity_tokens, sampling, turn)

    def rounded(self, x: Tensor) -> Tensor:
        """x rounded through `feature_dtype`, returned in the target's dtype (float32 where that could not hold it).

        Raises InputError naming the first value that is not finite or outside the dtype's range.
        """
        low = x if self.feature_dtype is None else x.to(self.feature_dtype)
        if not bool(torch.isfinite(low).all()):
            value = x[~torch.isfinite(low)][0].item()
            raise InputError(f"A feature of value {value:g} does not fit {low.dtype}; choose another feature dtype.")
        is_wide = self.dtype in (torch.float32, torch.float64) or self.feature_dtype in (None, self.dtype)
        return low.to(self.dtype if is_wide else torch.float32)

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InputError(f"The target {self.name!r} has no tokenizer.")
        return self.tokenizer


class Session:
    """One request on a target: its cache, its root and its noise."""

    def __init__(self, target: Target, capacity_tokens: int, sampling: Sampling, turn: int):
        self.target, self.sampling, self.turn = target, sampling, turn
        self.cache = Cache(target.network, capacity_tokens)
        self.length = 0  # committed rows of the cache
        self.n_committed = 0  # positions committed
        self.root = -1  # the last committed token
        self._choose: Chooser

    @torch.no_grad()
    def prefill(self, prompt_ids: Sequence[int]) -> Prefill:
        """Run the prompt in chunks and commit position 0."""
        target, prompt = self.target, self.target.check_prompt(prompt_ids)
        if self.length:
            raise RuntimeError("a session serves one prompt: it has been prefilled already")
        self._require(len(prompt))
        self._choose = Chooser(self.sampling, prompt, self.turn)
        ids = torch.tensor(prompt, device=target.device)
        features = torch.empty(len(prompt), 3 * target.hidden_size, dtype=target.dtype, device=target.device)
        final = torch.empty(len(prompt), target.hidden_size, dtype=target.dtype, device=target.device)
        for start in range(0, len(prompt), target.prefill_chunk):
            chunk = ids[start : start + target.prefill_chunk]
            rows = target.network.forward(chunk, self.cache, start, None, None, target.feature_layers)
            assert rows.features is not None
            final[start : start + len(chunk)] = rows.final
            features[start : start + len(chunk)] = rows.features
        self.length = len(prompt)
        token = self._commit(self._choose(target.network.logits(final[-1:])[0], 0))
        return Prefill(token, target.rounded(features), target.rounded(final))

    @torch.no_grad()
    def verify(self, tree: Tree) -> Verdict:
        """Verify a draft tree in one forward over root + nodes; commit the accepted path and the bonus."""
        target, start = self.target, self.length
        rows = self._forward(tree)
        logits = target.network.logits(rows.final)  # [N + 1, V]
        wanted = logits.argmax(-1).tolist() if self.sampling.is_greedy else None

        def token_at(node: int) -> int:
            if wanted is not None:
                return wanted[node + 1]
            depth = int(tree.depth[node]) if node >= 0 else 0
            return self._choose(logits[node + 1], self.n_committed + depth)

        path, bonus = accept(tree, token_at)
        kept = [0, *(node + 1 for node in path)]
        self.cache.keep(start, kept)
        self.length = start + len(kept)
        self.n_committed += len(path)
        self._commit(int(bonus))
        assert rows.features is not None
        index = torch.tensor(kept, device=target.device)
        return Verdict(
            path=[int(node) for node in path],
            tokens=[int(tree.token[node]) for node in path],
            bonus=int(bonus),
            features=target.rounded(rows.features[index]),
            final=target.rounded(rows.final[index]),
        )

    @torch.inference_mode()
    def step(self) -> int:
        """Decode one token plainly: one row, no mask, no features. The loop over this is the speed baseline."""
        network = self.target.network
        self._require(self.length + 1)
        token = torch.tensor([self.root], device=self.target.device)
        rows = network.forward(token, self.cache, self.length, None, None, ())
        self.length += 1
        return self._commit(self._choose(network.logits(rows.final)[0], self.n_committed))

    def _forward(self, tree: Tree) -> Any:
        """Root and nodes in one forward, written behind the committed rows."""
        target, n_nodes = self.target, len(tree.token)
        self._require(self.length + 1 + n_nodes, n_nodes)
        tokens = torch.tensor([self.root, *map(int, tree.token)], device=target.device)
        depths = visible = None
        if n_nodes:
            depths = torch.tensor([0, *map(int, tree.depth)], device=target.device)
            visible = torch.as_tensor(ancestor_mask(tree.parent), device=target.device)
        return target.network.forward(tokens, self.cache, self.length, depths, visible, target.feature_layers)

    def _commit(self, token: int) -> int:
        self.root = token
        self.n_committed += 1
        return token

    def _require(self, n_rows: int, n_nodes: int = 0) -> None:
        """Room for `n_rows` cache rows, the last `n_nodes` of them drafted, and the context for the committed ones."""
        if n_rows - n_nodes > self.target.max_context:
            raise InputError(
                f"The text has reached the target's context of {self.target.max_context} tokens;"
                " ask for fewer new tokens."
            )
        if n_rows > self.cache.capacity:
            raise InputError(
                f"The session holds {self.cache.capacity} tokens and {n_rows} are needed ({n_nodes} of them drafted);"
                " give it room for prompt + new tokens + the largest draft tree."
            )


def _checked_layers(ids: Sequence[int] | None, n_layers: int) -> tuple[int, int, int]:
    """Three hidden_states entries in 0..n_layers-1, distinct where the target has three layers or more."""
    if ids is None:
        return default_feature_layers(n_layers)
    layers = tuple(int(layer) for layer in ids)
    if len(layers) != 3 or min(layers) < 0 or max(layers) >= n_layers:
        raise InputError(
            f"Feature layers must be three ids in 0..{n_layers - 1} (inputs of layers), got {list(layers)}."
        )
    if n_layers >= 3 and len(set(layers)) < 3:
        raise InputError(f"Feature layers must be distinct, got {list(layers)}.")
    return layers[0], layers[1], layers[2]


def _text_options(config: Any) -> dict[str, Any]:
    """Generation options that older models keep in their config."""
    options = config.to_dict()
    names = "repetition_penalty no_repeat_ngram_size bad_words_ids min_length typical_p suppress_tokens"
    names += " begin_suppress_tokens forced_bos_token_id forced_eos_token_id sequence_bias num_beams"
    return {name: options[name] for name in names.split() if name in options}


def _template(tokenizer: Any) -> str | None:
    """The tokenizer's chat template as text (several named ones: all of them), or None."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None or isinstance(template, str):
        return template or None
    return json.dumps(template, sort_keys=True)


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise InputError("The chat has no messages.")
    for i, message in enumerate(messages):
        if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
            raise InputError(f"Message {i + 1} needs a role of {', '.join(_ROLES)} and a text content.")


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise InputError(f"Unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _device(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"Unknown device {device!r}.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InputError("Device 'cuda' was asked for, but this machine offers none to PyTorch.")
    return found
