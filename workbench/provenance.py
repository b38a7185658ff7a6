"""Where a result came from: versions, source revision, machine, content hashes. Every output carries it. No torch."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "numba", "pyarrow", "safetensors")
_READ_BYTES = 1 << 20


def timestamp() -> str:
    """The present moment in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of Python, the workbench and the packages that decide its numbers ("absent" where not installed)."""
    found = {"python": platform.python_version(), "workbench": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def git_state() -> dict[str, Any]:
    """Revision of the source checkout and whether it has uncommitted changes; both None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        top = Path(_git(folder, "rev-parse", "--show-toplevel"))
        if top != folder.parent:  # installed inside some other repository
            return {"sha": None, "is_dirty": None}
        return {"sha": _git(folder, "rev-parse", "HEAD"), "is_dirty": bool(_git(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"sha": None, "is_dirty": None}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """System, processor, logical cores this process may use, and memory in bytes (None where unknown)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "n_cores": cores,
        "memory_bytes": _memory_bytes(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def text_hash(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()
