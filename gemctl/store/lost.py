"""A state.json that is gone beside a store that is not: nobody wants the models any longer.

The daemon writes one at its first start: one that is missing beside good versions was lost.
"""

from __future__ import annotations

from pathlib import Path

from gemctl.errors import ApiError
from gemctl.store.state import STATE, State
from gemctl.store.store import Store

SHOWN = 5  # names in a sentence
LOST = "which models are loaded, which one answers, pins, priorities, the throttle's settings"


class Lost:
    """Found at a start; `sentence` tells what is still to be done."""

    def __init__(self, path: Path, names: tuple[str, ...] = ()) -> None:
        self._path = path
        self._names = names

    def sentence(self, state: State) -> str:
        """What is lost and what to type; empty once every model is wanted again, or removed."""
        left = [name for name in self._names if name not in state.models]
        if not left:
            return ""
        shown = ", ".join(left[:SHOWN]) + (f" and {len(left) - SHOWN} more" if left[SHOWN:] else "")
        what = f"{self._path}: was lost, and with it {LOST}; in the store and not loaded: {shown}"
        switch = f", gemctl switch-model {left[0]} for the one that answers"
        one = f"gemctl model load {left[0]}{'' if state.active else switch}"
        return f"{what}; {one}, or gemctl model remove what nobody needs"


def find(folder: Path, store: Store, state: State, missing: bool) -> Lost:
    """What a start found. `missing`: there was no state.json, or one so damaged that it was put
    aside; `state`: what is wanted all the same."""
    path = folder / STATE
    if not missing or state != State():
        return Lost(path)
    return Lost(path, tuple(name for name in store.names() if _is_good(store, name)))


def _is_good(store: Store, name: str) -> bool:
    """It has served: what was only staged was wanted by nobody."""
    try:
        return store.versions(name).current is not None
    except ApiError:
        return False
