"""Commands after a probation: to tell RAUC, Mender or SWUpdate what became of a version."""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from gemctl import waiting
from gemctl.config import HooksConfig
from gemctl.events import EventHub


async def run(
    config: HooksConfig, outcome: Literal["good", "bad"], model: str, digest: str, hub: EventHub
) -> None:
    """Run the hook of an outcome, if there is one. It cannot hurt: its end is an event."""
    words = config.probation_good if outcome == "good" else config.probation_bad
    if not words:
        return
    told = {"GEMCTL_MODEL": model, "GEMCTL_DIGEST": digest, "GEMCTL_OUTCOME": outcome}
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **told},
        )
        code: int | str
        try:
            code = await waiting.within(config.timeout_s, process.wait())
        except TimeoutError:
            process.kill()
            await process.wait()
            code = f"killed after {config.timeout_s:g} s"
    except OSError as error:
        code = error.strerror or str(error)
    hub.publish("hook", model=model, outcome=outcome, command=words[0], code=code)
