"""Many devices on one broker: who is there, and a new version stage by stage.

A rollout asks every device of the site or group what it has, and does not begin where one of those
that it would reach is not ready. It orders them by a hash of name and digest, and sends
`model.replace` (or `model.switch`) to the first few per cent. A device is good when its probation
says so; it rolls back, or refuses, by its own word. Too many of these, or ones that fall silent,
halt the rollout: nothing more is started. Run it again to go on: devices that have the version
count as good. The version itself reaches the devices by other means, before.

plan.py       options, rows, the next step
survey.py     who is concerned, and ready
carrying.py   a rollout at work
link.py       the connection
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemctl.config import MqttConfig
from gemctl.errors import ApiError
from gemctl.fleet.plan import (
    DISCOVER_S,
    UNREADY,
    Decision,
    Outcome,
    Progress,
    RolloutOptions,
    RolloutResult,
    Row,
    decide,
    order,
    stage_of,
    time_left,
)
from gemrun import extras

if TYPE_CHECKING:
    from gemctl.fleet.link import FleetLink

__all__ = [
    "UNREADY", "Decision", "DeviceStatus", "MqttConfig", "Outcome", "Progress", "RolloutOptions",
    "RolloutResult", "Row", "decide", "order", "rollout", "stage_of", "status", "time_left",
]  # fmt: skip


@dataclass(frozen=True)
class DeviceStatus:
    """What the retained topics say of a device. Null where it did not tell."""

    device: str
    online: bool
    groups: tuple[str, ...] = ()
    model: str | None = None
    digest: str | None = None
    state: str | None = None
    throttle_mode: str | None = None
    throttle_level: int | None = None


@asynccontextmanager
async def _connected(broker: MqttConfig) -> AsyncIterator[FleetLink]:
    reason = extras.problem("aiomqtt", "aiomqtt", "mqtt")
    if reason is not None:
        raise ApiError("failed", f"fleet: {reason}")
    from gemctl.fleet.link import FleetLink

    link = FleetLink(broker, f"fleet-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        await link.open()
        yield link
    finally:
        await link.close()


def _status_of(link: FleetLink, device: str) -> DeviceStatus:
    from gemctl.fleet import survey

    state = link.states.get(device, {})
    throttle = state.get("throttle") or {}
    return DeviceStatus(
        device=device,
        online=survey.is_online(link, device),
        groups=survey.groups_of(link, device),
        model=state.get("model"),
        digest=state.get("digest"),
        state=state.get("state"),
        throttle_mode=throttle.get("mode"),
        throttle_level=throttle.get("level"),
    )


async def status(
    broker: MqttConfig, group: str = "", discover_s: float = DISCOVER_S
) -> list[DeviceStatus]:
    """Devices of a site, or of one of its groups, by name.

    Raises ApiError: failed without a broker, not_found for a site or group that nobody is in.
    """
    async with _connected(broker) as link:
        from gemctl.fleet import survey

        await link.discover(discover_s)
        return [_status_of(link, device) for device in await survey.scope(link, group)]


async def rollout(
    options: RolloutOptions, progress: Callable[[Progress], None] = lambda news: None
) -> RolloutResult:
    """Carry it out.

    Raises ApiError: bad_request for options that make no sense, not_found for a site, group or
    model that nobody has, failed where the broker cannot be used, or is lost on the way.
    """
    try:
        decide([], {}, options.percents)
    except ValueError as error:
        raise ApiError("bad_request", str(error)) from None
    if not re.fullmatch(r"[0-9a-f]{8,64}", options.digest):
        what = f"--digest: {options.digest[:70]!r} is none; give 8 to 64 of 0-9 a-f"
        raise ApiError("bad_request", f"{what}, as gemctl model stage printed it")
    async with _connected(options.broker) as link:
        from gemctl.fleet.carrying import Rollout

        await link.discover(options.discover_s)
        return await Rollout(options, link, progress).run()
