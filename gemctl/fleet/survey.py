"""Before a rollout: which devices are concerned, and is each of them ready for it.

Every device is asked for the model. It answers what is in its store, so nothing is started that
would be refused for want of the version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemctl.errors import ApiError
from gemctl.fleet.link import FleetLink
from gemctl.fleet.plan import UNREADY, Outcome, RolloutOptions

NAMED = 10  # names in a sentence
ASKED_FOR_MODELS = 20  # devices that are asked which models they have
WORDS = {
    "offline": "offline",
    "absent": "model unknown",
    "not_staged": "version not staged",
    "bad_version": "found bad there before",
    "unready": "cannot tell",
}


@dataclass
class Device:
    """One device of a rollout."""

    outcome: Outcome = "pending"
    reason: str = ""
    stage: float | None = None
    started: float = 0.0
    heard: float = 0.0
    took: float = 0.0
    fresh: bool = False  # it was started by this run, so its time tells something


def names(some: Iterable[str], most: int = NAMED) -> str:
    """As many names as a sentence holds."""
    every = sorted(some)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def groups_of(link: FleetLink, device: str) -> tuple[str, ...]:
    """Its groups; where it is offline, as it told them last."""
    for table in (link.statuses, link.states):
        groups = table.get(device, {}).get("groups")
        if isinstance(groups, list):
            return tuple(str(group) for group in groups)
    return ()


def is_online(link: FleetLink, device: str) -> bool:
    """By its retained status."""
    return link.statuses.get(device, {}).get("state") == "online"


async def scope(link: FleetLink, group: str) -> list[str]:
    """Devices of the site, or of one of its groups. Raises not_found, with what there is."""
    if not link.statuses:
        sites = names(await link.sites())
        there = f"there are: {sites}" if sites else "and this user sees no other site"
        raise ApiError("not_found", f"site {link.site}: no device is there, {there}; check --site")
    found = [device for device in link.statuses if not group or group in groups_of(link, device)]
    if not found:
        every = {one for device in link.statuses for one in groups_of(link, device)}
        there = f"the groups of site {link.site} are: {names(every)}" if every else "it has none"
        raise ApiError("not_found", f"group {group}: no device is in it; {there}; check --group")
    return sorted(found)


async def look(link: FleetLink, options: RolloutOptions) -> dict[str, Device]:
    """Every device that is concerned. Raises not_found for a group or a model that nobody has."""
    everybody = await scope(link, options.group)
    wait_s = min(options.timeout_s, options.discover_s)
    found = await asyncio.gather(*(_ask(link, name, options, wait_s) for name in everybody))
    devices = dict(zip(everybody, found, strict=True))
    answered = [name for name in everybody if devices[name].outcome != "offline"]
    if answered and all(devices[name].outcome == "absent" for name in answered):
        await _refuse_model(link, options.name, answered[:ASKED_FOR_MODELS], wait_s)
    return devices


async def _refuse_model(link: FleetLink, name: str, devices: Sequence[str], wait_s: float) -> None:
    replies = await asyncio.gather(*(link.ask(d, "model.list", {}, wait_s) for d in devices))
    models = {
        str(row.get("name"))
        for reply in replies
        if reply is not None
        for row in (reply.get("result") or {}).get("models", [])
    }
    there = f"there are: {names(models)}" if models else "they have no model at all"
    raise ApiError("not_found", f"model {name}: no device has it; {there}; check --name")


async def _ask(link: FleetLink, name: str, options: RolloutOptions, wait_s: float) -> Device:
    if not is_online(link, name):
        return Device("offline", "its status says so")
    reply = await link.ask(name, "model.status", {"name": options.name}, wait_s)
    if reply is None:
        return Device("offline", f"no answer in {wait_s:g} s")
    error = reply.get("error")
    if error:
        outcome: Outcome = "absent" if error.get("code") == "not_found" else "unready"
        return Device(outcome, str(error.get("message", "")))
    now = time.monotonic()
    device = Device(started=now, heard=now)
    device.outcome, device.reason = judge(reply.get("result") or {}, options)
    return device


def judge(found: Mapping[str, Any], options: RolloutOptions) -> tuple[Outcome, str]:
    """What a device's model.status says of the version, and why."""
    wanted = options.digest
    if str(found.get("digest") or "").startswith(wanted):
        trial, state = bool(found.get("on_probation")), str(found.get("state"))
        shown = "" if state == "serving" else f", and is {state}"
        return ("running" if trial else "good"), f"has it already{shown}"
    if options.method == "model.switch":
        return "pending", ""
    for bad in found.get("bad") or ():
        if str(bad.get("digest")).startswith(wanted):
            return "bad_version", str(bad.get("reason") or "rolled back before")
    present = [str(one.get("digest")) for one in found.get("present") or ()]
    fitting = [digest for digest in present if digest.startswith(wanted)]
    if len(fitting) == 1:
        return "pending", ""
    if fitting:
        return "not_staged", f"{len(fitting)} versions begin with {wanted}; give more digits"
    there = ", ".join(digest[:12] for digest in present[:4]) or "none"
    return "not_staged", f"{wanted[:12]} is not in its store; there: {there}"


def unready(devices: Mapping[str, Device], among: Iterable[str]) -> dict[str, list[str]]:
    """Names of devices that cannot take part, by why."""
    found: dict[str, list[str]] = {}
    for name in among:
        if devices[name].outcome in UNREADY:
            found.setdefault(devices[name].outcome, []).append(name)
    return found


def sentence(found: Mapping[str, Sequence[str]]) -> str:
    """Who is not ready, by why."""
    return "; ".join(f"{WORDS[why]}: {names(some)}" for why, some in found.items())
