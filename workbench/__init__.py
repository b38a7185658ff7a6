"""A workbench for speculative-decoding policies: record a run once, replay any policy on it."""

from __future__ import annotations

__version__ = "0.1.0"
