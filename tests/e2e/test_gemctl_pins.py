"""A memory refusal proposes what may be unloaded: its words, typed as they stand, make room."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from candidates import digest_of
from daemon import Daemon, settled
from gemctl.client import Refused
from gemctl.serve.artifact import declared


def test_the_proposal_of_a_refusal_can_be_carried_out(versions: tuple[Path, Path]) -> None:
    size = declared(versions[0]).ram_total
    with Daemon(models={"memory_most_bytes": size + size // 2, "probation_s": 0.2}) as daemon:
        daemon.replace(versions[0], name="first")
        settled(daemon, "first")
        daemon.call("model.pin", name="first")
        with pytest.raises(Refused) as refused:
            daemon.replace(versions[1], name="second")
        assert refused.value.code == "no_memory"
        assert "pinned)" in str(refused.value)
        with pytest.raises(Refused) as loaded:
            daemon.call("model.remove", name="first")
        proposed = str(refused.value).rpartition("; ")[2]
        assert str(loaded.value).endswith(f"{proposed} first")
        with pytest.raises(Refused) as used:
            daemon.call("model.remove", name="first", digest=digest_of(versions[0]))
        assert str(used.value).endswith(f"{proposed} first")
        for line in proposed.split(", then "):
            daemon.gemctl(*shlex.split(line)[1:])
        daemon.replace(versions[1], name="second")
        assert daemon.ask("abc", model="second")["text"]
