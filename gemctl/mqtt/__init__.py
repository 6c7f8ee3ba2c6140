"""MQTT: the daemon's methods, figures and events on a broker. MQTT.md describes the topics.

Losing the broker never stops anything: the bridge tries again for ever, and keeps a bounded number
of events and replies meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gemctl.config import MqttConfig
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.service import Service
from gemrun import extras

if TYPE_CHECKING:
    from gemctl.mqtt.bridge import Bridge


def make_bridge(config: MqttConfig, service: Service, hub: EventHub, **options: Any) -> Bridge:
    """A bridge to `run(stop)` and to ask for `info()`; the options are those of Bridge.

    Raises ApiError where aiomqtt is missing or broken, or the device's name cannot be used.
    """
    reason = extras.problem("aiomqtt", "aiomqtt", "mqtt")
    if reason is not None:
        raise ApiError("failed", f"mqtt.host: {reason}, or empty it")
    from gemctl.mqtt.bridge import Bridge

    return Bridge(config, service, hub, **options)


async def run(config: MqttConfig, service: Service, hub: EventHub, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; at once where no broker is configured. Raises ApiError."""
    if config.host:
        await make_bridge(config, service, hub).run(stop)
