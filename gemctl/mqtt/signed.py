"""`mqtt.require_signed`: what a broker's command makes serve was signed by a key that we trust.

Stands between the bridge and the daemon's methods. It works out which version a command would make
serve, has its signature verified against models.keys_dir, and hands the command on; a replacement
and a load name that very version then. Commands of the local socket do not come through here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gemctl.errors import ApiError
from gemctl.mqtt.commands import Refusal
from gemctl.serve.models import Models
from gemctl.serve.slot import Model
from gemctl.service import Caller, Emit, Service
from gemctl.store import sign
from gemctl.store.copying import Pace

KEPT = 64  # verdicts that are remembered
ATTACHED = ("model.enable", "model.replace")  # may mean a program that attached itself
SERVES = ("model.replace", "model.load", "model.enable", "model.switch", "model.rollback")


class SignedOnly:
    """A Service. `attached`: is this the name of a program that attached itself."""

    def __init__(
        self, service: Service, models: Models, attached: Callable[[str | None], bool]
    ) -> None:
        self._service, self._models, self._attached = service, models, attached
        self._valid: dict[tuple[str, frozenset[bytes]], None] = {}

    def stats(self) -> dict[str, Any]:
        """As the daemon has it."""
        return self._service.stats()

    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        caller: Caller,
        emit: Emit | None = None,
    ) -> dict[str, Any]:
        """The daemon's answer. Raises Refusal for a version that nobody has signed."""
        checked = dict(params)
        found = self._version(method, checked) if method in SERVES else None
        if found is not None:
            name, digest = found
            await self._demand(method, name, digest)
            if method in ("model.replace", "model.load"):
                checked["digest"] = digest
        return await self._service.call(method, checked, caller, emit)

    def _version(self, method: str, params: Mapping[str, Any]) -> tuple[str, str] | None:
        """Name and digest of what would serve; None where the daemon itself will refuse."""
        name, given = params.get("name"), params.get("digest")
        if not isinstance(name, str | None):
            return None
        if method in ATTACHED and self._attached(name):
            return None  # its model is its own, and over MQTT it takes no version of the store
        try:
            model = self._models.named(name)
            digest = self._named(model, given) if given is not None else self._next(method, model)
        except ApiError:
            return None
        return None if digest is None else (model.name, digest)

    def _named(self, model: Model, given: Any) -> str | None:
        """The version whose digest begins so, where it is one."""
        present = (version.digest for version in self._models.store.versions(model.name).present)
        found = [digest for digest in present if digest.startswith(str(given))]
        return found[0] if len(found) == 1 else None

    def _next(self, method: str, model: Model) -> str | None:
        """The version that a command without a digest makes serve (models.py, replace.py)."""
        versions, trial = self._models.store.versions(model.name), self._models.state.trial
        if method == "model.rollback":
            if model.probation is None:
                return versions.previous
            return model.kept.digest if model.kept is not None else versions.current
        if model.current is not None and model.current.state != "empty":
            return model.current.digest
        on_trial = trial.digest if trial is not None and trial.name == model.name else None
        return on_trial or versions.current

    async def _demand(self, method: str, name: str, digest: str) -> None:
        """Raises Refusal where the signature is not valid. Read once, then remembered."""
        folder = self._models.config.models.keys_dir
        keys = await asyncio.to_thread(sign.load_keys, folder)
        known = (digest, frozenset(key.raw for key in keys.keys))
        if known in self._valid:
            return
        verdict = await asyncio.to_thread(self._verify, name, digest, folder)
        if verdict.kind != "valid":
            what = f"{method}: {name} {digest[:12]}: {verdict.sentence}"
            why = "mqtt.require_signed is on, so only the device's own gemctl takes it as it is"
            raise Refusal("refused", f"{what} ({why})", "signature")
        while len(self._valid) >= KEPT:
            del self._valid[next(iter(self._valid))]
        self._valid[known] = None

    def _verify(self, name: str, digest: str, folder: Path) -> sign.Verdict:
        descriptor = self._models.store.open(name, digest)
        try:
            pace = Pace(cancelled=self._models.stopping.is_set)
            return sign.check(descriptor, "required", folder, pace)
        finally:
            os.close(descriptor)
