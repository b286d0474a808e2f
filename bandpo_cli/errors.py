"""The one family of errors that are the user's to mend. The command line prints them in a line, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user gave: printed as one line without a traceback, exit code 2."""


class RunError(Exception):
    """A run that cannot go on, through no mistake of the user's: one line, exit code 1. The run folder is whole."""


class ConfigError(UserError):
    """A setting that cannot be used. The message names the key, the value and what is allowed."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest of `allowed`, or an empty string when none is close."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
