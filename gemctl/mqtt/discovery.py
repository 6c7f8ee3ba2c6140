"""What Home Assistant needs to show a device by itself: one retained message, or its removal."""

from __future__ import annotations

from typing import Any

from gemctl.mqtt.commands import Topics
from gemctl.mqtt.dispatch import encode
from gemctl.mqtt.outbox import Item


def _sensor(identity: str, key: str, name: str, value: str, **more: Any) -> dict[str, Any]:
    return {
        "p": "sensor",
        "unique_id": f"{identity}-{key}",
        "name": name,
        "value_template": "{{ value_json." + value + " }}",
        **more,
    }


def document(topics: Topics, expire_s: int) -> dict[str, Any]:
    """Four sensors of one device; figures older than `expire_s` seconds are shown as unknown."""
    identity = f"gemctl-{topics.site}-{topics.device}"
    figure: dict[str, Any] = {"state_class": "measurement", "expire_after": expire_s}
    celsius = {"device_class": "temperature", "unit_of_measurement": "°C"}
    speed = {"unit_of_measurement": "tokens/s"}
    at_state = {"state_topic": topics.own("state")}
    sensors = {
        "temperature": _sensor(identity, "temp", "Temperature", "temp_c", **celsius, **figure),
        "throughput": _sensor(identity, "tps", "Throughput", "throughput_tps", **speed, **figure),
        "throttle": _sensor(identity, "throttle", "Throttle level", "throttle.level"),
        "state": _sensor(identity, "state", "Model state", "state", **at_state),
    }
    return {
        "dev": {"ids": [identity], "name": topics.device, "mf": "gemctl"},
        "o": {"name": "gemctl"},
        "state_topic": topics.own("stats"),
        "availability_topic": topics.own("status"),
        "availability_template": "{{ value_json.state }}",
        "cmps": sensors,
    }


def announcement(topics: Topics, wanted: bool, expire_s: int) -> Item:
    """The message to publish after every connection; an empty one removes the device."""
    topic = f"homeassistant/device/gemctl-{topics.site}-{topics.device}/config"
    payload = encode(document(topics, expire_s)) if wanted else b""
    return Item(topic, payload, retain=True, queue="")
