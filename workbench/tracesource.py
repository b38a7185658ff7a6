"""A trace's text and pools as replay asks for them: held in memory, or read again piece by piece. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from workbench.poolreader import pool_kinds, read_pools, read_text, stream_pools
from workbench.pools import DraftPools, Text
from workbench.trace import Trace, open_trace


@dataclass
class TracePools:
    """Pools of an opened trace. Held ones are read when first asked for, a drafter at a time."""

    trace: Trace
    is_streamed: bool = False
    _held: dict[str, DraftPools] = field(default_factory=dict)

    @cached_property
    def text(self) -> Text:
        """The text of plain decoding."""
        return read_text(self.trace)

    @cached_property
    def drafters(self) -> tuple[str, ...]:
        """Whose pools there are."""
        return tuple(pool_kinds(self.trace))

    def parts(self, drafter: str) -> Iterator[tuple[slice, DraftPools]]:
        """Runs of the text's rows, in order, and their pools."""
        if self.is_streamed:
            yield from stream_pools(self.trace, drafter, self.text)
            return
        if drafter not in self._held:
            self._held[drafter] = read_pools(self.trace, drafter, self.text)
        yield slice(0, self.text.n_rows), self._held[drafter]


def open_source(folder: Path, is_streamed: bool = False) -> TracePools:
    """Open a trace folder. InputError on what is no trace."""
    return TracePools(open_trace(folder), is_streamed)
