"""Where the installed commands begin; see gemrun/starting.py."""

from __future__ import annotations

from gemrun.starting import started


def gemmake() -> None:
    """The compiler."""
    started("gemmake", "gemmake.cli")


def gemcheck() -> None:
    """The checker."""
    started("gemcheck", "gemmake.check.cli")
