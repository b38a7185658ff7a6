"""The one error a person can mend: bad input, said in one clear sentence."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input from outside (a file, a flag, a checkpoint). The message is one sentence that names what is wrong.

    Doors print it to standard error and exit with status 2.
    """
