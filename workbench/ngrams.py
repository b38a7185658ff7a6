"""Where a text went on after the latest earlier occurrence of its own end: prompt lookup, without a model or torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class NgramIndex:
    """A text so far and, per n-gram up to `max_ngram` tokens, where the text went on after its latest occurrence."""

    max_ngram: int
    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens one by one; the n-grams that end just before each now have a continuation, so can be found."""
        text, after = self.tokens, self.after
        for token in tokens:
            end = len(text)
            for n in range(1, min(self.max_ngram, end) + 1):
                after[tuple(text[end - n :])] = end
            text.append(token)

    def copy(self, n_tokens: int) -> list[int]:
        """The tokens that followed the latest earlier occurrence of the longest suffix found; empty if none is."""
        end = len(self.tokens)
        for n in range(min(self.max_ngram, end), 0, -1):
            start = self.after.get(tuple(self.tokens[end - n :]))
            if start is not None:
                return self.tokens[start : start + n_tokens]
        return []
