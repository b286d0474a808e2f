"""`bandpo bounds`."""

from __future__ import annotations


def bounds() -> None:
    """Show the interval of probability ratios that each method allows a token."""
