"""What the fleet commands show to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemctl.fleet.plan import UNREADY
from gemctl.fleet.survey import WORDS
from gemctl.show import render


def progress(found: Mapping[str, Any]) -> str:
    """A step of a rollout, with how far it is."""
    name = found["device"] or "rollout"
    line = f"  {name:<24} {found['outcome'].replace('_', ' '):<12} {found['text']}"
    if not found["total"]:
        return line.rstrip()
    left = found["left_s"]
    more = f", about {span(left)} left" if left and found["done"] < found["total"] else ""
    return f"{line.rstrip()}  [{found['done']} of {found['total']}{more}]"


def span(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def rollout(found: Mapping[str, Any]) -> str:
    """gemctl fleet rollout: a line a device, then the sentence."""
    rows = [["device", "stage", "outcome", "seconds", "reason"]]
    for row in found["rows"]:
        stage = render.UNKNOWN if row["stage"] is None else f"{row['stage']:g} %"
        took = render.number(row["seconds"]) if row["seconds"] else render.UNKNOWN
        outcome = row["outcome"].replace("_", " ")
        rows.append([row["device"], stage, outcome, took, row["reason"]])
    return f"{render.table(rows)}\n{found['sentence']}"


def refused(found: Mapping[str, Any]) -> str:
    """A rollout that did not begin: who is not ready, by why."""
    blocks = []
    for why in UNREADY:
        some = sorted(
            (row for row in found["rows"] if row["outcome"] == why), key=lambda row: row["device"]
        )
        if some:
            blocks.append(f"{WORDS[why]}:")
            blocks += [f"  {row['device']:<24} {row['reason']}".rstrip() for row in some]
    return "\n".join([*blocks, found["sentence"]])
