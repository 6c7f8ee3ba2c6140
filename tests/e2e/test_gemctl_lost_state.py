"""A state.json that was lost beside a full store is told, with what to type, until it is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon import Daemon, answer_of, settled

PROMPT = "abc"


@pytest.fixture
def daemon(versions: tuple[Path, Path]) -> Iterator[Daemon]:
    with Daemon() as made:
        for name, path in zip(("pilot", "spare"), versions, strict=True):
            made.replace(path, name=name)
            settled(made, name)
        yield made


def checks(daemon: Daemon) -> list[dict[str, Any]]:
    return [one for one in daemon.call("doctor")["checks"] if one["name"] == "state"]


def test_it_is_told_until_the_models_are_wanted_again(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    assert checks(daemon) == []
    daemon.stop()
    for name in ("state.json", "state.json.previous"):
        (daemon.folder / "state" / name).unlink()
    daemon.start()
    (found,) = checks(daemon)
    assert found["level"] == "bad"
    for part in (
        "state.json: was lost, and with it which models are loaded",
        "in the store and not loaded: pilot, spare; gemctl model load pilot",
        "gemctl switch-model pilot for the one that answers",
    ):
        assert part in found["text"]
    assert found["text"] in daemon.log.read_text(encoding="utf-8")
    assert "was lost" in daemon.gemctl("doctor", code=8)

    daemon.stop()
    daemon.start()  # still lost: nothing was done
    assert "pilot, spare" in checks(daemon)[0]["text"]
    daemon.gemctl("model", "load", "pilot")
    (found,) = checks(daemon)
    assert "not loaded: spare; gemctl model load spare, or gemctl model remove" in found["text"]
    daemon.gemctl("model", "load", "spare")
    assert checks(daemon) == []
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
    daemon.stop()
    daemon.start()
    assert checks(daemon) == []


def test_a_new_store_and_a_damaged_state(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """The first start writes one; a damaged one without the one before it is lost as well."""
    with Daemon() as fresh:
        assert (fresh.folder / "state/state.json").exists()
        assert checks(fresh) == []
        fresh.gemctl("model", "stage", versions[0], "--name", "later")
        fresh.stop()
        fresh.start()
        assert checks(fresh) == []  # what was only staged was wanted by nobody
    daemon.stop()
    (daemon.folder / "state/state.json").write_text("{", encoding="utf-8")
    (daemon.folder / "state/state.json.previous").unlink()
    daemon.start()
    assert "was lost" in checks(daemon)[0]["text"]
