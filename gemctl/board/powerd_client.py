"""The daemon's side of gemctl-powerd: asks for caps and keeps them alive.

    client = PowerdClient(config.sensors.powerd_socket)
    await client.cap_cpu(1_200_000)      None: no helper, so only pacing throttles
    await client.close()                 ends the caps

The helper ends a cap after half a minute without a message, and at the end of the connection. So a
task here speaks to it every RENEW_S while a cap is wanted, and asks again after it was restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemctl.errors import ApiError

RENEW_S = 8.0
TIMEOUT_S = 2.0
MODE_TIMEOUT_S = 25.0  # nvpmodel takes some seconds
ABSENT_S = 5.0  # after a failed connection, before the next attempt
MAX_LINE = 1 << 18


class PowerdClient:
    """One connection, made when it is needed. For one event loop.

    Methods return the helper's result, None where it is absent or silent, and raise
    ApiError("refused") with its sentence where it says no.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._absent_until = float("-inf")
        self._wanted: dict[str, dict[str, int | str]] = {}  # caps to ask for again
        self._renewing: asyncio.Task[None] | None = None
        self._number = 0

    @property
    def present(self) -> bool:
        """True while connected."""
        return self._streams is not None

    async def cap_cpu(self, khz: int, policy: int | None = None) -> dict[str, Any] | None:
        """Cap all clusters, or that of one policy, to a frequency of its range."""
        request: dict[str, int | str] = {"verb": "cap_cpu", "khz": khz}
        if policy is not None:
            request["policy"] = policy
        return await self._hold(f"cpu{'' if policy is None else policy}", request)

    async def cap_gpu(self, hz: int) -> dict[str, Any] | None:
        """Cap the GPU."""
        return await self._hold("gpu", {"verb": "cap_gpu", "hz": hz})

    async def nvpmodel(self, mode: int) -> dict[str, Any] | None:
        """Set a power mode; only on an operator's word. It stays, and ends all caps."""
        self._wanted.clear()
        return await self._ask({"verb": "nvpmodel", "mode": mode}, MODE_TIMEOUT_S)

    async def restore(self) -> dict[str, Any] | None:
        """End the caps."""
        self._wanted.clear()
        return await self._ask({"verb": "restore"}) if self.present else None

    async def status(self) -> dict[str, Any] | None:
        """What the machine allows and what is capped."""
        return await self._ask({"verb": "status"})

    async def close(self) -> None:
        """End the connection, and the caps with it."""
        self._wanted.clear()
        task, self._renewing = self._renewing, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._hang_up()

    async def _hold(self, key: str, request: dict[str, int | str]) -> dict[str, Any] | None:
        result = await self._ask(request)  # a cap that is refused is not asked for again
        if key == "cpu":  # for all clusters: it stands for what was asked of single ones
            self._wanted = {k: v for k, v in self._wanted.items() if not k.startswith("cpu")}
        self._wanted[key] = request
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return result

    async def _renew(self) -> None:
        """Say something now and then; after a new connection ask for the caps again."""
        asked = self._streams
        while self._wanted:
            await asyncio.sleep(RENEW_S)
            if self._streams is not None and self._streams is asked:
                await self._quietly({"verb": "status"})
            if self._wanted and (self._streams is None or self._streams is not asked):
                for request in list(self._wanted.values()):
                    await self._quietly(request)
                asked = self._streams

    async def _quietly(self, request: dict[str, int | str]) -> None:
        with contextlib.suppress(ApiError):  # the next cap asked for tells its caller
            await self._ask(request)

    async def _ask(
        self, request: dict[str, int | str], timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any] | None:
        async with self._lock:
            try:
                reply = await asyncio.wait_for(self._exchange(request), timeout_s)
            except (OSError, ValueError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError):
                await self._hang_up()
                return None
        if reply is None:
            return None
        if reply.get("ok") is not True:
            raise ApiError("refused", f"gemctl-powerd: {reply.get('error')}")
        result = reply.get("result")
        return result if isinstance(result, dict) else {}

    async def _exchange(self, request: dict[str, int | str]) -> dict[str, Any] | None:
        streams = self._streams or await self._connect()
        if streams is None:
            return None
        reader, writer = streams
        self._number += 1
        writer.write(json.dumps({"id": self._number, **request}).encode() + b"\n")
        await writer.drain()
        reply = json.loads(await reader.readuntil(b"\n"))
        if not isinstance(reply, dict):
            raise ValueError("no object")
        if reply.get("id") is None:  # the connection was refused
            await self._hang_up()
            self._absent_until = self._clock() + ABSENT_S
        elif reply["id"] != self._number:
            raise ValueError("an answer to something else")
        return reply

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        if self._clock() < self._absent_until:
            return None
        try:
            self._streams = await asyncio.open_unix_connection(str(self._path), limit=MAX_LINE)
        except OSError:
            self._absent_until = self._clock() + ABSENT_S
        return self._streams

    async def _hang_up(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()
