"""A live session on the target that is held to a recorded text: it can be set to any position of it."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.sampling import Chooser
from workbench.target import Session


class HeldSession(Session):
    """A session that verifies for real, wherever on the text it is made to stand."""

    def anew(self) -> HeldSession:
        """An empty session like this one."""
        return HeldSession(self.target, self.cache.capacity, self.sampling, self.turn)

    def stand_at(self, prompt_ids: Sequence[int], tokens: Sequence[int], position: int) -> None:
        """Stand at a position >= 1 of the text: its root is tokens[position - 1].

        An empty session runs prompt and text; one that has committed up to there stays as it is, but for the root.
        """
        prompt = list(prompt_ids)
        if not self.length:
            self.prefill([*prompt, *tokens[: position - 1]])
        if self.length != len(prompt) + position - 1:
            raise ValueError(f"the session holds {self.length} rows, not those up to position {position}")
        self._choose = Chooser(self.sampling, prompt, self.turn)
        self.n_committed, self.root = position, tokens[position - 1]
