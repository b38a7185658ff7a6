"""Tiny random targets in float64, where equality holds. One thread, so that sums keep their order."""

from __future__ import annotations

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network for a model

from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch import nn

from workbench.target import Target
from workbench.tree import Tree, depths

torch.set_num_threads(1)

CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class TinyTokenizer:
    """One token a byte, modulo the vocabulary; a chat template that is plain string formatting."""

    def __init__(self, vocab_size: int, has_template: bool = True):
        self.vocab_size = vocab_size
        self.chat_template = TEMPLATE if has_template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(33 + token % 90) for token in ids)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        return_dict: bool = False,
    ) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return self.encode(text + "<assistant>" * add_generation_prompt)


def tiny_model(
    family: str = "llama",
    n_layers: int = 4,
    vocab_size: int = 64,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    is_exact: bool = True,
    sharpness: float = 1.0,
    **overrides: Any,
) -> Any:
    """A random Hugging Face model (hidden 32, 4 heads, 2 key-value heads). Equal arguments give equal weights.

    is_exact: RMS norms compute in the model's dtype; the library's compute in float32 even in a float64 model, and
    nothing could then agree to 1e-9. sharpness scales the head, hence the logits.
    """
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    config = getattr(transformers, CONFIGS[family])(**{**settings, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # not the ones and zeros that would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if model.lm_head.weight is not model.model.embed_tokens.weight:
            model.lm_head.weight.mul_(sharpness)
    if is_exact:
        make_exact(model)
    return model


def make_exact(model: Any) -> None:
    """Let a model's RMS norms compute in the model's own dtype."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if isinstance(module, nn.Module) and type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(forward, module)


def tiny_target(
    feature_dtype: str | None = None, prefill_chunk: int = 512, has_template: bool = True, **model: Any
) -> Target:
    """A target around `tiny_model(**model)`, with a byte tokenizer; features unrounded unless asked."""
    made = tiny_model(**model)
    return Target.from_model(
        made,
        TinyTokenizer(made.config.vocab_size, has_template),
        name="tiny",
        feature_dtype=feature_dtype,
        prefill_chunk=prefill_chunk,
    )


def tree_from(parent: Sequence[int], token: Sequence[int]) -> Tree:
    """A tree of given parents and tokens (log-probabilities and creation fields zero)."""
    parents = np.array(parent, np.int32).reshape(len(parent))
    small = np.zeros(len(parents), np.int16)
    return Tree(
        token=np.array(token, np.int32).reshape(len(parent)),
        parent=parents,
        depth=depths(parents),
        cum=np.zeros(len(parents), np.int32),
        level=small,
        start=small,
        slot=small,
        rank=small + 1,
    )


def random_tree(rng: np.random.Generator, n_nodes: int, vocab_size: int, text: Sequence[int] = ()) -> Tree:
    """A random tree whose siblings differ; part of `text` (the true continuation) likely stands in it as a path."""
    place: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tip, left = -1, list(text[: int(rng.integers(0, len(text) + 1))])
    while len(place) < n_nodes:
        is_true = bool(left) and rng.random() < 0.5
        key = (tip, left.pop(0)) if is_true else (int(rng.integers(-1, len(place))), int(rng.integers(vocab_size)))
        node = place.setdefault(key, len(place))
        tip = node if is_true else tip
    return tree_from([parent for parent, _ in place], [token for _, token in place])


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """`tiny_model`, as a fixture."""
    return tiny_model


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """`tiny_target`, as a fixture."""
    return tiny_target


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator of its own for each test."""
    return np.random.default_rng(0)


# ---------------------------------------------------------------------------------------- a target on disk

VOCAB = 32
STOP = 5
HIDDEN = 32


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 32 words with a word tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model(vocab_size=VOCAB, dtype=torch.float32, sharpness=2.0, eos_token_id=STOP, is_exact=False)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.decoder = tokenizers.decoders.WordPiece(prefix="##")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"w{STOP}", unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"question_id": i, "category": "ab"[i % 2], "turns": [f"w{i} w{i + 7} w9"] + ["w20 w21"] * (i % 3 == 0)}
        for i in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path
