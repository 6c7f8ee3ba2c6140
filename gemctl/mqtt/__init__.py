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

if TYPE_CHECKING:
    from gemctl.mqtt.bridge import Bridge


def make_bridge(config: MqttConfig, service: Service, hub: EventHub, **options: Any) -> Bridge:
    """A bridge to `run(stop)` and to ask for `info()`; the options are those of Bridge.

    Raises ApiError where aiomqtt is missing or the device's name cannot be used.
    """
    try:
        from gemctl.mqtt.bridge import Bridge
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("aiomqtt", "paho"):
            raise
        reason = "mqtt.host: aiomqtt is not installed; install gembin-toolchain[mqtt], or empty it"
        raise ApiError("failed", reason) from None
    return Bridge(config, service, hub, **options)


async def run(config: MqttConfig, service: Service, hub: EventHub, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; at once where no broker is configured. Raises ApiError."""
    if config.host:
        await make_bridge(config, service, hub).run(stop)
