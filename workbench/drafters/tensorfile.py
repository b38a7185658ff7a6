"""Reading tensor files from strangers: what a file claims is checked before anything is allocated for it."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench.errors import InputError

MAX_JSON_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20  # a drafter has some thirty tensors; their header is a few kilobytes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 1 MiB. Raises InputError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InputError(f"{path} is larger than {MAX_JSON_BYTES} bytes; no configuration is.")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return found


Place = tuple[Any, ...]


def _place(tensor: Tensor) -> Place:
    """Where a tensor lies and how it is read; equal for names that share one."""
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class TensorFile:
    """Names, shapes and dtypes of a tensor file without its data, and one tensor at a time on request."""

    def __init__(self, path: Path) -> None:
        """Open `.safetensors` or a zip-format PyTorch file (`weights_only`). Raises InputError."""
        if not path.is_file():
            raise InputError(f"{path} is missing.")
        self.path = path
        self._tensors: dict[str, Tensor] = {}
        self._copies: dict[Place, Tensor] = {}
        if path.suffix == ".safetensors":
            self.specs = _safetensors_specs(path)
        else:
            self._tensors = _pickled_tensors(path)
            self.specs = {k: (v.dtype, tuple(v.shape)) for k, v in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, contiguous on the CPU, in the file's dtype; names that share one in the file share it here."""
        if self.path.suffix != ".safetensors":
            tensor = self._tensors[name]
            if _place(tensor) not in self._copies:
                self._copies[_place(tensor)] = tensor.contiguous().clone()
            return self._copies[_place(tensor)]
        try:
            with safe_open(str(self.path), framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.path}: tensor '{name}' cannot be read: {error}.") from None


def _safetensors_specs(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The header, checked against the file's own size: entries lie end to end and fill the file."""
    n_file = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        n_header = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
        if not 2 <= n_header <= min(MAX_HEADER_BYTES, n_file - 8):
            raise InputError(f"{path} is not a safetensors file: its header claims {n_header} bytes.")
        raw = file.read(n_header)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {k: (v["dtype"], tuple(v["shape"]), *v["data_offsets"]) for k, v in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is not a safetensors file: its header is malformed ({error}).") from None
    for name, (kind, shape, *span) in entries.items():
        if kind not in DTYPES:
            raise InputError(f"{path}: tensor '{name}' has the unsupported dtype {kind}.")
        if not all(type(n) is int and n >= 0 for n in (*shape, *span)):
            raise InputError(f"{path}: tensor '{name}' has a malformed shape or offset.")
        if span[1] - span[0] != math.prod(shape) * DTYPES[kind].itemsize:
            raise InputError(
                f"{path}: tensor '{name}' has {span[1] - span[0]} bytes, not what its shape {shape} needs."
            )
    spans = sorted((start, stop) for _, _, start, stop in entries.values())
    ends = [0, *(stop for _, stop in spans)]
    if [*(start for start, _ in spans), n_file - 8 - n_header] != ends:
        raise InputError(f"{path}: the tensors its header lists do not fill the file exactly.")
    return {name: (DTYPES[kind], shape) for name, (kind, shape, *_) in entries.items()}


def _pickled_tensors(path: Path) -> dict[str, Tensor]:
    """A dict of tensors from a zip-format PyTorch file, memory-mapped; no code is run and nothing is inflated."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
        if any(p.compress_type != zipfile.ZIP_STORED or p.file_size != p.compress_size for p in parts):
            raise InputError(f"{path} holds compressed records, which PyTorch never writes.")
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except InputError:
        raise
    except Exception as error:  # the unpickler and the zip reader raise many kinds; none may pass as a crash
        raise InputError(f"{path} cannot be read as PyTorch weights: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise InputError(f"{path} must hold a dictionary from names to tensors.")
    for name, tensor in found.items():
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
            raise InputError(f"{path}: tensor '{name}' has the unsupported layout or dtype {tensor.dtype}.")
    claims = {_place(t): t.numel() * t.element_size() for t in found.values()}  # Medusa's blocks are one, many times
    if sum(claims.values()) > path.stat().st_size:
        raise InputError(f"{path}: its tensors claim more bytes than the file has.")
    return found
