"""`on_loss = "conservative"`: slower while nobody can reach the device over MQTT."""

from __future__ import annotations

import asyncio
from typing import Any

from gemctl import waiting
from gemctl.errors import ApiError
from gemctl.service import Caller, Service

GRACE_S = 5.0  # a broker that restarts is not lost
RENEW_S = 30.0
HOLD_S = 90.0  # it ends by itself, and nothing of it is kept over a restart
BACK_S = 1.0  # the mode before, said for so long, ends it; then the operator's own word holds
STRICTER = ("conservative", "silent")
_CALLER = Caller("connection lost (mqtt)", True, "internal")


class LossGuard:
    """Watches `up`: set while there is a connection."""

    def __init__(
        self, service: Service, up: asyncio.Event, down: asyncio.Event, grace_s: float = GRACE_S
    ) -> None:
        self._service, self._up, self._down, self._grace_s = service, up, down, grace_s

    async def run(self) -> None:
        """Until cancelled; the throttle is then as it was."""
        while True:
            await self._down.wait()
            if await self._comes_up(self._grace_s):
                continue
            before = await self._mode()
            if before is None or before in STRICTER:
                await self._up.wait()
                continue
            try:
                await self._hold()
            finally:
                await self._restore(before)

    async def _hold(self) -> None:
        """Conservative for a while, again and again, until the connection is back."""
        while True:
            await self._call("throttle.set", {"mode": "conservative", "for_s": HOLD_S})
            if await self._comes_up(RENEW_S):
                return

    async def _restore(self, mode: str) -> None:
        """Unless somebody chose another mode meanwhile."""
        if await self._mode() == "conservative":
            await self._call("throttle.set", {"mode": mode, "for_s": BACK_S})

    async def _comes_up(self, seconds: float) -> bool:
        await waiting.ended(self._up, seconds)
        return self._up.is_set()

    async def _mode(self) -> str | None:
        mode = (await self._call("throttle.get", {})).get("mode")
        return mode if isinstance(mode, str) else None

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """What the daemon refuses stays as it is: losing a broker breaks nothing."""
        try:
            return await self._service.call(method, params, _CALLER)
        except ApiError:
            return {}
